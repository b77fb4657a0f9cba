"""Runs a composed config: in every process of the job, from building to summary.json."""

import json
import logging
import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dpframe import checkpoint, files, interruption, seeding
from dpframe.callbacks import Callback
from dpframe.callbacks.monitor import Best
from dpframe.cli import restarts
from dpframe.cli.build import build, check_targets
from dpframe.cli.compose import Composed
from dpframe.cli.directory import Directory
from dpframe.cli.logs import logging_to
from dpframe.cli.origin import compared
from dpframe.cli.resume import run_directory
from dpframe.cli.screen import goes_on_unread
from dpframe.cli.settings import EVALUATIONS, RunSettings
from dpframe.cli.trust import trust_of
from dpframe.data import DataModule
from dpframe.errors import Failure, Interrupted, UserError, exits_told
from dpframe.heartbeat import beat
from dpframe.loggers import Logger
from dpframe.strategies import Strategy, launch, ranks
from dpframe.task import Task
from dpframe.trainer import Run, Trainer

log = logging.getLogger("dpframe")


def run(job: Composed) -> dict[str, Any]:
    """Returns the main process's summary; the strategy starts the processes."""
    launch.allow_fork()
    interruption.allow(job.settings.trainer.grace_seconds)
    with exits_told():  # in a module that it imports
        trust = check_targets(job)
    if job.settings.mode in ("verify", "plan"):
        from dpframe.cli import reports

        return (reports.verified if job.settings.mode == "verify" else reports.planned)(job)
    strategy = build(job.config["strategy"], "strategy", Strategy, trust=trust)
    try:
        return restarts.launch(strategy, _work, job)
    except UserError as error:
        if error.exit_code == UserError.exit_code:
            _unmake(error.told.get("made"))
        raise


def _unmake(made: list[str] | None) -> None:
    """Removes what the main rank made, where another rank met the mistake."""
    if made and not (Path(made[0]) / "checkpoints").exists():
        Directory.made(made).unmake()


@goes_on_unread()
@exits_told()
def _work(job: Composed) -> dict[str, Any]:
    """What every process of a job does."""
    with interruption.watched(job.settings.trainer.hang_seconds):
        make = partial(build, trust=trust_of(job))
        strategy = make(job.config["strategy"], "strategy", Strategy)
        interruption.look()
        strategy.open()
        try:
            return _worked(job, strategy, make)
        finally:
            strategy.shut()


def _worked(job: Composed, strategy: Strategy, make: Callable[..., Any]) -> dict[str, Any]:
    settings = job.settings
    state = checkpoint.load(job.start) if job.start is not None else None
    seeding.seed_everything(settings.seed)
    beat()
    task = make(job.config["task"], "task", Task)
    data = make(job.config["data"], "data", DataModule)
    beat()
    callbacks = _several(make, settings.callbacks, "callbacks", Callback)
    loggers = _several(make, settings.logger, "logger", Logger) if settings.mode == "fit" else []
    best = Best(*job.objective)
    trainer = Trainer(
        task,
        data,
        strategy=strategy,
        settings=settings.trainer,
        callbacks=[*callbacks, best],
        loggers=loggers,
        seed=settings.seed,
        run=Run(
            recipe=settings.recipe,
            config=job.config,
            public=job.public,
            config_text=job.text,
            is_repeated=job.is_repeated,
        ),
        interruption=interruption.installed(),
    )
    notes = _prepare(trainer, job, state)
    interruption.look()
    directory = _directory(job)
    made = directory.make(job) if strategy.is_main else None
    trainer.run.directory = strategy.share(made)
    ranks.tell("directory", trainer.run.directory)
    if strategy.is_main:
        ranks.tell("made", directory.all_made)
    try:
        return _in_directory(trainer, job, notes, best)
    except UserError as error:
        is_empty = trainer.epoch <= 1 and trainer.checkpoint is None
        is_refused = error.exit_code == UserError.exit_code or trainer.global_step == 0
        if strategy.is_main and is_empty and is_refused:
            directory.unmake()  # nothing is worth keeping yet
        raise
    except Interrupted as error:
        raise Interrupted(error.number, _when(trainer, job)) from None
    finally:
        directory.release()


def _directory(job: Composed) -> Directory:
    resumed = run_directory(job.start) if job.settings.resume and job.start else None
    path = resumed or Path(job.run_dir)
    is_fresh = job.settings.mode == "fit" and resumed is None
    is_there = job.is_run_dir_given and os.path.isdir(path)
    if is_fresh and is_there and any(path.glob("checkpoints/*.ckpt")):
        raise UserError(
            f"the run directory {path} has the checkpoints of another run; continue it with "
            f"resume={path}, or name another directory by hydra.run.dir=DIR"
        )
    return Directory(path, is_given=bool(resumed) or job.is_run_dir_given)


def _prepare(trainer: Trainer, job: Composed, state: dict[str, Any] | None) -> list[str]:
    """Refuses what can be refused before there is a run directory; returns lines for the log."""
    settings, notes = job.settings, []
    if state is not None and settings.mode in EVALUATIONS:
        notes = compared(job, state, task=trainer.task, data=trainer.data)
    if state is not None and settings.resume is None:
        # After the Trainer has converted the weights to trainer.precision=64.
        checkpoint.load_task(trainer.task, state)
    if settings.mode == "fit":
        resume = state if settings.resume is not None else None
        trainer.prepare(resume, resume_anyway=settings.resume_anyway)
    return notes


def _in_directory(trainer: Trainer, job: Composed, notes: list[str], best: Best) -> dict[str, Any]:
    directory = Path(trainer.run.directory)
    with logging_to(directory, rank=trainer.strategy.rank):
        for line in notes:
            log.info(line)
        if job.settings.mode == "fit":
            trainer.fit()
        else:
            _evaluate(trainer, job.settings, directory)
        summary = _summary(trainer, job) | {"best": best.value}
        if trainer.strategy.is_main:
            _write(directory / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted since
        with files.whole(path) as part:
            part.write_text(text)
    except OSError as error:
        raise Failure(f"the run is done, but {path} can't be written: {error.strerror}") from error


def _when(trainer: Trainer, job: Composed) -> str:
    """When a signal ended the run, and how to resume it."""
    directory = Path(trainer.run.directory)
    if job.settings.mode != "fit":
        return ""
    when = f" after step {trainer.global_step}; "
    if trainer.checkpoint is None and job.settings.resume is None:
        return when + "nothing was saved"
    return f"{when}go on with {shlex.quote(f'resume={directory}')}"


def _evaluate(trainer: Trainer, settings: RunSettings, directory: Path) -> None:
    limit = settings.trainer.limit_eval_batches
    if limit is not None:
        log.warning("trainer.limit_eval_batches=%s: no more batches are read", limit)
    if settings.mode != "predict":
        if settings.checkpoint is None:
            log.warning("no checkpoint=FILE: these are the numbers of untrained weights")
        getattr(trainer, settings.mode)()
        return
    predictions = trainer.predict()
    if predictions is not None:
        print(f"predictions  {predictions.save(directory)}")


def _several(make: Callable[..., Any], nodes: dict[str, Any], where: str, kind: type) -> list[Any]:
    """The callbacks or loggers of a group: a node is one of them, null switches it off."""
    return [make(node, f"{where}.{name}", kind) for name, node in nodes.items() if node is not None]


def _summary(trainer: Trainer, job: Composed) -> dict[str, Any]:
    strategy = trainer.strategy
    seconds = trainer.progress.seconds
    return {
        "recipe": job.settings.recipe,
        "strategy": strategy.name,
        "replicas": strategy.replicas,
        "devices": strategy.devices,
        "epochs": trainer.epoch,
        "steps": trainer.global_step,
        "skipped_steps": trainer.progress.skipped_steps,
        "samples_per_second": trainer.progress.rows_seen / seconds if seconds else 0.0,
        "seconds": seconds,
        "data_wait_share": trainer.progress.data_seconds / seconds if seconds else 0.0,
        "metrics": trainer.metrics,
        "checkpoint": trainer.checkpoint
        if job.settings.mode == "fit"
        else job.start and str(job.start),
        "directory": trainer.run.directory,
    }
