"""Finds what a `_target_` names; a misspelt part is refused with the nearest name there is."""

import importlib
import pkgutil
import sys
import traceback
from typing import Any

from dpframe.cli import plugins
from dpframe.cli.refusal import first_line
from dpframe.errors import UserError, suggestion


def locate(path: str, where: str) -> Any:
    """The class or function of a dotted path; an ImportError inside it is told as it was."""
    parts = path.split(".")
    if not all(parts):
        raise UserError(f"{where}={path} is no dotted path; write package.module.Class")
    for length in range(len(parts), 0, -1):
        module = _imported(".".join(parts[:length]), f"{where}={path}")
        if module is not None:
            return _attribute(module, parts, length, where)
    tops = [m.name for m in pkgutil.iter_modules()] + [m for m in sys.modules if "." not in m]
    near = suggestion(parts[0], (name for name in tops if not name.startswith("_")))
    near = near if near.startswith("did") else "is its folder on PYTHONPATH?"
    raise UserError(f"{where}={path}: there is no module {parts[0]}; {near}")


def _attribute(found: Any, parts: list[str], length: int, where: str) -> Any:
    path = ".".join(parts)
    for index, name in enumerate(parts[length:], length):
        if not hasattr(found, name):
            raise UserError(
                f"{where}={path}: {'.'.join(parts[:index])} has no {name}; "
                f"{_suggest(name, _names(found))}"
            )
        found = getattr(found, name)
    if not callable(found):
        raise UserError(f"{where}={path} is a {type(found).__name__}, nothing to build from")
    return found


def _suggest(name: str, names: list[str]) -> str:
    found = suggestion(name, names)
    return found if found.startswith("did") else "check its spelling"


def _names(owner: Any) -> list[str]:
    names = [name for name in dir(owner) if not name.startswith("_")]
    if hasattr(owner, "__path__"):
        names += [module.name for module in pkgutil.iter_modules(owner.__path__)]
    return names


def _imported(name: str, where: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise UserError(_import_error(error, where + plugins.origin_of(name))) from error
    except (ImportError, SyntaxError) as error:
        raise UserError(_import_error(error, where + plugins.origin_of(name))) from error


def _import_error(error: Exception, where: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if "importlib" not in frame.filename] or frames)[-1]
    file, line = last.filename, last.lineno
    if isinstance(error, SyntaxError):
        file, line = error.filename or file, error.lineno
        return f"{where}: {type(error).__name__}: {error.msg} ({file}, line {line})"
    return f"{where}: {type(error).__name__}: {first_line(error)} ({file}, line {line})"
