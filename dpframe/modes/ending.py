"""What a training says last: the best epoch, where it is, and what one types next."""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpframe.checkpoint import seal
from dpframe.config.compose import Composed
from dpframe.config.start import key_of
from dpframe.launch import environment
from dpframe.launch.rank import has_parent


def ending(
    job: Composed,
    summary: Mapping[str, Any],
    dashboards: Iterable[str | None],
    *,
    goes_longer: bool,
) -> str:
    """`dashboards` are the commands of the loggers that have one; not `goes_longer`: its schedule
    ends with it."""
    when = f"epoch {summary['best_epoch']}, step {summary['best_step']}"
    rows = [("best", f"{when}: {name} {value:.6g}") for name, value in summary["best"].items()]
    rows.append(("run", summary["directory"]))
    if summary["checkpoint"] is not None:
        rows.append(("test", _command(job, "mode=test", f"checkpoint={summary['checkpoint']}")))
        if goes_longer:
            longer = _longer(job, summary)
            rows.append(("resume", _command(job, f"resume={summary['directory']}", *longer)))
    rows += [("dashboard", command) for command in dashboards if command]
    return "\n" + "\n".join(f"{name:<10} {value}" for name, value in rows)


def going_on(job: Composed, directory: str) -> str:
    """The command that goes on with a run. A program, and a launcher of ranks, have their own."""
    if job.history is not None or (environment.is_rank() and not has_parent()):
        return shlex.quote(f"resume={directory}")
    return _command(job, f"resume={directory}")


def add_going_on(error: Exception, job: Composed, directory: str) -> None:
    """After a traceback, where the run is and how to go on with it. A sweep says so itself."""
    is_alone = job.number is None and job.history is None
    if is_alone and job.settings.mode == "fit" and os.path.isdir(directory):
        is_saved = seal.newest_of_run(directory) is not None
        then = f"go on with {going_on(job, directory)}" if is_saved else "nothing was saved"
        error.add_note(f"dpframe: the run is in {directory}; {then}")


def _longer(job: Composed, summary: Mapping[str, Any]) -> list[str]:
    """Twice as far: a run that is done has nothing left to resume. It may have come further than
    its limits, which a resume can lower."""
    limits = {f"max_{name}": summary[name] for name in ("epochs", "steps")}
    return [
        f"trainer.{name}={2 * max(limit, reached)}"
        for name, reached in limits.items()
        if (limit := getattr(job.settings.trainer, name)) is not None
    ]


def _command(job: Composed, *overrides: str) -> str:
    is_module = Path(sys.argv[0]).parts[-2:] == ("dpframe", "__main__.py")
    words = ["python", "-m", "dpframe"] if is_module else ["dpframe"]
    own = ["--config-dir", os.path.relpath(job.config_dir)] if job.config_dir is not None else []
    own += [each for each in job.typed if key_of(each) == "trusted_modules"]  # typed each time
    return shlex.join([*words, *own, *overrides])
