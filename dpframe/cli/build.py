"""Builds what `_target_` names, after checking that it is there and takes what it is given."""

import importlib
import inspect
import pkgutil
import traceback
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from dpframe.errors import UserError, suggestion

SPECIAL = {"_target_", "_args_", "_partial_", "_recursive_", "_convert_"}
SCALARS = (bool, int, float, str)


def build(node: Mapping[str, Any], where: str, kind: type | None = None) -> Any:
    """The object that the node describes; `where` is its key in the config, for the errors."""
    check(node, where, kind)
    from hydra.utils import instantiate

    try:
        made = instantiate(dict(node), _convert_="all")
    except Exception as error:
        raise _own_error(error) from None
    if kind is not None and not isinstance(made, kind):
        raise UserError(
            f"{where}._target_={node['_target_']} gives a {type(made).__name__}, "
            f"not a dpframe {kind.__name__}"
        )
    return made


def check(node: Any, where: str, kind: type | None = None) -> None:
    """Refuses, before anything is called, a target or an argument that can't be right."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            target = locate(str(node["_target_"]), f"{where}._target_")
            if kind is not None and isinstance(target, type) and not issubclass(target, kind):
                raise UserError(
                    f"{where}._target_={node['_target_']} is not a dpframe {kind.__name__}"
                )
            _check_arguments(target, node, where)
        for name, value in node.items():
            check(value, f"{where}.{name}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            check(value, f"{where}[{index}]")


def locate(path: str, where: str) -> Any:
    """The class or function of a dotted path; an ImportError inside it is told as it was."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        module = _imported(".".join(parts[:length]), f"{where}={path}")
        if module is None:
            continue
        found: Any = module
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
    raise UserError(f"{where}={path}: there is no module {parts[0]}; is its folder on PYTHONPATH?")


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
        raise UserError(_import_error(error, where)) from error
    except Exception as error:
        raise UserError(_import_error(error, where)) from error


def _import_error(error: Exception, where: str) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    named = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    last = named[-1] if named else last
    return f"{where}: {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def _check_arguments(target: Any, node: Mapping[str, Any], where: str) -> None:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return  # a builtin without a signature
    given = {name: value for name, value in node.items() if name not in SPECIAL}
    name = getattr(target, "__name__", str(target))
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in given:
        if key not in parameters and not takes_any:
            raise UserError(
                f"{where}.{key}: {name} takes no such argument; {suggestion(key, parameters)}"
            )
    if not node.get("_partial_") and not node.get("_args_"):
        for key, parameter in parameters.items():
            is_plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if is_plain and parameter.default is parameter.empty and key not in given:
                raise UserError(f"{where}.{key} is missing; {name} needs it")
    hints = _hints(target)
    for key, value in given.items():
        _check_type(value, hints.get(key), f"{where}.{key}")


def _hints(target: Any) -> dict[str, Any]:
    try:
        return get_type_hints(getattr(target, "__init__") if isinstance(target, type) else target)  # noqa: B009
    except Exception:
        return {}  # annotations that don't resolve are no reason to refuse a run


def _check_type(value: Any, hint: Any, where: str) -> None:
    """Only what is certain: a plain value where the annotation names other plain types."""
    if hint is None or not isinstance(value, SCALARS):
        return
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = [option for option in options if option in SCALARS]
    if not plain or Any in options or type(value) in plain:
        return
    if float in plain and type(value) is int:
        return
    raise UserError(
        f"{where}={value} is a {type(value).__name__}; "
        f"give {' or '.join(_spoken(option) for option in options)}"
    )


def _spoken(option: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if option is type(None):
        return "null"
    return words.get(option) or str(getattr(option, "__name__", option))


def _own_error(error: Exception) -> Exception:
    """The error that the user's constructor raised, not Hydra's about it."""
    while error.__cause__ is not None and type(error).__module__.startswith("hydra."):
        assert isinstance(error.__cause__, Exception)
        error = error.__cause__
    return error
