"""Builds what `_target_` names, after checking that it is there and takes what it is given."""

import inspect
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from dpframe.cli.locate import locate
from dpframe.cli.refusal import first_line
from dpframe.cli.settings import kind_of, shown
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
        own = _own_error(error)
        raise refused(own, {where: node}) or own from own.__cause__
    if kind is not None and not isinstance(made, kind):
        raise UserError(
            f"{where}._target_={node['_target_']} gives a {type(made).__name__}, "
            f"not a dpframe {kind.__name__}"
        )
    return made


def refused(error: Exception, nodes: Mapping[str, Any]) -> UserError | None:
    """The line for what a constructor says about its own arguments, as Adam does about lr=-1.

    None for an error from anywhere deeper: that is a bug, which wants its traceback.
    """
    if not isinstance(error, ValueError | RuntimeError):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    described = [found for where, node in nodes.items() for found in _described(node, where)]
    for index, frame in enumerate(frames):
        below = frames[index + 1 :]
        if all(deeper.f_code.co_name in ("__init__", "__new__") for deeper in below):
            for where, node, target in described:
                if _runs(frame, target):
                    return _refusal(error, where, node, target)
    return None


def check(node: Any, where: str, kind: type | None = None) -> None:
    """Refuses, before anything is called, a target or an argument that can't be right."""
    if kind is not None and not (isinstance(node, Mapping) and node.get("_target_")):
        given = where if isinstance(node, Mapping) else f"{where}={shown(node)}"
        raise UserError(f"{given} has no _target_; name its class")
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
        has_no_default = key not in parameters or parameters[key].default is not None
        if value is not None or has_no_default:
            _check_type(value, hints.get(key), f"{where}.{key}")


def _hints(target: Any) -> dict[str, Any]:
    try:
        return get_type_hints(getattr(target, "__init__") if isinstance(target, type) else target)  # noqa: B009
    except Exception:
        return {}  # annotations that don't resolve are no reason to refuse a run


def _check_type(value: Any, hint: Any, where: str) -> None:
    """Only what is certain: a plain value where the annotation names other plain types."""
    if hint is None or not isinstance(value, (*SCALARS, type(None))):
        return
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = [option for option in options if option in SCALARS]
    if not plain or Any in options or type(value) in options:
        return
    if float in plain and type(value) is int:
        return
    raise UserError(
        f"{where}={shown(value)} is {kind_of(value)}; "
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
    if type(error).__module__.startswith("hydra."):
        return UserError(first_line(error))
    return error


def _described(node: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Every node below that names a target, with its key and what it names."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield where, node, locate(str(node["_target_"]), where)
        for name, value in node.items():
            yield from _described(value, f"{where}.{name}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _described(value, f"{where}[{index}]")


def _runs(frame: types.FrameType, target: Any) -> bool:
    if isinstance(target, type):
        is_constructor = frame.f_code.co_name in ("__init__", "__new__")
        return is_constructor and type(frame.f_locals.get("self")) is target
    return frame.f_code is getattr(target, "__code__", None)


def _refusal(error: Exception, where: str, node: Mapping[str, Any], target: Any) -> UserError:
    said = first_line(error)
    plain = {key: value for key, value in node.items() if isinstance(value, SCALARS)}
    named = [key for key, value in plain.items() if key not in SPECIAL and str(value) in said]
    if len(named) == 1:
        return UserError(f"{where}.{named[0]}={plain[named[0]]}: {target.__name__} says: {said}")
    last = traceback.extract_tb(error.__traceback__)[-1]
    return UserError(
        f"{where}: {target.__name__} says: {said} ({last.filename}, line {last.lineno})"
    )
