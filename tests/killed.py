"""A run that is resumed and killed at a change that this makes to its files, twice, and resumed.

Run as a program with tests/disk.c preloaded, it forks a process a run: torch is imported once.
"""

import ctypes
import json
import math
import os
import shutil
import sys
from pathlib import Path

import warmed  # noqa: F401

from dpframe.cli import main
from dpframe.modes import run  # noqa: F401  imports torch
from dpframe.recipes import boston  # noqa: F401
from dpframe.trainer import recorder

recorder.BETWEEN_FLUSHES = math.inf  # else a slow run has more changes than another one
BEGIN = [
    "recipe=boston",
    "hydra.run.dir=run",
    "trainer.log_every=1",
    "trainer.max_epochs=2",
    "callbacks.checkpoint.keep=2",
    "callbacks.checkpoint.seconds_between=0",
    "callbacks.progress=null",  # whose lines in run.log follow a clock
]
RESUME = ["resume=run", "trainer.max_epochs=3"]


def begun(directory: Path) -> None:
    """As if killed with a curve of eight steps, and a checkpoint of four."""
    directory.mkdir()
    assert apart(BEGIN, directory) == 0
    for name in ("last.ckpt", "best.ckpt", "epoch0002-step8.ckpt"):
        (directory / "run/checkpoints" / name).unlink()


def apart(line: list[str], directory: Path, *, kill_at: int = -1) -> int:
    """The exit code of the command in a process of its own; `kill_at` 0 only counts."""
    child = os.fork()
    if child == 0:
        os.chdir(directory)
        for number, name in ((1, "said"), (2, "complained")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        if kill_at >= 0:
            changes = os.open("changes", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            ctypes.CDLL(None).disk_kill_at(ctypes.c_long(kill_at), b"run", changes)
        code = 1
        try:
            main(line)
        except SystemExit as left:
            code = int(left.code or 0)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(directory: Path, base: Path, numbers: tuple[int, int]) -> list[int]:
    shutil.copytree(base, directory)
    killed = [apart(RESUME, directory, kill_at=number) for number in numbers]
    return [*killed, apart(RESUME, directory)]


def program(root: str, every: int) -> None:
    base, whole = Path(root) / "base", Path(root) / "whole"
    begun(base)
    shutil.copytree(base, whole)
    assert apart(RESUME, whole, kill_at=0) == 0
    count = len((whole / "changes").read_text().splitlines())
    numbers = list(range(1, count + 1, every))
    half = (len(numbers) + 1) // 2
    # The late ones first: the second resume has fewer changes to make than the first one.
    pairs = zip(numbers[-half:], reversed(numbers[:half]), strict=True)
    codes = {f"{a}-{b}": killed_at(Path(root) / f"{a}-{b}", base, (a, b)) for a, b in pairs}
    json.dump(codes, sys.stdout)


if __name__ == "__main__":
    program(*json.loads(sys.argv[1]))
