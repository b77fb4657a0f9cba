"""Ranks that torchrun starts again go on where their job was: nobody types `resume=`.

A run directory has the names of the torchrun processes whose job it is of. They outlive their
ranks, so that the next ones find it; a machine that has come back gets the checkpoint sent.
"""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpframe import checkpoint
from dpframe.checkpoint import seal
from dpframe.cli.compose import Composed
from dpframe.cli.nodes import start_of
from dpframe.cli.resume import run_directory
from dpframe.strategies import Strategy

NOTE = "torchrun"  # in .hydra/


def agent() -> str:
    """The torchrun process that has started this rank; '': none has."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    pid = os.getppid()
    stat = Path(f"/proc/{pid}/stat")
    since = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else ""
    return f"{socket.gethostname()} {pid} {since}".strip()


def note(directory: str, strategy: Strategy) -> None:
    """Writes down whose job it is. Every rank calls it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agents = strategy.collectives.gather(agent())
    if strategy.is_main:
        text = "".join(f"{each}\n" for each in dict.fromkeys(agents))
        (Path(directory) / ".hydra" / NOTE).write_text(text)


def start(job: Composed, strategy: Strategy) -> tuple[Composed, dict[str, Any] | None, str]:
    """The job, the checkpoint that it begins with, and what a log is to say of that."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or job.settings.mode != "fit":
        return job, start_of(job, strategy), ""
    mine = _found(job)
    path = seal.newest_of_run(mine or "")
    seen = {
        "directory": str(mine) if mine is not None else None,
        "step": seal.step_of(path) if path is not None else -1,
        "seal": seal.identity(path) if path is not None else "",
    }
    found = strategy.collectives.broadcast(strategy.collectives.gather(seen))
    newest = max(found, key=lambda each: each["step"])
    if newest["directory"] is None:
        return job, start_of(job, strategy), ""
    directory = str(mine) if mine is not None else newest["directory"]
    job = replace(job, run_dir=directory, is_run_dir_given=True)
    if newest["step"] < 0:
        return replace(job, is_repeated=True), start_of(job, strategy), ""
    source = found.index(newest)
    if mine is None:  # a machine that is back may see the others' disk
        path = seal.newest_of_run(directory)
    has_it = path is not None and seal.identity(path) == newest["seal"]
    if all(strategy.collectives.broadcast(strategy.collectives.gather(has_it))):
        state = checkpoint.load(path, whole=strategy.sharding is None)  # type: ignore[arg-type]
    else:
        is_source = strategy.rank == source
        sent = strategy.collectives.gather(checkpoint.load(path) if is_source else None)  # type: ignore[arg-type]
        state = strategy.collectives.broadcast(sent[source] if strategy.is_main else None)
    name = f"{newest['directory']}/checkpoints"
    settings = replace(job.settings, resume=name, checkpoint=None)
    said = f"torchrun has started the ranks again: they go on from {name}, step {newest['step']}"
    return replace(job, start=path, settings=settings), state, said


def _found(job: Composed) -> Path | None:
    """The newest directory of this job on this machine."""
    given = run_directory(job.start) if job.start is not None else None
    places = [*Path(job.run_dir).parent.glob("*"), *([given] if given else [])]
    notes = [place / ".hydra" / NOTE for place in places]
    mine = [path for path in notes if path.is_file() and agent() in path.read_text().splitlines()]
    return max(mine, key=seal.time_of).parent.parent if mine else None
