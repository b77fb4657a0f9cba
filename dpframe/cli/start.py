"""Which checkpoint a run starts from: found before torch is imported, once for all ranks."""

import os
import sys
from functools import cache
from pathlib import Path

from dpframe import seal
from dpframe.cli.settings import RunSettings
from dpframe.errors import UserError, printable


def start_file(settings: RunSettings, runs: Path) -> Path | None:
    """What `resume` or `checkpoint` names; `runs` is where this recipe's runs are."""
    if settings.resume is not None:
        return resumed_file(settings.resume, runs)
    if settings.checkpoint is not None:
        return checkpoint_file(settings.checkpoint)
    return None


def checkpoint_file(checkpoint: str) -> Path:
    return _file("checkpoint", Path(checkpoint))


def resumed_file(resume: str, runs: Path) -> Path:
    """`last`, a run's directory or a file; of a run, its newest checkpoint that is whole."""
    if resume == "last":
        found = sorted(runs.glob("*/checkpoints/*.ckpt"), key=seal.written_at)
        if not found:
            raise UserError(f"resume=last: there is no run with a checkpoint in {runs}")
        return _newest_good(found[-1].parent, "resume=last")
    path = Path(resume).expanduser()
    if os.path.isdir(path):  # and a name that is too long is none
        return _newest_good(path / "checkpoints", f"resume={resume}")
    return _file("resume", path)


def resumed_directory(start: Path) -> Path | None:
    """The run directory that a resumed run goes on in."""
    return start.parent.parent if start.parent.name == "checkpoints" else None


@cache  # composing asks twice, and a file is read whole each time
def _newest_good(directory: Path, given: str) -> Path:
    there = list(directory.glob("*.ckpt"))
    if not there:
        raise UserError(f"{given}: there is no checkpoint in {directory}")
    last, good = directory / "last.ckpt", seal.newest_good(directory)
    if good is None:
        raise UserError(f"{given}: no checkpoint in {directory} is whole: {seal.flaw(there[0])}")
    if good != last and last.exists() and (flaw := seal.flaw(last)):
        line = f"dpframe: {last}: {flaw}; going on from {good}"
        print(printable(line), file=sys.stderr)
    return good


def _file(key: str, path: Path) -> Path:
    path = path.expanduser()
    if os.path.isdir(path):
        raise UserError(f"{key}={path} is a directory; name a file in it, as checkpoints/best.ckpt")
    if not os.path.isfile(path):
        raise UserError(f"{key}={path}: there is no such file")
    return path
