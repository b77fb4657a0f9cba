"""Runs a composed job by its mode, and starts the processes of those modes that have a Trainer.

A run is: `run` -> the mode's `run` -> `launch` -> in each process `_run_rank` -> `process.perform`.
"""

import os
import sys
from contextlib import chdir
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from dpframe.checkpoint import seal
from dpframe.config import modes
from dpframe.config.build import check_targets
from dpframe.config.compose import Composed
from dpframe.config.parts import strategy_of
from dpframe.config.target import see_own_folders
from dpframe.devices import memory
from dpframe.errors import DeviceLost, UserError, explain_exits, printable
from dpframe.launch import environment, local, signals
from dpframe.launch.rank_errors import RankFailed
from dpframe.modes import output
from dpframe.modes.directory import remove
from dpframe.modes.ending import add_going_on, note_failure
from dpframe.modes.process import Work, perform
from dpframe.strategies import Strategy
from dpframe.trainer.compute.placement import process_settings_restored


def run(job: Composed, *, owns_process: bool = True) -> dict[str, Any]:
    """Returns the summary of the job's mode; one that returns nothing has an empty one.

    One that does not own its process may have computed, so that it can't be forked."""
    if owns_process:
        local.allow_fork()
    signals.set_grace(job.settings.trainer.grace_seconds)
    with explain_exits():  # in a module that it imports
        check_targets(job)
    mode = job.settings.mode
    what, todo = f"mode={mode}", "take a smaller task, or a smaller batch"
    with memory.explain(torch.device("cpu"), what, todo):
        summary: dict[str, Any] | None = modes.load(mode).run(job)
    return summary or {}


def launch(job: Composed, work: Work) -> dict[str, Any]:
    """Does a mode's work in the processes that the strategy starts; the main one's summary."""
    try:
        return _launch_again_after_failures(job, work)
    except UserError as error:
        made = error.told.get("made", [])  # by the main rank, where another one met the mistake
        is_mistake = error.exit_code == UserError.exit_code
        if is_mistake and made and not any(made[0].glob("checkpoints/*.ckpt")):
            remove(made)
        raise


def _launch_again_after_failures(job: Composed, work: Work) -> dict[str, Any]:
    """Starts the ranks again after one has failed, `trainer.max_restarts` times.

    What a user did wrong, a lack of memory and a signal end the job at once.
    """
    allowed = job.settings.trainer.max_restarts
    strategy = strategy_of(job)()
    if allowed:
        _refuse_restarts(strategy, allowed)
    for number in count(1):
        try:
            return strategy.launch(_run_rank, job, work)
        except (RankFailed, UserError) as error:
            path = error.told.get("directory", "")
            if os.path.isdir(path):
                log = error.details + str(error) if isinstance(error, UserError) else error.whole
                output.append(Path(path), log)
                note_failure(Path(path), error, job)
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


@output.goes_on_unread()
@explain_exits()
def _run_rank(job: Composed, work: Work) -> dict[str, Any]:
    """In every process of the job."""
    hang_seconds = job.settings.trainer.hang_seconds
    with signals.watched(hang_seconds), process_settings_restored(), chdir("."):
        see_own_folders(job.config, job.config_dir, job.start)
        strategy = strategy_of(job)()
        signals.raise_if_signaled()
        with strategy:
            return perform(job, work, strategy)
