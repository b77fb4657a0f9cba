"""Runs a composed config: in every process of the job, from building to summary.json."""

import json
import logging
import os
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from dpframe import checkpoint, files, interruption, seeding
from dpframe.callbacks import Callback
from dpframe.callbacks.best import Best
from dpframe.cli import restarts
from dpframe.cli.build import build, refused
from dpframe.cli.compose import Composed
from dpframe.cli.directory import Directory
from dpframe.cli.logs import logging_to
from dpframe.cli.origin import compared
from dpframe.cli.screen import goes_on_unread
from dpframe.cli.settings import EVALUATIONS, RunSettings
from dpframe.cli.slots import check_targets, trust_of
from dpframe.cli.start import resumed_directory
from dpframe.data import DataModule
from dpframe.errors import Failure, Interrupted, UserError, exits_told
from dpframe.heartbeat import beat
from dpframe.loggers import Logger
from dpframe.strategies import Strategy, member, ranks  # noqa: F401  ranks counts threads when imported
from dpframe.task import Task
from dpframe.trainer import Run, Trainer

log = logging.getLogger("dpframe")


def run(job: Composed) -> dict[str, Any]:
    """The summary, from the main process; the strategy decides how many there are."""
    interruption.allow(job.settings.trainer.grace_seconds)
    with exits_told():  # in a module that it imports
        trust = check_targets(job)
    if job.settings.mode == "verify":
        from dpframe.cli.verify import verified  # the kit, which no other mode needs

        return verified(job)
    if job.settings.mode == "plan":
        from dpframe.cli.plan import planned

        return planned(job)
    strategy = build(job.config["strategy"], "strategy", Strategy, trust=trust)
    try:
        return restarts.launch(strategy, _work, job)
    except UserError as error:
        if error.exit_code == UserError.exit_code:
            _unmake(error.told.get("made"))
        raise


def _unmake(made: list[str] | None) -> None:
    """What the main rank could not, because it was another one that met the mistake."""
    if made and not (Path(made[0]) / "checkpoints").exists():
        Directory.made(made).unmake()


@goes_on_unread()
@exits_told()
def _work(job: Composed) -> dict[str, Any]:
    """What every process of a job does."""
    stop = interruption.installed()
    with stop.watched(job.settings.trainer.hang_seconds) if stop is not None else nullcontext():
        return _worked(job)


def _worked(job: Composed) -> dict[str, Any]:
    settings = job.settings
    make = partial(build, trust=trust_of(job))
    strategy = make(job.config["strategy"], "strategy", Strategy)
    interruption.look()
    strategy.open()
    try:
        state = checkpoint.load(job.start) if job.start is not None else None
        seeding.seed_everything(settings.seed)
        beat()
        task = make(job.config["task"], "task", Task)
        data = make(job.config["data"], "data", DataModule)
        beat()
        callbacks = _several(make, settings.callbacks, "callbacks", Callback)
        best = Best(*job.objective)
        writes = settings.mode == "fit"
        trainer = Trainer(
            task,
            data,
            strategy=strategy,
            settings=settings.trainer,
            callbacks=[*callbacks, best],
            loggers=_several(make, settings.logger, "logger", Logger) if writes else [],
            seed=settings.seed,
            run=_run(job),
            interruption=interruption.installed(),
        )
        told = _prepare(trainer, job, state)
        interruption.look()
        directory = _directory(job)
        made = directory.make(job) if strategy.is_main else None
        trainer.run.directory = strategy.share(made)
        member.tell("directory", trainer.run.directory)
        if strategy.is_main:
            member.tell("made", directory.all_made)
        try:
            return _in_directory(trainer, job, told, best)
        except UserError as error:
            is_empty = trainer.epoch <= 1 and trainer.checkpoint is None
            is_refused = error.exit_code == UserError.exit_code or trainer.global_step == 0
            if strategy.is_main and is_empty and is_refused:
                directory.unmake()  # nothing worth keeping yet: leave nothing behind
            raise
        except Interrupted as error:
            raise Interrupted(error.number, _when(trainer, job)) from None
        finally:
            directory.release()
    finally:
        strategy.shut()


def _run(job: Composed) -> Run:
    return Run(
        recipe=job.settings.recipe,
        config=job.config,
        public=job.public,
        config_text=job.text,
        is_repeated=job.is_repeated,
    )


def _directory(job: Composed) -> Directory:
    resumed = resumed_directory(job.start) if job.settings.resume and job.start else None
    path = resumed or Path(job.run_dir)
    is_fresh = job.settings.mode == "fit" and resumed is None
    is_there = job.is_run_dir_given and os.path.isdir(path)
    if is_fresh and is_there and any(path.glob("checkpoints/*.ckpt")):
        raise UserError(
            f"the run directory {path} has the checkpoints of another run; go on with that one by "
            f"resume={path}, or name another directory by hydra.run.dir=DIR"
        )
    return Directory(path, is_given=bool(resumed) or job.is_run_dir_given)


def _prepare(trainer: Trainer, job: Composed, state: dict[str, Any] | None) -> list[str]:
    """All that can be refused is, before there is a run directory; gives what is to be told."""
    settings = job.settings
    told = []
    if state is not None and settings.mode in EVALUATIONS:
        told = compared(job, trainer, state)
    if state is not None and settings.resume is None:
        # Only now: the Trainer has made the weights 64 bits, or not.
        checkpoint.load_task(trainer.task, state)
    if settings.mode != "fit":
        return told
    resume = state if settings.resume is not None else None
    try:
        trainer.prepare(resume, resume_anyway=settings.resume_anyway)
    except (ValueError, TypeError, KeyError) as error:  # of an optimiser, which the Trainer makes
        said = refused(error, {"task": job.config["task"]})
        if said is None:
            raise
        raise said from None
    return told


def _in_directory(trainer: Trainer, job: Composed, told: list[str], best: Best) -> dict[str, Any]:
    directory = Path(trainer.run.directory)
    with logging_to(directory, rank=trainer.strategy.rank):
        for line in told:
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
        path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted meanwhile
        with files.whole(path) as part:
            part.write_text(text)
    except OSError as error:
        raise Failure(f"the run is done, but {path} can't be written: {error.strerror}") from error


def _when(trainer: Trainer, job: Composed) -> str:
    """A signal came; what became of the run."""
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
        log.warning("trainer.limit_eval_batches=%s: no more batches than that are read", limit)
    if settings.mode != "predict":
        if settings.checkpoint is None:
            log.warning("no checkpoint=FILE is given: these are the numbers of untrained weights")
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
    seconds = trainer.seconds
    return {
        "recipe": job.settings.recipe,
        "strategy": strategy.name,
        "replicas": strategy.replicas,
        "devices": strategy.devices,
        "epochs": trainer.epoch,
        "steps": trainer.global_step,
        "skipped_steps": trainer.skipped_steps,
        "samples_per_second": trainer.rows_seen / seconds if seconds else 0.0,
        "seconds": seconds,
        "data_wait_share": trainer.data_seconds / seconds if seconds else 0.0,
        "metrics": trainer.metrics,
        "checkpoint": trainer.checkpoint
        if job.settings.mode == "fit"
        else job.start and str(job.start),
        "directory": trainer.run.directory,
    }
