"""How a run ends: its summary.json, the last lines on the screen, and what one types next."""

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpframe.callbacks.early_stopping import EarlyStopping
from dpframe.checkpoint import seal
from dpframe.config.compose import Composed
from dpframe.config.schema import RunSettings
from dpframe.config.untrusted import must_be_typed
from dpframe.data import DataSets
from dpframe.errors import Failure, UserError, printable
from dpframe.launch import environment
from dpframe.launch.rank import has_parent
from dpframe.launch.rank_errors import RankFailed
from dpframe.modes import provenance
from dpframe.strategies import Strategy
from dpframe.trainer import Trainer
from dpframe.trainer.optim.schedule import ends_with_training
from dpframe.trainer.progress import Progress
from dpframe.util import files, traces
from dpframe.util.terminal import coloured


def named(settings: RunSettings) -> dict[str, Any]:
    """What a summary begins with."""
    return {key: getattr(settings, key) for key in ("recipe", "mode", "name", "tags", "notes")}


def facts_of(strategy: Strategy, progress: Progress) -> dict[str, Any]:
    """What a summary has however the run ends."""
    seconds = progress.seconds
    return {
        "strategy": strategy.name,
        "replicas": strategy.replicas,
        "devices": strategy.devices,
        "epochs": progress.epoch,
        "steps": progress.global_step,
        "skipped_steps": progress.skipped_steps,
        "samples_per_second": progress.rows_seen / seconds if seconds else 0.0,
        "seconds": seconds,
        "data_wait_share": progress.data_seconds / seconds if seconds else 0.0,
    }


def note_failure(directory: Path, error: Exception, job: Composed) -> None:
    """In summary.json, for scripts and sweeps; run.log has it, too."""
    if isinstance(error, UserError):
        reason, details = str(error), error.details
    elif isinstance(error, RankFailed):
        reason, details = error.reason, error.whole
    else:
        reason, details = traces.last_lines(error), traces.whole(error)
    note_ending(directory, job, "failed", {"reason": reason, "traceback": details})


def note_ending(directory: Path, job: Composed, status: str, facts: Mapping[str, Any]) -> None:
    with suppress(Failure):  # a full disk may be why it has failed
        own = {**named(job.settings), "status": status}
        write_summary(directory, {**own, **facts, "origin": provenance.summarized(directory)})


def write_summary(directory: Path, summary: Mapping[str, Any]) -> None:
    path = directory / "summary.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)  # it may have been deleted since
        files.write_text(path, files.json_text(summary, indent=2) + "\n")
    except OSError as error:
        raise Failure(f"the run is done, but {path} can't be written: {error.strerror}") from error


def last_words(job: Composed, summary: Mapping[str, Any], trainer: Trainer) -> str:
    """What a training prints at its end: the best epoch, where it is, and what one types next."""
    when = f"epoch {summary['best_epoch']}, step {summary['best_step']}"
    rows = [("best", f"{when}: {name} {value:.6g}") for name, value in summary["best"].items()]
    rows.append(("run", summary["directory"]))
    if summary["checkpoint"] is not None:
        data = trainer.data
        is_left_out = isinstance(data, DataSets) and data.test_dataset() is None
        if data.has_own("test_dataset") and not is_left_out:
            rows.append(("test", command(job, "mode=test", f"checkpoint={summary['checkpoint']}")))
        if (longer := _longer(job, summary, trainer)) is not None:
            rows.append(("resume", command(job, f"resume={summary['directory']}", *longer)))
    dashboards = [logger.dashboard(summary["directory"]) for logger in trainer.loggers]
    rows += [("dashboard", command) for command in dashboards if command]
    lines = [printable(f"{name:<10} {value}") for name, value in rows]
    if summary["best"]:
        lines[0] = coloured(lines[0], "green")
    return "\n".join(["", *lines])


def going_on(job: Composed, directory: str) -> str:
    """The command that goes on with a run. A program, and a launcher of ranks, have their own."""
    if job.history is not None or (environment.is_rank() and not has_parent()):
        return shlex.quote(f"resume={directory}")
    return command(job, f"resume={directory}")


def add_going_on(error: Exception, job: Composed, directory: str) -> None:
    """After a traceback, where the run is and how to go on with it. A sweep says so itself."""
    is_alone = job.number is None and job.history is None
    if is_alone and job.settings.mode == "fit" and os.path.isdir(directory):
        is_saved = seal.newest_of_run(directory) is not None
        then = f"go on with {going_on(job, directory)}" if is_saved else "nothing was saved"
        error.add_note(f"dpframe: the run is in {directory}; {then}")


def _longer(job: Composed, summary: Mapping[str, Any], trainer: Trainer) -> list[str] | None:
    """What lets a resume train further: twice the limits that are reached, and no more of what has
    stopped the run. None: a schedule has ended, or a callback would stop it again."""
    settings, epochs, steps = job.settings.trainer, summary["epochs"], summary["steps"]
    schedulers = [update.scheduler for update in trainer.updates.values()]
    twice = []
    if settings.reached(epochs, steps):  # or passed: a resume can lower them
        if any(map(ends_with_training, schedulers)):
            return None
        done = {"max_epochs": epochs, "max_steps": steps}
        limits = {key: limit for key in done if (limit := getattr(settings, key)) is not None}
        twice = [f"trainer.{key}={2 * max(limit, done[key])}" for key, limit in limits.items()]
    if not trainer.stop_reason:
        return twice
    if settings.max_seconds is not None and trainer.clock > settings.max_seconds:
        return twice or ["trainer.max_seconds=null"]
    stoppers = [c for c in trainer.callbacks if isinstance(c, EarlyStopping) and c.is_due]
    has_key = job.config["callbacks"].get("early_stopping") is not None
    return ["callbacks.early_stopping=false", *twice] if stoppers and has_key else None


def command(job: Composed, *overrides: str) -> str:
    """What one types for these overrides, with those of this start that are typed each time."""
    is_module = Path(sys.argv[0]).parts[-2:] == ("dpframe", "__main__.py")
    words = ["python", "-m", "dpframe"] if is_module else ["dpframe"]
    own = ["--config-dir", os.path.relpath(job.config_dir)] if job.config_dir is not None else []
    own += [each for each in job.typed if must_be_typed(each) and each not in overrides]
    return shlex.join([*words, *own, *overrides])
