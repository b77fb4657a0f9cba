"""Runs the command line in other processes: alone, or many lines in one process that is quick."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "COMP_LINE", "COMP_POINT")
HEAVY = ("torch", "numpy", "tensorboard", "rich", "dpframe.trainer.loop", "dpframe.strategies")

ATTEMPTS = """
import contextlib, io, json, os, sys

sys.path.remove("")  # as the console script has it

from dpframe.cli import main


def attempt(line):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(line)
        except SystemExit as left:
            code = left.code
    return code, out.getvalue(), err.getvalue(), sorted(os.listdir())


lines, heavy = json.load(sys.stdin)
done = [attempt(line) for line in lines]
json.dump([done, [name for name in heavy if name in sys.modules]], sys.stdout)
"""


class Attempt(NamedTuple):
    code: int
    out: str
    err: str
    files: list[str]  # in the current directory, afterwards


def attempts(lines: list[list[str]], directory: Path) -> tuple[list[Attempt], list[str]]:
    """Each line as the command would take it, and the heavy modules that were imported."""
    results, heavy = json.loads(output_of(ATTEMPTS, [lines, HEAVY], directory))
    return [Attempt(*result) for result in results], heavy


def output_of(code: str, given: list, directory: Path) -> str:
    """What Python code prints that reads `given` as JSON, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment(),
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def dpframe(*words: str, cwd: Path, **options) -> subprocess.CompletedProcess:
    """`python -m dpframe …`"""
    given = {"capture_output": True, "text": True, "timeout": 200, "env": environment()} | options
    return subprocess.run([sys.executable, "-m", "dpframe", *words], cwd=cwd, **given)


def environment(**more: str) -> dict[str, str]:
    """This one, with the dpframe under test in front wherever the command runs."""
    inherited = {name: value for name, value in os.environ.items() if name not in CLEAN}
    return inherited | {"PYTHONPATH": str(ROOT)} | more


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory
