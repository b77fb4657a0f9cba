"""Runs the command: many lines in one process, one in its own, or in an environment of its own."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
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


def attempts(
    lines: list[list[str]], directory: Path, **variables: str
) -> tuple[list[Attempt], list[str]]:
    """Each line as the command would take it, and the heavy modules that were imported."""
    results, heavy = json.loads(output_of(ATTEMPTS, [lines, HEAVY], directory, **variables))
    return [Attempt(*result) for result in results], heavy


def output_of(code: str, given: list, directory: Path, **variables: str) -> str:
    """What Python code prints that reads `given` as JSON, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment(**variables),
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


class Environment:
    """A virtual environment that sees this one's packages, but none of its .pth files."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, symlinks=True)
        self.python = directory / "bin" / "python"
        self.packages = Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
        (self.packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install(self, *words: object) -> None:
        offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
        output(sys.executable, "-m", "pip", f"--python={self.python}", "install", *offline, *words)

    def __call__(self, *words: object, cwd: Path) -> str:
        """What `dpframe …` or `python …` prints in it."""
        program = self.python.with_name("dpframe") if words[0] == "dpframe" else self.python
        return output(program, *words[words[0] == "dpframe" :], cwd=cwd)


def output(*words: object, cwd: Path | None = None) -> str:
    """What a program prints that nothing in the environment variables leads elsewhere."""
    dropped = (*CLEAN, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
