"""Ranks that torchrun starts again go on where their job was: nobody types `resume=`.

A run directory has the names of the torchrun processes whose job it is of. They outlive their
ranks, so that the next ones find it, on a disk that all their machines have in common.
"""

import os
import socket
from dataclasses import replace
from pathlib import Path

from dpframe.checkpoint import seal
from dpframe.config.compose import Composed
from dpframe.config.earlier_run import run_directory
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


def find(job: Composed, strategy: Strategy) -> tuple[Composed, str]:
    """The job, which goes on if torchrun has started it before, and what a log is to say of that.
    Every rank calls it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or job.settings.mode != "fit":
        return job, ""
    agents = strategy.collectives.gather(agent())
    mine = _find_directory(job, agents) if strategy.is_main else None
    directory, path = strategy.collectives.broadcast((mine, seal.newest_of_run(mine or "")))
    if directory is None:
        return job, ""
    job = replace(job, run_dir=directory, is_run_dir_given=True)
    if path is None:
        return replace(job, is_repeated=True), ""
    name = f"{directory}/checkpoints"
    settings = replace(job.settings, resume=name, checkpoint=None)
    step = seal.step_of(path)
    said = f"torchrun has started the ranks again: they go on from {name}, step {step}"
    return replace(job, start=path, settings=settings), said


def _find_directory(job: Composed, agents: list[str]) -> str | None:
    """The newest one of this job."""
    given = run_directory(job.start) if job.start is not None else None
    places = [*Path(job.run_dir).parent.glob("*"), *([given] if given else [])]
    notes = [path for place in places if (path := place / ".hydra" / NOTE).is_file()]
    own = [path for path in notes if set(agents) & set(path.read_text().splitlines())]
    return str(max(own, key=seal.time_of).parent.parent) if own else None
