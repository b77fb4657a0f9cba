"""Finds what a `_target_` names; a misspelt part is refused with the nearest name there is."""

import importlib
import importlib.util
import pkgutil
import sys
import traceback
import types
from typing import Any

from dpframe.cli import plugins, source
from dpframe.cli.refusal import first_line
from dpframe.errors import UserError, suggestion


def locate(path: str, where: str) -> Any:
    """The class or function of a dotted path; an ImportError inside it is told as it was.

    As Hydra and pydoc walk it: what a module has comes before a submodule of the same name.
    """
    parts = parts_of(path, where)
    found = _imported(parts[0], f"{where}={path}")
    if found is None:
        raise _no_module(path, where)
    for index, name in enumerate(parts[1:], 1):
        has_it, value = _attribute(found, name, f"{where}={path}")
        if has_it:
            found = value
            continue
        module = None
        if isinstance(found, types.ModuleType):
            module = _imported(".".join(parts[: index + 1]), f"{where}={path}")
        if module is None:
            raise no_attribute(".".join(parts[:index]), name, _names(found), path, where)
        found = module
    if not callable(found):
        raise UserError(f"{where}={path} is a {type(found).__name__}, nothing to build from")
    return found


def see_current_directory(top: str) -> None:
    """It is looked at last, and not before a config names a module that is in no other place.

    So what lies in it can't stand for a package that Hydra or torch tries to import.
    """
    if sys.flags.safe_path or source.spec_of(top) is not None:
        return
    here = source.current_directory_has(top)
    if here is not None and here not in sys.path:
        sys.path.append(here)


def refuse_misspelt(path: str, where: str) -> None:
    """As `locate` would, as far as that can be seen without importing anything."""
    top = parts_of(path, where)[0]
    try:
        is_there = top in sys.modules or importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise _no_module(path, where)


def parts_of(path: str, where: str) -> list[str]:
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UserError(f"{where}={path} is no dotted path; write package.module.Class")
    for part in parts:
        if part.startswith("__"):
            raise UserError(f"{where}={path}: {part} is Python's own; write package.module.Class")
    return parts


def _no_module(path: str, where: str) -> UserError:
    top = path.split(".")[0]
    tops = [m.name for m in pkgutil.iter_modules()] + [m for m in sys.modules if "." not in m]
    near = suggestion(top, (name for name in tops if not name.startswith("_")))
    near = near if near.startswith("did") else "is its folder on PYTHONPATH?"
    return UserError(f"{where}={path}: there is no module {top}; {near}")


def no_attribute(above: str, name: str, names: list[str], path: str, where: str) -> UserError:
    near = suggestion(name, names)
    near = near if near.startswith("did") else "check its spelling"
    return UserError(f"{where}={path}: {above} has no {name}; {near}")


def _attribute(owner: Any, name: str, where: str) -> tuple[bool, Any]:
    try:
        return True, getattr(owner, name)
    except AttributeError:
        return False, None
    except Exception as error:  # a module's own __getattr__, as that of torch.classes
        raise UserError(f"{where}: {type(error).__name__}: {first_line(error)}") from None


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
