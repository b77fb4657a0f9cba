"""Faults that the tests have to notice: each is a text of the package, and one in its place.

They are in faults.toml. A text is searched in the whole package, so that code may move.
"""

import shutil
import tomllib
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("faults.toml")
ROOT = LIST.parents[2]
LEFT_OUT = (".*", "build", "dist", "outputs", "multirun", "site", "__pycache__", "*.egg-info")


class Fault(NamedTuple):
    name: str
    room: str  # trainer, strategies, checkpoint or launch
    old: str
    new: str
    tests: str  # what pytest is given


def known() -> list[Fault]:
    return [Fault(**each) for each in tomllib.loads(LIST.read_text())["fault"]]


def places(fault: Fault, root: Path = ROOT) -> list[Path]:
    """The files that have the text, each as often as it is there: for a fault there is one."""
    files = sorted((root / "dpframe").rglob("*.py"))
    return [path for path in files for _ in range(path.read_text().count(fault.old))]


def copied(target: Path) -> Path:
    """What the tests need of the working tree."""
    return shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)


def plant(fault: Fault, root: Path) -> Path:
    """Into a copy; returns the changed file."""
    (path,) = places(fault, root)
    path.write_text(path.read_text().replace(fault.old, fault.new))
    return path
