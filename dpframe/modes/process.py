"""A run in one process of its job: it builds, loads, prepares, makes the directory and works."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dpframe import checkpoint, seeding
from dpframe.callbacks.monitor import Best
from dpframe.checkpoint import seal
from dpframe.config import modes
from dpframe.config.arguments import explain_text_called
from dpframe.config.compose import Composed
from dpframe.config.earlier_run import run_directory, saved_since
from dpframe.config.evaluated_run import describe_differences
from dpframe.config.objective import CHOSEN
from dpframe.config.parts import callbacks_of, data_of, loggers_of, task_of
from dpframe.config.schema import NONE
from dpframe.config.untrusted import calls_in
from dpframe.devices import memory
from dpframe.errors import Interrupted, UserError, explain_exits, listed
from dpframe.launch import signals
from dpframe.launch.rank import has_parent, notify_parent
from dpframe.launch.watchdog import beat
from dpframe.modes import elastic, error_lines, output, provenance
from dpframe.modes.directory import ELSEWHERE, Directory, has_broken_run
from dpframe.modes.ending import (
    add_going_on,
    command,
    facts_of,
    going_on,
    last_words,
    named,
    note_ending,
    note_failure,
    write_summary,
)
from dpframe.modes.provenance import Git
from dpframe.strategies import Strategy
from dpframe.strategies.devices import use_threads
from dpframe.trainer import RunInfo, Trainer
from dpframe.trainer.recorder import refuse_used
from dpframe.trainer.resume.state import load_attributes

log = logging.getLogger("dpframe")


Work = Callable[[Trainer, Composed, str], None]
"""What a mode does in each process, once its run has a directory."""


@explain_exits()  # before the strategy is told of the error
def perform(job: Composed, work: Work, strategy: Strategy) -> dict[str, Any]:
    """Does a mode's `work` in this process, and returns the run's summary."""
    with Git(is_asked=strategy.is_main) as git:
        return _perform(job, work, strategy, git)


def _perform(job: Composed, work: Work, strategy: Strategy, git: Git) -> dict[str, Any]:
    job, said = elastic.find(job, strategy)
    here = Path.cwd()
    state = _load_start(job, strategy)
    for device in strategy.local_devices:
        memory.begin_peak(device)  # of the run before, in a sweep
    resumes = job.settings.resume is not None
    explain = partial(error_lines.explain, strategy, job.settings.trainer, resumes=resumes)
    best = Best(*job.objective, is_needed=job.objective.key == CHOSEN)
    # What can be refused is refused before there is a run directory.
    with explain():
        trainer = _build_trainer(job, strategy, best)
    with explain(trainer):
        notes = [said, *_load_and_prepare(job, trainer, state)]
    signals.raise_if_signaled()
    if Path.cwd() != here:  # a setup has changed it, and paths were typed before
        start = job.start and here / job.start
        job = replace(job, run_dir=str(here / job.run_dir), start=start)
    directory = _directory(job)
    origin, changed = _origin(job, strategy, git)
    path = _make(directory, job, trainer, strategy, origin)
    with _ending_noted(job, trainer, strategy, directory):
        with explain(trainer), chdir(here):
            _look_again(job, trainer)
        with output.logging_to(Path(path), rank=strategy.rank, logs_error=not has_parent()):
            for line in filter(None, [*notes, changed]):
                log.info(line)
            _warn_of_untrained(job)
            with explain(trainer):
                work(trainer, job, path)
            if strategy.is_main:
                provenance.complete(path, git)
            facts = facts_of(strategy, trainer.progress)
            summary = _summarize(job, trainer, best, facts)
            if strategy.is_main:
                write_summary(Path(path), summary)
        if job.history is not None:  # from Python, which has no use for commands
            return summary | {"history": job.history.rows}
        if strategy.is_main and job.settings.mode == "fit" and job.number is None:
            print(last_words(job, summary, trainer), flush=True)
        return summary


# ---- the parts


def _build_trainer(job: Composed, strategy: Strategy, best: Best) -> Trainer:
    settings = job.settings
    seeding.seed_everything(settings.seed)
    if settings.trainer.threads is not None:  # by whose number the first weights may round, too
        use_threads(settings.trainer.threads)
    beat()
    with strategy.sharding.building():
        task = task_of(job)()
    data = data_of(job)()
    beat()
    callbacks = [make() for make in callbacks_of(job).values()]
    loggers = [make() for make in loggers_of(job).values()]
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
        show_progress=False,  # the config says what does
    )


# ---- the checkpoint that it begins with


def _load_start(job: Composed, strategy: Strategy) -> dict[str, Any] | None:
    is_weights_alone = modes.evaluates(job.settings.mode)
    whole = not strategy.sharding.cuts and not is_weights_alone
    return checkpoint.load(job.start, whole=whole) if job.start is not None else None


def _load_and_prepare(job: Composed, trainer: Trainer, state: dict[str, Any] | None) -> list[str]:
    """What a log is to begin with."""
    settings, notes = job.settings, []
    if settings.checkpoint == NONE:
        notes = ["checkpoint  none: the task as it is built"]
    if state is not None and job.start is not None and modes.evaluates(settings.mode):
        step = seal.step_of(job.start)  # another framework's file has none
        notes = [f"checkpoint  {job.start}" + f", step {step}" * (step >= 0)]
        notes += describe_differences(job, state, task=trainer.task, data=trainer.data)
    if settings.resume == "last":
        notes = [f"resume=last is {job.start}"]
    if state is not None and settings.resume is None:
        # The Trainer has converted it to trainer.precision.
        is_trained = not modes.evaluates(settings.mode)
        skipped = checkpoint.load_task(
            trainer.task,
            state,
            sharding=trainer.strategy.sharding,
            skip=settings.skipped if is_trained else None,
        )
        if skipped:
            notes += [f"as they are built, not from the checkpoint: {listed(skipped, 8)}"]
        if not is_trained:
            notes += load_attributes(trainer.task, state, trainer.strategy)
        state = None
    if settings.mode == "fit":
        try:
            trainer.prepare(state, resume_anyway=settings.resume_anyway)
        except TypeError as error:
            if (line := explain_text_called(error, job.config["task"])) is None:
                raise
            raise line from None
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


def _warn_of_untrained(job: Composed) -> None:
    settings = job.settings
    is_trained = {"optimizer", "optimizers", "module"} & job.config["task"].keys()
    is_evaluated = modes.evaluates(settings.mode) and settings.checkpoint is None
    if is_evaluated and (is_trained or settings.mode == "export"):
        of = "the predictions of " if settings.mode == "predict" else ""
        log.warning("no checkpoint=FILE: these are %suntrained weights", of)


# ---- the run's directory


def _directory(job: Composed) -> Directory:
    resumed = run_directory(job.start) if job.settings.resume and job.start else None
    path = resumed or Path(job.run_dir)
    is_fresh = job.settings.mode == "fit" and resumed is None
    if is_fresh and job.is_run_dir_given and os.path.isdir(path):
        refuse_used(
            path,
            is_repeated=has_broken_run(path),
            again=f"continue it with resume={path}",
            instead=ELSEWHERE,
        )
    return Directory(path, is_given=bool(resumed) or job.is_run_dir_given)


def _origin(job: Composed, strategy: Strategy, git: Git) -> tuple[dict[str, Any], str]:
    """What this run is, and a line where that differs from the run that it begins with."""
    if not strategy.is_main:
        return {}, ""
    earlier = job.start and provenance.read(run_directory(job.start))
    targets = calls_in(job.public).values()
    origin = provenance.facts(command(job, *job.typed), targets, strategy.local_devices)
    origin |= git.answer(provenance.PATIENCE if earlier else 0.0)
    differences = provenance.differences(earlier or {}, origin)
    what = "resume" if job.settings.resume else "checkpoint"
    return origin, f"{what}={job.start}: its run had {differences}" * bool(differences)


def _make(
    directory: Directory,
    job: Composed,
    trainer: Trainer,
    strategy: Strategy,
    origin: Mapping[str, Any],
) -> str:
    """The main process makes it; all know it, and so does their parent."""
    settings, made = job.settings, None
    if strategy.is_main:
        made = directory.make(job.notes | {provenance.NAME: provenance.as_text(origin)})
    path = strategy.collectives.broadcast(made)
    trainer.run.directory, trainer.run.is_claimed = path, True
    elastic.note(path, strategy)
    notify_parent("directory", path)
    if strategy.is_main:
        notify_parent("made", directory.made)
        is_fresh = settings.mode == "fit" and settings.resume is None
        trainer.run.is_repeated |= is_fresh and directory.has_broken_run
    return path


# ---- how it ends


def _summarize(
    job: Composed, trainer: Trainer, best: Best, facts: dict[str, Any]
) -> dict[str, Any]:
    is_fit = job.settings.mode == "fit"
    return {
        **named(job.settings),
        "status": "finished",
        **facts,
        "peak_memory": memory.peaks(trainer.strategy),
        "metrics": trainer.metrics,
        "checkpoint": trainer.checkpoint if is_fit else job.start and str(job.start),
        "directory": trainer.run.directory,
        "best": best.value,
        "best_epoch": best.epoch,
        "best_step": best.step,
        "best_metrics": best.metrics,
        "stopped": trainer.stop_reason,
        "origin": provenance.summarized(trainer.run.directory),
    }


@contextmanager
def _ending_noted(
    job: Composed, trainer: Trainer, strategy: Strategy, directory: Directory
) -> Iterator[None]:
    """Writes down why a run inside has ended early, or removes the directory if it came to
    nothing."""
    path, is_main = trainer.run.directory, strategy.is_main
    writes = is_main and not has_parent()  # else the parent does
    try:
        yield
    except UserError as error:
        if trainer.global_step == 0 and trainer.checkpoint is None and not error.details:
            directory.unmake()
            raise
        notify_parent("made", [])  # it stays
        if writes:
            note_failure(Path(path), error, job)
        raise
    except Exception as error:
        if writes:
            note_failure(Path(path), error, job)
            add_going_on(error, job, path)
        raise
    except Interrupted as error:
        interrupted = Interrupted(error.number, _resumable(job, trainer))
        if is_main:
            facts = {
                "reason": str(interrupted),
                **facts_of(strategy, trainer.progress),
                "metrics": trainer.metrics,
                "checkpoint": trainer.checkpoint,
                "directory": path,
            }
            note_ending(Path(path), job, "interrupted", facts)
        raise interrupted from None
    finally:
        directory.release()


def _resumable(job: Composed, trainer: Trainer) -> str:
    """Where a training was interrupted, and how to go on."""
    if job.settings.mode != "fit":
        return ""
    is_saved = trainer.checkpoint is not None or job.settings.resume is not None
    then = f"go on with {going_on(job, trainer.run.directory)}" if is_saved else "nothing was saved"
    return f" after step {trainer.global_step}; {then}"
