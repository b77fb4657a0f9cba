"""Builds what `_target_` names, after checking that it is there and takes its arguments."""

import functools
import inspect
import traceback
import types
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler

from dpframe.cli.compose import Composed
from dpframe.cli.locate import locate
from dpframe.cli.refusal import first_line
from dpframe.cli.settings import kind_of, shown, spoken
from dpframe.cli.trust import NOBODY, Trust, slots, trust_of
from dpframe.errors import UserError, suggestion
from dpframe.task import Task

SPECIAL = {"_target_": str, "_args_": list, "_partial_": bool, "_recursive_": bool}
TORCH = str(Path(torch.__file__).parent)
SCALARS = (bool, int, float, str)


def check_targets(job: Composed) -> Trust:
    """Checks every part of a config before anything is built."""
    trust = trust_of(job)
    for where, node, kind in slots(job.settings):
        check(node, where, kind, trust=trust)
    return trust


def build(
    node: Mapping[str, Any], where: str, kind: type | None = None, *, trust: Trust = NOBODY
) -> Any:
    """The object that the node describes; `where` is its key in the config, for the errors."""
    check(node, where, kind, trust=trust)
    if kind is None:
        return _made(node, where, trust)
    path = node["_target_"]
    made = _made(node, where, trust.within(locate(path, where)))
    if not isinstance(made, kind):
        raise UserError(
            f"{where}._target_={path} returned a {type(made).__name__}, "
            f"not a dpframe {kind.__name__}"
        )
    return made


def check(
    node: Any,
    where: str,
    kind: type | None = None,
    *,
    trust: Trust = NOBODY,
    wanted: type | None = None,
) -> None:
    """Refuses a target or an argument that can't be right, before anything is called.

    `kind` is a slot's, whose part vouches for its package; `wanted` is what a parameter takes.
    """
    if isinstance(node, Mapping) and "_target_" in node:
        _check_special(node, where)
        if kind is None:
            target = trust.nested(node["_target_"], where)
        else:
            target = trust.part(node["_target_"], where, kind)
            trust = trust.within(target)
        if wanted is not None:
            _check_wanted(target, node, where, wanted)
        _check_arguments(target, node, where, is_later=wanted in (optim.Optimizer, LRScheduler))
        parameters = _wanted(target)
        for name, value in node.items():
            check(value, f"{where}.{name}", trust=trust, wanted=parameters.get(name))
    elif kind is not None:
        given = where if isinstance(node, Mapping) else f"{where}={shown(node)}"
        raise UserError(f"{given} has no _target_; name its class")
    elif isinstance(node, Mapping):
        for name, value in node.items():
            check(value, f"{where}.{name}", trust=trust)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            check(value, f"{where}[{index}]", trust=trust)
    elif isinstance(node, SCALARS) and wanted is not None:
        example = _example(where, wanted, str(node))
        raise UserError(f"{where}={shown(node)} is {kind_of(node)}; name its class, e.g. {example}")


def _check_special(node: Mapping[str, Any], where: str) -> None:
    """The keys that are about the call itself."""
    for name, kind in SPECIAL.items():
        if name in node and type(node[name]) is not kind:
            given = f"{where}.{name}={shown(node[name])} is {kind_of(node[name])}"
            raise UserError(f"{given}; use {spoken(kind)}")
    if "_convert_" in node:
        raise UserError(f"{where}._convert_: every part gets plain dicts and lists; leave it out")


def _wanted(target: Any) -> dict[str, type]:
    """What is certain of the parameters: modules, and the optimizer and the scheduler of a Task."""
    hints = {name: hint for name, hint in _hints(target).items() if isinstance(hint, type)}
    wanted: dict[str, type] = {
        name: nn.Module for name, h in hints.items() if issubclass(h, nn.Module)
    }
    is_task = isinstance(target, type) and issubclass(target, Task)
    if is_task and target.configure_optimizer is Task.configure_optimizer:  # else it may take any
        wanted |= {"optimizer": optim.Optimizer, "scheduler": LRScheduler}
    return wanted


def _check_wanted(target: Any, node: Mapping[str, Any], where: str, wanted: type) -> None:
    """Only a class says what it makes. A Task makes its optimizer and its scheduler later."""
    if not isinstance(target, type):
        return
    is_later, is_partial = wanted is not nn.Module, node.get("_partial_")
    if issubclass(target, wanted):
        if is_later and not is_partial:
            raise UserError(
                f"{where}: the Task makes its {target.__name__} later; add ++{where}._partial_=true"
            )
        return
    is_layer = issubclass(target, nn.Module)
    is_factory = is_later and not is_partial and not is_layer and "__call__" in dir(target)
    if not is_factory and not (wanted is LRScheduler and hasattr(target, "step")):
        raise UserError(
            f"{where}._target_={node['_target_']} makes no {wanted.__name__}; "
            f"name one, e.g. {_example(where, wanted)}"
        )


def _example(where: str, wanted: type, given: str = "") -> str:
    if wanted is nn.Module:
        return f"{where}._target_=torch.nn.Linear"
    if wanted is LRScheduler:
        node = "{_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 9}"
        return f'"{where}={node}"'
    near = [name for name in optim.__all__ if name.lower() == given.lower()]
    return f"{where}._target_=torch.optim.{(near or ['Adam'])[0]}"


def _check_arguments(target: Any, node: Mapping[str, Any], where: str, *, is_later: bool) -> None:
    """`is_later`: the Task adds the first argument, and `total_steps`."""
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
    is_partial = node.get("_partial_")
    if node.get("_args_"):
        try:
            (signature.bind_partial if is_partial else signature.bind)(*node["_args_"], **given)
        except TypeError as error:
            raise UserError(f"{where}: {name}: {error}") from None
    elif is_later or not is_partial:
        for key, parameter in list(parameters.items())[is_later:]:
            is_plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            is_needed = is_plain and parameter.default is parameter.empty and key not in given
            if is_needed and not (is_later and key == "total_steps"):
                raise UserError(f"{where}.{key} is missing; {name} needs it, add +{where}.{key}=…")
    hints = _hints(target)
    for key, value in given.items():
        has_no_default = key not in parameters or parameters[key].default is not None
        is_auto = (where, key, value) == ("data", "workers", "auto")  # whatever a class's hint says
        if not is_auto and (value is not None or has_no_default):
            _check_type(value, hints.get(key), f"{where}.{key}")


def _check_type(value: Any, hint: Any, where: str) -> None:
    """Refuses only what is certain: a plain value where the annotation names other plain types."""
    if hint is None or not isinstance(value, (*SCALARS, type(None))):
        return
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    is_known = Any not in options and any(option in SCALARS for option in options)
    is_float = float in options and type(value) is int
    if is_known and type(value) not in options and not is_float:
        raise UserError(f"{where}={shown(value)} is {kind_of(value)}; use {spoken(hint)}")


def _hints(target: Any) -> dict[str, Any]:
    try:
        return get_type_hints(getattr(target, "__init__") if isinstance(target, type) else target)  # noqa: B009
    except Exception:
        return {}  # annotations that don't resolve are no reason to refuse a run


def _made(node: Any, where: str, trust: Trust, *, is_recursive: bool = True) -> Any:
    """Hydra's `instantiate` would resolve the text in a config again: what is text to `check` could
    become a node there."""
    if isinstance(node, list):
        return [
            _made(value, f"{where}[{index}]", trust, is_recursive=is_recursive)
            for index, value in enumerate(node)
        ]
    if not isinstance(node, Mapping):
        return node
    is_recursive = node.get("_recursive_", is_recursive)

    def make(value: Any, where: str) -> Any:
        return _made(value, where, trust) if is_recursive else deepcopy(value)

    given = {
        key: make(value, f"{where}.{key}") for key, value in node.items() if key not in SPECIAL
    }
    if "_target_" not in node:
        return given
    path = node["_target_"]
    target = locate(path, f"{where}._target_")
    arguments = make(node.get("_args_", []), f"{where}._args_")
    if node.get("_partial_"):
        made = Later(target, *arguments, **given)
        made.where, made.node = where, node
    else:
        made = _called(target, arguments, given, where, node)
    trust.refuse_returned(made, path, where)
    return made


class Later(functools.partial):
    """A node's partial, which names the node's key when its call fails."""

    where: str
    node: Mapping[str, Any]

    def __call__(self, /, *arguments: Any, **given: Any) -> Any:
        return _called(super().__call__, arguments, given, self.where, self.node)


def _called(
    call: Callable[..., Any], arguments: Any, given: Any, where: str, node: Mapping[str, Any]
) -> Any:
    try:
        return call(*arguments, **given)
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        below = traceback.extract_tb(error.__traceback__)[1:]
        if not _is_about_arguments(error, below):
            raise
        place = f" ({below[-1].filename}, line {below[-1].lineno})" if below else ""
        said = first_line(ValueError(*error.args))  # the text of a KeyError is quoted
    name = node["_target_"].rpartition(".")[2]
    plain = {k: v for k, v in node.items() if k not in SPECIAL and isinstance(v, SCALARS)}
    named = [f".{key}={value}" for key, value in plain.items() if str(value) in said]
    if len(named) == 1:
        raise UserError(f"{where}{named[0]}: {name} says: {said}")
    raise UserError(f"{where}: {name} says: {said}{place}")


def _is_about_arguments(error: Exception, below: list[traceback.FrameSummary]) -> bool:
    """Whether a constructor refuses its own arguments, as Adam does lr=-1.

    An error from deeper is a bug, which needs its traceback. So does a TypeError or a KeyError,
    except where all the code that ran is torch's.
    """
    is_its_own = all(frame.name in ("__init__", "__new__") for frame in below[1:])
    if isinstance(error, ValueError | RuntimeError) and is_its_own:
        return True
    return all(frame.filename.startswith(TORCH) for frame in below)
