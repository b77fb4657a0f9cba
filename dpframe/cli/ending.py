"""What a training says last: the best epoch, where it is, and what one types next."""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpframe.cli.compose import Composed


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
            rows.append(("resume", _command(job, f"resume={summary['directory']}", *_longer(job))))
    rows += [("dashboard", command) for command in dashboards if command]
    return "\n" + "\n".join(f"{name:<10} {value}" for name, value in rows)


def _longer(job: Composed) -> list[str]:
    """Twice as far: a run that is done has nothing left to resume."""
    limits = job.settings.trainer
    names = ("max_epochs", "max_steps")
    return [f"trainer.{n}={2 * limit}" for n in names if (limit := getattr(limits, n)) is not None]


def _command(job: Composed, *overrides: str) -> str:
    is_module = Path(sys.argv[0]).parts[-2:] == ("dpframe", "__main__.py")
    words = ["python", "-m", "dpframe"] if is_module else ["dpframe"]
    own = ["--config-dir", os.path.relpath(job.config_dir)] if job.config_dir is not None else []
    return shlex.join([*words, *own, *overrides])
