"""Runs the command: many lines in one process, or each as a user does.

`attempts` takes most tests where they want to go, in milliseconds a line, and `dpframe` where a
line needs a process of its own. `cold_attempts`, `cold_dpframe` and `Environment` start an
interpreter: they are for tests of the start, of what is imported, and of an installation.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from attempted import Attempt, attempted
from forked import fresh, run

ROOT = Path(__file__).resolve().parent.parent
CONFS = [ROOT / "conf", *sorted(ROOT.glob("dpframe/plugins/*/conf"))]
CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "COMP_LINE", "COMP_POINT")
HEAVY = ("torch", "numpy", "tensorboard", "rich", "dpframe.trainer.loop", "dpframe.strategies")


def attempts(lines: list[list[str]], directory: Path, **variables: str) -> list[Attempt]:
    """Each line as the command would take it; all in one process, which has torch imported."""
    return fresh(attempted, lines, folder=directory, environment=environment(**variables))


def cold_attempts(
    lines: list[list[str]], directory: Path, **variables: str
) -> tuple[list[Attempt], list[str]]:
    """The same in a new interpreter, and the heavy modules that were imported."""
    done, _, heavy = cold_refusals(lines, [], directory, **variables)
    return done, heavy


def cold_refusals(
    lines: list[list[str]],
    composed: list[tuple[list[list[str]], str | None]],
    directory: Path,
    **variables: str,
) -> tuple[list[Attempt], list[list[str]], list[str]]:
    """Beside them, what `attempted.refusals` says of lines that are only composed."""
    program = str(ROOT / "tests" / "attempted.py")
    printed = output_of([program], [lines, composed, HEAVY], directory, **variables)
    results, refusals, heavy = json.loads(printed)
    return [Attempt(*result) for result in results], refusals, heavy


def output_of(python: list[str], given: list, directory: Path, **variables: str) -> str:
    """What `python …` prints that reads `given` as JSON."""
    done = subprocess.run(
        [sys.executable, *python],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment(**variables),
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def dpframe(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A line in a process of its own, which has torch imported."""
    return run(words, cwd, **environment(**variables))


def cold_dpframe(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m dpframe …` in a new interpreter."""
    command, env = [sys.executable, "-m", "dpframe", *words], environment(**variables)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200)


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


def launcher(name: str) -> str:
    """hydra_plugins/own.py: Hydra's own launcher by another name."""
    return f"""
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore


class Other(BasicLauncher):
    pass


@dataclass
class Node:
    _target_: str = "hydra_plugins.own.Other"


ConfigStore.instance().store(group="hydra/launcher", name="{name}", node=Node, provider="own")
"""
