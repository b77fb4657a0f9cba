"""Starts a job's ranks again after one has failed, from the newest checkpoint that is whole."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpframe import files, interruption
from dpframe.cli import logs
from dpframe.cli.compose import Composed
from dpframe.errors import UserError, printable
from dpframe.strategies import Strategy, ranks
from dpframe.strategies.launch import RankFailed


def launch(strategy: Strategy, work: Callable[[Composed], Any], job: Composed) -> Any:
    """`trainer.max_restarts` times; what a user did wrong, and a signal, end the job at once."""
    allowed = job.settings.trainer.max_restarts
    if allowed:
        _refuse_where_impossible(strategy, allowed)
    for number in range(1, allowed + 1):
        try:
            return _launched(strategy, work, job)
        except RankFailed as error:
            print(printable(str(error)), file=sys.stderr)
            job, where = _again(job, error.told.get("directory"))
            print(f"restart {number} of {allowed} {where}", file=sys.stderr, flush=True)
            interruption.look()
    return _launched(strategy, work, job)


def _launched(strategy: Strategy, work: Callable[[Composed], Any], job: Composed) -> Any:
    try:
        return strategy.launch(work, job)
    except (RankFailed, UserError) as error:
        directory = error.told.get("directory", "")
        if os.path.isdir(directory):
            logs.append(Path(directory), str(error))
        raise


def _refuse_where_impossible(strategy: Strategy, allowed: int) -> None:
    if ranks.is_rank():
        raise UserError(
            f"trainer.max_restarts={allowed} but torchrun has started this rank; "
            f"use torchrun --max-restarts={allowed}, with resume=DIR"
        )
    if not strategy.launches_ranks:
        raise UserError(
            f"trainer.max_restarts={allowed} but {strategy.name} runs in this process, which can't "
            "start itself again; use strategy=ddp, or trainer.max_restarts=0"
        )


def _again(job: Composed, directory: str | None) -> tuple[Composed, str]:
    """The job from where it was; and where that is."""
    if directory is None:
        return job, "from the beginning"
    job = replace(job, run_dir=directory, is_run_dir_given=True)
    path = files.newest_good(Path(directory) / "checkpoints")
    if path is None:
        return replace(job, is_repeated=True), "from the beginning: there is no checkpoint yet"
    settings = replace(job.settings, resume=str(path))
    return replace(job, start=path, settings=settings), f"from {path}, step {files.step_of(path)}"
