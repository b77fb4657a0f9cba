"""Finds what a `_target_` names, and tells in one line what is wrong with its name."""

import importlib
import inspect
import pkgutil
import sys
import traceback
import types
from collections.abc import Iterable
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpframe.config import plugins
from dpframe.config.earlier_run import run_directory
from dpframe.config.untrusted import calls_in
from dpframe.errors import UserError, first_line, nearest

HOMES = (  # of classes that are named without a path
    *("torch.optim", "torch.optim.lr_scheduler", "torch.nn"),
    *("dpframe.callbacks", "dpframe.loggers", "dpframe.strategies"),
)
EXTRAS = {"torchmetrics": "metrics"}  # a package, and what brings it
UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def find(path: str, where: str) -> Any:
    """Imports the class or function of a dotted path; `where` is the config key for errors."""
    parts, given = path.split("."), f"{where}={path}"
    if not all(part.isidentifier() for part in parts):
        raise UserError(f"{given} is not a dotted path; write package.module.Class")
    target = _import(parts[0], given)
    if target is None:
        if whole := in_full(path):
            raise UserError(f"{given} is not a complete path; write {where}={whole}")
        if extra := EXTRAS.get(parts[0]):
            raise UserError(f"{given} needs {parts[0]}; pip install 'dpframe[{extra}]'")
        names = [*(module.name for module in pkgutil.iter_modules()), *sys.modules]
        raise _unknown(f"{given}: there is no module {parts[0]}", parts[0], names)
    for index, name in enumerate(parts[1:], 1):
        above = ".".join(parts[:index])
        if isinstance(target, types.ModuleType) and not hasattr(target, name):
            _import(f"{above}.{name}", given)  # binds it in the package
        if not hasattr(target, name):
            raise _no_attribute(target, above, name, given)
        target = getattr(target, name)
    if not callable(target):
        raise UserError(f"{given} is a {type(target).__name__}, which builds nothing; name a class")
    return target


def taken_by(target: Any) -> tuple[list[str], bool]:
    """What a class or a function takes, also by a `**more` that goes to a class that it is built
    on; and whether that is all."""
    names: list[str] = []
    of_class = target.__mro__ if isinstance(target, type) else ()
    makers = [vars(each)["__init__"] for each in of_class if "__init__" in vars(each)]
    for maker in makers or [target]:
        try:
            parameters = inspect.signature(maker).parameters.values()
        except (TypeError, ValueError):  # a builtin without a signature
            break
        plain = (each for each in parameters if each.kind not in UNNAMED)
        names += [each.name for each in plain if each.name not in ("self", *names)]
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            return names, True
    return names, False


def see_own_folders(config: Any, config_dir: Path | None, start: Path | None) -> None:
    """Appends the folder that the `--config-dir` is in, or the current directory, to `sys.path`.

    Only once a config names a module that is only there, so that no file there stands in for a
    package that Hydra or torch tries to import. The current directory is not seen where it is in
    the run directory that a run starts from, which is data; a file that is loose hides nothing.
    """
    here, run = Path.cwd(), None if start is None else run_directory(start)
    is_data = run is not None and (run / ".hydra").is_dir() and here.is_relative_to(run.resolve())
    folders = [] if config_dir is None else [str(config_dir.parent)]
    folders += [] if sys.flags.safe_path or is_data else [str(here)]
    for top in {str(path).split(".")[0] for path in calls_in(config).values()}:
        if not top.isidentifier() or _is_importable(top):
            continue
        there = (folder for folder in folders if PathFinder.find_spec(top, [folder]) is not None)
        folder = next(there, None)
        if folder is not None and folder not in sys.path:
            sys.path.append(folder)


def in_full(name: str) -> str:
    """The path of the class that `Adam`, `sgd` or `optim.Adam` stands for in torch or dpframe."""
    above, _, last = f".{name}".rpartition(".")
    homes = [importlib.import_module(home) for home in HOMES if f".{home}".endswith(above)]
    names = [f"{home.__name__}.{each}" for home in homes for each in dir(home) if each[0].isupper()]
    return next((path for path in names if path.lower().endswith(f".{last.lower()}")), "")


def _is_importable(top: str) -> bool:
    with suppress(ImportError, ValueError, AttributeError):
        return find_spec(top) is not None
    return False


def _no_attribute(target: Any, above: str, name: str, given: str) -> UserError:
    folders = list(getattr(target, "__path__", ()))
    names = [*dir(target), *(module.name for module in pkgutil.iter_modules(folders))]
    where = f"{above} is {folders[0]}; " if folders else ""  # another one of its name may be meant
    return _unknown(f"{given}: {above} has no {name}", name, names, where)


def _unknown(line: str, name: str, names: Iterable[str], where: str = "") -> UserError:
    plain = (each for each in names if "." not in each and each[0] != "_")
    near = nearest(name, plain, cutoff=0.7)
    hint = f"did you mean {near}?" if near else f"{where}check it, and PYTHONPATH"
    return UserError(f"{line}; {hint}")


def _import(name: str, given: str) -> Any:
    """None where there is no such module; an ImportError inside it is a line with its place."""
    try:
        return importlib.import_module(name)
    except (ImportError, SyntaxError) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            return None
        frames = traceback.extract_tb(error.__traceback__)
        last = [frame for frame in frames if "importlib" not in frame.filename][-1]
        said, file, line = first_line(error), last.filename, last.lineno
        if isinstance(error, SyntaxError):
            said, file, line = error.msg, error.filename or file, error.lineno
        kind, whose = type(error).__name__, plugins.origin_of(name)
        raise UserError(f"{given}{whose}: {kind}: {said} ({file}, line {line})") from error
