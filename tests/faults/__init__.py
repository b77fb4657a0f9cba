"""Faults that the tests have to notice: each changes one place in a function of the package.

They are in faults.toml; mutation.py says how a place is found.
"""

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from faults.mutation import CanNotPlant, mutated

LIST = Path(__file__).with_name("faults.toml")
ROOT = LIST.parents[2]
LEFT_OUT = (".*", "build", "dist", "outputs", "multirun", "site", "__pycache__", "*.egg-info")


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    room: str  # trainer, strategies, checkpoint, launch or gpu
    at: str  # the module within dpframe, a colon, and the function's qualified name
    operator: str
    given: str
    by: str = ""
    tests: str  # what pytest is given


def known(room: str = "") -> list[Fault]:
    faults = [_read(**each) for each in tomllib.loads(LIST.read_text())["fault"]]
    return [fault for fault in faults if room in ("", fault.room)]


def _read(*, name: str, room: str, at: str, tests: str, by: str = "", **operators: str) -> Fault:
    ((operator, given),) = operators.items()
    return Fault(name=name, room=room, at=at, operator=operator, given=given, by=by, tests=tests)


def planted(fault: Fault, root: Path = ROOT) -> tuple[Path, str]:
    """The file, and what it then is; raises CanNotPlant."""
    module, _, function = fault.at.partition(":")
    path = root / "dpframe" / f"{module.replace('.', '/')}.py"
    try:
        source = path.read_text()
        return path, mutated(source, function, fault.operator, fault.given, fault.by)
    except (CanNotPlant, FileNotFoundError) as error:
        why = error if isinstance(error, CanNotPlant) else "is no module"
        raise CanNotPlant(
            f"{fault.name}: at {fault.at}: {why}; faults.toml follows the code"
        ) from None


def copied(target: Path) -> Path:
    """What the tests need of the working tree."""
    return shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)


def plant(fault: Fault, root: Path) -> None:
    """Into a copy."""
    path, text = planted(fault, root)
    path.write_text(text)
