"""Builds what `_target_` names, after checking that it is there and takes what it is given."""

import inspect
import traceback
import types
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from dpframe.cli.locate import locate
from dpframe.cli.refusal import first_line
from dpframe.cli.settings import kind_of, shown
from dpframe.cli.trust import NOBODY, Trust
from dpframe.errors import UserError, suggestion

SPECIAL = {"_target_", "_args_", "_partial_", "_recursive_", "_convert_"}
EXAMPLES = {
    "Module": "torch.nn.Linear",
    "Optimizer": "torch.optim.Adam",
    "LRScheduler": "torch.optim.lr_scheduler.StepLR",
}
CONVERSIONS = ("all", "partial", "object")
SCALARS = (bool, int, float, str)


def build(
    node: Mapping[str, Any], where: str, kind: type | None = None, *, trust: Trust = NOBODY
) -> Any:
    """The object that the node describes; `where` is its key in the config, for the errors."""
    check(node, where, kind, trust=trust)
    if kind is not None:
        path = node["_target_"]
        trust = trust.within(path, trust.part(path, f"{where}._target_", kind))
    try:
        made = _made(node, where, trust)
    except Exception as error:
        said = refused(error, {where: node})
        if said is None:
            raise
        raise said from None
    if kind is not None and not isinstance(made, kind):
        raise UserError(
            f"{where}._target_={node['_target_']} gives a {type(made).__name__}, "
            f"not a dpframe {kind.__name__}"
        )
    return made


def _made(node: Any, where: str, trust: Trust, *, is_recursive: bool = True) -> Any:
    """Our own, as Hydra's `instantiate` would read the text in a config a second time: what looks
    like text to `check` could become a node there."""
    if isinstance(node, list):
        return [
            _made(value, f"{where}[{index}]", trust, is_recursive=is_recursive)
            for index, value in enumerate(node)
        ]
    if not isinstance(node, Mapping):
        return node
    is_recursive = node.get("_recursive_", is_recursive)

    def make(value: Any, where: str) -> Any:
        return _made(value, where, trust, is_recursive=True) if is_recursive else deepcopy(value)

    given = {
        key: make(value, f"{where}.{key}") for key, value in node.items() if key not in SPECIAL
    }
    if "_target_" not in node:
        return given
    path = node["_target_"]
    target = trust.target(path, f"{where}._target_")
    call: Any = partial(partial, target) if node.get("_partial_") else target
    made = call(*make(node.get("_args_", []), f"{where}._args_"), **given)
    trust.refuse_returned(made, path, f"{where}._target_")
    return made


def refused(error: Exception, nodes: Mapping[str, Any]) -> UserError | None:
    """The line for what a constructor says about its own arguments, as Adam does about lr=-1.

    None for an error from anywhere deeper: that is a bug, which wants its traceback. So is a
    TypeError or a KeyError, except where torch's own code raises it for what the node gives.
    """
    is_about_values = isinstance(error, ValueError | RuntimeError)
    if not is_about_values and not isinstance(error, TypeError | KeyError):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    described = [found for where, node in nodes.items() for found in _described(node, where)]
    for index, frame in enumerate(frames):
        below = frames[index + 1 :]
        is_its_own = all(deeper.f_code.co_name in ("__init__", "__new__") for deeper in below)
        if (is_about_values and is_its_own) or _is_torchs(frames, index):
            for where, node, target in described:
                if _runs(frame, target):
                    return _refusal(error, where, node, target)
    return None


def check(
    node: Any,
    where: str,
    kind: type | None = None,
    *,
    trust: Trust = NOBODY,
    wanted: "Wanted | None" = None,
) -> None:
    """Refuses, before anything is called, a target or an argument that can't be right.

    `kind` is a slot's, which vouches for its package; `wanted` is what a parameter is to be.
    """
    if kind is not None and not (isinstance(node, Mapping) and node.get("_target_")):
        given = where if isinstance(node, Mapping) else f"{where}={shown(node)}"
        raise UserError(f"{given} has no _target_; name its class")
    hints: dict[str, Wanted] = {}
    if isinstance(node, SCALARS) and wanted is not None and wanted.is_called_by_us:
        raise UserError(f"{where}={shown(node)} is {kind_of(node)}; {_named(node, where, wanted)}")
    if isinstance(node, Mapping):
        if "_target_" in node:
            _check_special(node, where)
            key, path = f"{where}._target_", node["_target_"]
            target = trust.nested(path, key) if kind is None else trust.part(path, key, kind)
            trust = trust if kind is None else trust.within(path, target)
            if wanted is not None:
                _check_wanted(target, node, where, wanted.kind)
                _check_partial(target, node, where, wanted)
            _check_arguments(target, node, where)
            hints = _wanted(target)
        for name, value in node.items():
            check(value, f"{where}.{name}", trust=trust, wanted=hints.get(name))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            check(value, f"{where}[{index}]", trust=trust)


def _check_special(node: Mapping[str, Any], where: str) -> None:
    """The keys that are about the call itself."""
    kinds = {"_target_": str, "_args_": list, "_partial_": bool, "_recursive_": bool}
    for name, kind in kinds.items():
        if name in node and type(node[name]) is not kind:
            wanted = "a list" if kind is list else _spoken(kind)
            value = f"{where}.{name}={shown(node[name])}"
            raise UserError(f"{value} is {kind_of(node[name])}; give {wanted}")
    if node.get("_convert_", "all") not in CONVERSIONS:
        raise UserError(
            f"{where}._convert_={shown(node['_convert_'])}: what is built gets plain dicts and "
            "lists; leave it out"
        )


class Wanted(NamedTuple):
    """What a parameter is to be."""

    kind: type
    is_called_by_us: bool = True  # a Task may make its optimiser of anything


def _wanted(target: Any) -> dict[str, Wanted]:
    """What is certain of a constructor's parameters: a Task's optimizer and scheduler, modules."""
    from torch import nn, optim

    from dpframe.task import Task

    hints = {name: hint for name, hint in _hints(target).items() if isinstance(hint, type)}
    modules = [name for name, hint in hints.items() if issubclass(hint, nn.Module)]
    wanted = dict.fromkeys(modules, Wanted(nn.Module))
    if isinstance(target, type) and issubclass(target, Task):
        is_ours = target.configure_optimizer is Task.configure_optimizer
        wanted["optimizer"] = Wanted(optim.Optimizer, is_ours)
        wanted["scheduler"] = Wanted(optim.lr_scheduler.LRScheduler, is_ours)
    return wanted


def _named(value: Any, where: str, wanted: Wanted) -> str:
    """What to type instead."""
    from torch import optim

    if issubclass(wanted.kind, optim.Optimizer):
        near = [name for name in optim.__all__ if name.lower() == str(value).lower()]
        return f"name its class, as {where}._target_=torch.optim.{(near or ['Adam'])[0]}"
    example = EXAMPLES[wanted.kind.__name__]
    if issubclass(wanted.kind, optim.lr_scheduler.LRScheduler):
        return (
            f'name its class, as "{where}={{_target_: {example}, _partial_: true, step_size: 9}}"'
        )
    return f"name its class by a _target_, as {example}"


def _check_partial(target: Any, node: Mapping[str, Any], where: str, wanted: Wanted) -> None:
    """An optimiser and a scheduler are called later, with the parameters or the optimiser."""
    from torch import nn

    if not wanted.is_called_by_us or not isinstance(target, type) or wanted.kind is nn.Module:
        return
    if not issubclass(target, wanted.kind) and not node.get("_partial_"):
        return  # an object with a __call__ of its own
    if not node.get("_partial_"):
        raise UserError(
            f"{where}: {target.__name__} is made later, by the Task; add ++{where}._partial_=true"
        )
    parameters = list(inspect.signature(target).parameters.values())[1:]
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for one in parameters if not node.get("_args_") else ():
        is_needed = one.kind in plain and one.default is one.empty and one.name != "total_steps"
        key = f"{where}.{one.name}"
        if is_needed and one.name not in node:
            raise UserError(f"{key} is missing; {target.__name__} needs it, as +{key}=…")


def _check_wanted(target: Any, node: Mapping[str, Any], where: str, wanted: type) -> None:
    """A class alone says what it makes; one with __call__, not a partial, may be what makes it."""
    if not isinstance(target, type) or issubclass(target, wanted):
        return
    from torch import nn

    is_maker = "__call__" in dir(target) and not node.get("_partial_")
    is_scheduler = hasattr(target, "step") and "LRScheduler" in wanted.__name__
    if is_scheduler or (is_maker and not issubclass(target, nn.Module) and wanted is not nn.Module):
        return
    raise UserError(
        f"{where}._target_={node['_target_']} makes no {wanted.__name__}; name one, as "
        f"{EXAMPLES[wanted.__name__]}"
    )


def _check_arguments(target: Any, node: Mapping[str, Any], where: str) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # a builtin without a signature
    parameters = signature.parameters
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
    if node.get("_args_"):
        bind = signature.bind_partial if node.get("_partial_") else signature.bind
        try:
            bind(*node["_args_"], **given)
        except TypeError as error:
            raise UserError(f"{where}: {name}: {error}") from None
    hints = _hints(target)
    for key, value in given.items():
        has_no_default = key not in parameters or parameters[key].default is not None
        is_auto = (where, key, value) == ("data", "workers", "auto")  # whatever a class's hint says
        if not is_auto and (value is not None or has_no_default):
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


def _is_torchs(frames: list[types.FrameType], index: int) -> bool:
    """Whether dpframe made this call, and all that ran from there on is torch's."""
    packages = [str(frame.f_globals.get("__name__")).split(".")[0] for frame in frames]
    return packages[max(0, index - 1)] == "dpframe" and set(packages[index:]) == {"torch"}


def _refusal(error: Exception, where: str, node: Mapping[str, Any], target: Any) -> UserError:
    is_quoted = isinstance(error, KeyError)  # its text is a repr
    said = first_line(ValueError(*error.args) if is_quoted else error)
    plain = {key: value for key, value in node.items() if isinstance(value, SCALARS)}
    named = [key for key, value in plain.items() if key not in SPECIAL and str(value) in said]
    if len(named) == 1:
        return UserError(f"{where}.{named[0]}={plain[named[0]]}: {target.__name__} says: {said}")
    last = traceback.extract_tb(error.__traceback__)[-1]
    return UserError(
        f"{where}: {target.__name__} says: {said} ({last.filename}, line {last.lineno})"
    )
