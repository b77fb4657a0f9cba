"""What modes share that keep nothing: what they refuse, and a report that is shown and written."""

from pathlib import Path
from typing import Any

from dpframe.config.compose import Composed
from dpframe.errors import UserError, printable
from dpframe.launch import environment
from dpframe.modes.directory import Directory
from dpframe.util import files

HOUR = 3600


def refuse_checkpoint(job: Composed, why: str) -> None:
    settings = job.settings
    if settings.checkpoint is not None:
        raise UserError(
            f"checkpoint={settings.checkpoint}: mode={settings.mode} {why}; leave it out"
        )


def refuse_ranks(mode: str) -> None:
    if environment.is_one_of_several():
        raise UserError(
            f"mode={mode} begins in one process; start it without {environment.find_launcher()}"
        )


def show(job: Composed, text: str, found: dict[str, Any] | None) -> None:
    """Prints a report. Into a directory that was given it also writes the report, and `found` as
    summary.json."""
    print(printable(text), flush=True)
    if not job.is_run_dir_given:
        return
    directory = Directory(Path(job.run_dir), is_given=True)
    path = Path(directory.make(job.notes))
    texts = {f"{job.settings.mode}.txt": f"{text}\n"}
    if found is not None:
        summary = {"recipe": job.settings.recipe} | found
        texts["summary.json"] = f"{files.json_text(summary, indent=2)}\n"
    for name, content in texts.items():
        (path / name).write_text(content, encoding="utf-8")
    directory.release()


# ---- units


def size(count: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:.3g} {units[0]}"


def time(seconds: float) -> str:
    if seconds >= 100 * HOUR:
        return f"{seconds / (24 * HOUR):.3g} days"
    if seconds >= 3 * HOUR:
        return f"{seconds / HOUR:.3g} h"
    if seconds >= 1000:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us" if seconds else "0"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
