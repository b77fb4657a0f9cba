"""Runs a composed config: in every process of the job, from building to summary.json."""

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from dpframe import checkpoint, files, memory, seeding
from dpframe.callbacks import Callback
from dpframe.callbacks.monitor import Best
from dpframe.checkpoint import seal
from dpframe.config.build import build, check_targets
from dpframe.config.compose import Composed
from dpframe.config.objective import CHOSEN
from dpframe.config.origin import compared
from dpframe.config.schema import EVALUATIONS, NONE, is_off
from dpframe.config.start import run_directory, saved_since
from dpframe.config.trust import trust_of
from dpframe.data import DataModule
from dpframe.errors import (
    DeviceLost,
    Failure,
    Interrupted,
    UserError,
    explain_exits,
    printable,
)
from dpframe.launch import environment, local, signals
from dpframe.launch.faults import RankFailed
from dpframe.launch.rank import has_parent, notify_parent
from dpframe.launch.watchdog import beat
from dpframe.loggers import Logger
from dpframe.modes import elastic, faults, output
from dpframe.modes.directory import Directory, remove
from dpframe.modes.ending import add_going_on, ending, going_on
from dpframe.strategies import Strategy
from dpframe.strategies.devices import use_threads
from dpframe.task import Task
from dpframe.trainer import RunInfo, Trainer
from dpframe.trainer.placement import process_settings_restored
from dpframe.trainer.progress import Progress

log = logging.getLogger("dpframe")


def run(job: Composed, *, owns_process: bool = True) -> dict[str, Any]:
    """Returns the main process's summary; the strategy starts the processes.

    One that it does not own may have computed, so that it can't be forked."""
    if owns_process:
        local.allow_fork()
    signals.set_grace(job.settings.trainer.grace_seconds)
    if job.settings.mode not in ("fit", *EVALUATIONS):
        from dpframe.modes import reports

        with explain_exits():  # in a module that it imports
            check_targets(job)
        return reports.make(job)
    try:
        return _launch_again_after_failures(job)
    except UserError as error:
        made = error.told.get("made", [])  # by the main rank, where another one met the mistake
        is_mistake = error.exit_code == UserError.exit_code
        if is_mistake and made and not any(made[0].glob("checkpoints/*.ckpt")):
            remove(made)
        raise


def _launch_again_after_failures(job: Composed) -> dict[str, Any]:
    """Starts the ranks again after one has failed, `trainer.max_restarts` times.

    What a user did wrong, a lack of memory and a signal end the job at once.
    """
    allowed = job.settings.trainer.max_restarts
    strategy = _strategy(job)
    for number in count(1):
        try:
            return strategy.launch(_run_rank, job)
        except (RankFailed, UserError) as error:
            path = error.told.get("directory", "")
            if os.path.isdir(path):
                output.append(Path(path), error.details + str(error))
                _note_failure(Path(path), error, job)
            is_final = isinstance(error, UserError) and not isinstance(error, DeviceLost)
            if number > allowed or is_final:
                if isinstance(error, RankFailed):
                    add_going_on(error, job, path)
                raise
            print(printable(str(error)), file=sys.stderr)
            job, where = _resume(job, path)
            print(f"restart {number} of {allowed} {where}", file=sys.stderr, flush=True)
            signals.raise_if_signaled()
    raise AssertionError


def _strategy(job: Composed) -> Strategy:
    with explain_exits():  # in a module that it imports
        trust = check_targets(job)
    strategy = build(job.config["strategy"], "strategy", Strategy, trust=trust)
    if allowed := job.settings.trainer.max_restarts:
        _refuse_restarts(strategy, allowed)
    return strategy


def _refuse_restarts(strategy: Strategy, allowed: int) -> None:
    if environment.is_rank():
        by = environment.find_launcher()
        use = "start it again with resume=DIR"
        if by == "torchrun":
            use = f"use torchrun --max-restarts={allowed}, which goes on from the last checkpoint"
        raise UserError(f"trainer.max_restarts={allowed} but {by} has started this rank; {use}")
    if not strategy.launches_ranks:
        raise UserError(
            f"trainer.max_restarts={allowed} but {strategy.name} runs in this process, which can't "
            "start itself again; use strategy=ddp, or trainer.max_restarts=0"
        )


def _resume(job: Composed, directory: str) -> tuple[Composed, str]:
    """The job from its newest checkpoint that is whole; and where that is."""
    if not directory:
        return job, "from the beginning"
    job = replace(job, run_dir=directory, is_run_dir_given=True)
    path = seal.newest_of_run(directory)
    if path is None:
        return replace(job, is_repeated=True), "from the beginning: there is no checkpoint yet"
    settings = replace(job.settings, resume=str(path))
    return replace(job, start=path, settings=settings), f"from {path}, step {seal.step_of(path)}"


# ---- in every process of the job


@output.goes_on_unread()
@explain_exits()
def _run_rank(job: Composed) -> dict[str, Any]:
    with signals.watched(job.settings.trainer.hang_seconds), process_settings_restored():
        make = partial(build, trust=trust_of(job))
        strategy = make(job.config["strategy"], "strategy", Strategy)
        signals.raise_if_signaled()
        with strategy:
            return _run_trainer(job, strategy, make)


@explain_exits()  # before the strategy is told of the error
def _run_trainer(job: Composed, strategy: Strategy, make: Callable[..., Any]) -> dict[str, Any]:
    job, said = elastic.find(job, strategy)
    state = _load_start(job, strategy)
    settings = job.settings
    for device in strategy.local_devices:
        memory.begin_peak(device)  # of the run before, in a sweep
    explain = partial(
        faults.explain, strategy, settings.trainer, resumes=settings.resume is not None
    )
    objective = job.objective
    best = Best(*objective, is_needed=objective.key == CHOSEN)
    # What can be refused is refused before there is a run directory.
    with explain():
        trainer = _trainer(job, strategy, make, best)
    with explain(trainer):
        notes = [said, *_load_and_prepare(job, trainer, state)]
    signals.raise_if_signaled()
    directory = _directory(job)
    path = strategy.collectives.broadcast(directory.make(job.notes) if strategy.is_main else None)
    trainer.run.directory = path
    elastic.note(path, strategy)
    notify_parent("directory", path)
    if strategy.is_main:
        notify_parent("made", directory.made)
        is_fresh = settings.mode == "fit" and settings.resume is None
        trainer.run.is_repeated |= is_fresh and directory.has_broken_run
    try:
        with explain(trainer):
            _look_again(job, trainer)
        with output.logging_to(Path(path), rank=strategy.rank, logs_error=not has_parent()):
            for line in filter(None, notes):
                log.info(line)
            with explain(trainer):
                if settings.mode == "fit":
                    trainer.fit(keep_loggers_open=settings.test_after_fit)
                    if settings.test_after_fit:
                        _test_best(trainer)
                else:
                    _evaluate(trainer, job, path)
            saved = trainer.checkpoint if settings.mode == "fit" else job.start and str(job.start)
            summary = {
                "recipe": settings.recipe,
                "status": "finished",
                **_summary(strategy, trainer.progress),
                "peak_memory": trainer.peak_memory(),
                "metrics": trainer.metrics,
                "checkpoint": saved,
                "directory": path,
                "best": best.value,
                "best_epoch": best.epoch,
                "best_step": best.step,
                "stopped": trainer.stop_reason,
            }
            if strategy.is_main:
                _write(Path(path) / "summary.json", json.dumps(summary, indent=2) + "\n")
        if job.history is not None:  # from Python, which has no use for commands
            return summary | {"history": job.history.rows}
        if strategy.is_main and settings.mode == "fit" and job.number is None:
            updates = trainer.updates.values()
            lengths = [getattr(each.scheduler, "total_steps", None) for each in updates]
            goes_longer = not any(length is not None for length in lengths)
            dashboards = [logger.dashboard(path) for logger in trainer.loggers]
            text = ending(job, summary, dashboards, goes_longer=goes_longer)
            print(printable(text), flush=True)
        return summary
    except UserError as error:
        if trainer.global_step == 0 and trainer.checkpoint is None and not error.details:
            directory.unmake()  # nothing is worth keeping yet
            raise
        notify_parent("made", [])  # it stays
        if strategy.is_main and not has_parent():
            _note_failure(Path(path), error, job)
        raise
    except Exception as error:
        if strategy.is_main and not has_parent():
            _note_failure(Path(path), error, job)
            add_going_on(error, job, path)
        raise
    except Interrupted as error:
        said = ""
        if settings.mode == "fit":
            is_saved = trainer.checkpoint is not None or settings.resume is not None
            then = f"go on with {going_on(job, path)}" if is_saved else "nothing was saved"
            said = f" after step {trainer.global_step}; {then}"
        interrupted = Interrupted(error.number, said)
        if strategy.is_main:
            facts = {
                "reason": str(interrupted),
                **_summary(strategy, trainer.progress),
                "metrics": trainer.metrics,
                "checkpoint": trainer.checkpoint,
                "directory": path,
            }
            _note_ending(Path(path), job, "interrupted", facts)
        raise interrupted from None
    finally:
        directory.release()


def _trainer(job: Composed, strategy: Strategy, make: Callable[..., Any], best: Best) -> Trainer:
    settings = job.settings
    seeding.seed_everything(settings.seed)
    if settings.trainer.logical_replicas is not None:  # the first weights may be sums, too
        use_threads(settings.trainer.threads or 1)
    beat()
    with nullcontext() if strategy.sharding is None else strategy.sharding.building():
        task = make(job.config["task"], "task", Task)
    data = make(job.config["data"], "data", DataModule)
    beat()
    callbacks = _build_group(make, settings.callbacks, "callbacks", Callback)
    loggers = _build_group(make, settings.logger, "logger", Logger)
    if job.history is not None:
        loggers.append(job.history)
    return Trainer(
        task,
        data,
        strategy=strategy,
        settings=settings.trainer,
        callbacks=[*callbacks, best],
        loggers=loggers,
        seed=settings.seed,
        run=RunInfo(
            recipe=settings.recipe,
            config=job.config,
            public=job.public,
            config_text=job.text,
            is_repeated=job.is_repeated,
        ),
        interruption=signals.current(),
    )


def _load_and_prepare(job: Composed, trainer: Trainer, state: dict[str, Any] | None) -> list[str]:
    """What a log is to begin with."""
    settings, notes = job.settings, []
    if settings.checkpoint == NONE:
        notes = ["checkpoint  none: the task as it is built"]
    if state is not None and job.start is not None and settings.mode in EVALUATIONS:
        notes = [_named(job.start), *compared(job, state, task=trainer.task, data=trainer.data)]
    if state is not None and settings.resume is None:
        # The Trainer has converted it to trainer.precision.
        checkpoint.load_task(trainer.task, state, sharding=trainer.strategy.sharding)
        state = None
    if settings.mode == "fit":
        trainer.prepare(state, resume_anyway=settings.resume_anyway)
    return notes


def _look_again(job: Composed, trainer: Trainer) -> None:
    """The run that is resumed may have been ending until its directory was locked."""
    strategy, start, resume = trainer.strategy, job.start, job.settings.resume
    if job.settings.mode != "fit" or resume is None:
        return
    found = None
    if strategy.is_main and start is not None:
        found = saved_since(resume, start, trainer.global_step)
    newest = strategy.collectives.broadcast(found)
    if newest is not None:
        state = _load_start(replace(job, start=newest), strategy)
        trainer.prepare(state, resume_anyway=job.settings.resume_anyway)


def _load_start(job: Composed, strategy: Strategy) -> dict[str, Any] | None:
    """The checkpoint that a rank begins with."""
    is_weights_alone = job.settings.mode in EVALUATIONS
    whole = strategy.sharding is None and not is_weights_alone
    return checkpoint.load(job.start, whole=whole) if job.start is not None else None


def _named(start: Path) -> str:
    """The checkpoint that is evaluated; another framework's file has no step."""
    step = seal.step_of(start)
    return f"checkpoint  {start}" + (f", step {step}" if step >= 0 else "")


def _build_group(
    make: Callable[..., Any], nodes: dict[str, Any], where: str, kind: type
) -> list[Any]:
    """The callbacks or loggers of a group, each of a node."""
    return [make(node, f"{where}.{name}", kind) for name, node in nodes.items() if not is_off(node)]


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


def _test_best(trainer: Trainer) -> None:
    """Tests the weights of the run's best checkpoint, or of its last one."""
    strategy = trainer.strategy
    path = strategy.collectives.broadcast(trainer.checkpoint)  # which the main process alone knows
    if path is not None:
        if strategy.sharding is not None and strategy.sharding.saves_shards:
            state = checkpoint.load(path, whole=False)
        else:
            state = strategy.collectives.broadcast(
                checkpoint.load(path) if strategy.is_main else None
            )
        checkpoint.load_task(trainer.task, state, sharding=trainer.strategy.sharding)
    try:
        trainer.test()
    except BaseException:
        trainer.recorder.close(trainer.metrics, succeeded=False)
        raise


def _evaluate(trainer: Trainer, job: Composed, path: str) -> None:
    settings = job.settings
    is_trained = {"optimizer", "optimizers", "module"} & job.config["task"].keys()
    if settings.checkpoint is None and (is_trained or settings.mode == "export"):
        of = "the predictions of " if settings.mode == "predict" else ""
        log.warning("no checkpoint=FILE: these are %suntrained weights", of)
    if settings.mode == "export":
        from dpframe.modes.export import exported

        if trainer.strategy.is_main:
            lines = exported(trainer, Path(path), settings.export.formats, job.start)
            print(*lines, sep="\n")
        return
    kind = "val" if settings.mode == "validate" else settings.mode
    for key in (f"limit_{kind}_batches", "limit_eval_batches"):
        limit = getattr(settings.trainer, key)
        if limit is not None:
            log.warning("trainer.%s=%s: no more batches are read", key, limit)
            break
    if settings.mode == "predict":
        began = time.perf_counter()
        predictions = trainer.predict(spool=path)
        seconds = time.perf_counter() - began
        several = predictions if isinstance(predictions, dict) else {"": predictions}
        there = [each for each in several.values() if each is not None]
        for each in there:
            print(f"predictions  {each.save(Path(path))}")
        rows = sum(each.rows for each in there)
        if there:
            counted = f"{rows:,} row{'s' * (rows != 1)}"
            print(f"{counted} in {seconds:.2f} s, {rows / seconds:,.0f} samples/s")
        return
    getattr(trainer, settings.mode)()


def _summary(strategy: Strategy, progress: Progress) -> dict[str, Any]:
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


def _note_failure(directory: Path, error: Exception, job: Composed) -> None:
    """In summary.json, for scripts and sweeps; run.log has it, too."""
    if isinstance(error, UserError):
        reason, details = str(error), error.details
    elif isinstance(error, RankFailed):  # its text is the traceback of the rank
        reason, details = str(error).splitlines()[-1], str(error)
    else:
        reason = "".join(traceback.format_exception_only(error)).rstrip()
        details = "".join(traceback.format_exception(error)).rstrip()
    _note_ending(directory, job, "failed", {"reason": reason, "traceback": details})


def _note_ending(directory: Path, job: Composed, status: str, facts: dict[str, Any]) -> None:
    summary = {"recipe": job.settings.recipe, "status": status, **facts}
    with suppress(Failure):  # a full disk may be why it has failed
        _write(directory / "summary.json", json.dumps(summary, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted since
        with files.atomic_write(path) as part:
            part.write_text(text)
    except OSError as error:
        raise Failure(f"the run is done, but {path} can't be written: {error.strerror}") from error
