"""Builds what `_target_` names, after checking that it is there and takes its arguments.

Hydra's `instantiate` would resolve the text in a config again: what is text to `check` could become
a node there.
"""

import functools
import inspect
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler

from dpframe.config.compose import Composed
from dpframe.config.locate import locate, parameters_of
from dpframe.config.schema import is_off, kind_of, shown, unfit
from dpframe.config.trust import NOBODY, THEIRS, Trust, slots, trust_of
from dpframe.data import DataModule
from dpframe.errors import UserError, first_line, suggestion

SPECIAL = {"_target_": str, "_args_": list, "_partial_": bool}
TORCH = str(Path(torch.__file__).parent)
SCALARS = (bool, int, float, str)
GROUPS = inspect.Parameter("groups", inspect.Parameter.KEYWORD_ONLY, default={})
"""An argument of every optimizer, which the Task takes out and makes parameter groups of."""
OF_DATA = {
    name: inspect.signature(DataModule).parameters[name]
    for name in ("drop_last", "eval_batch_size", "input")
}
"""Of every DataModule, whatever its constructor takes."""
OF_TASK = {"scale_lr": inspect.Parameter("scale_lr", inspect.Parameter.KEYWORD_ONLY, default=None)}
OF_ALL = {"data": OF_DATA, "task": OF_TASK}
MADE_LATER = {  # by the Task, and an example of each
    optim.Optimizer: "name one, e.g. torch.optim.Adam",
    LRScheduler: "name one, e.g. torch.optim.lr_scheduler.StepLR",
}


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
    node, options = _apart(node, where)
    part = _built(node, where, trust)
    for name, value in options.items():
        setattr(part, name, value)
    if kind is not None and not isinstance(part, kind):
        raise UserError(
            f"{where}._target_={node['_target_']} returned a {type(part).__name__}, "
            f"not a dpframe {kind.__name__}; name what makes one"
        )
    return part


def _apart(node: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a node into what its constructor takes and the keys of `OF_ALL`, set as attributes."""
    if not OF_ALL.get(where, {}).keys() & node.keys():
        return dict(node), {}
    taken = inspect.signature(locate(node["_target_"], f"{where}._target_")).parameters
    passes_on = where == "data" and any(p.kind is p.VAR_KEYWORD for p in taken.values())
    options = {
        k: v for k, v in node.items() if k in OF_ALL[where] and k not in taken and not passes_on
    }
    return {k: v for k, v in node.items() if k not in options}, options


def check(
    node: Any, where: str, kind: type | None = None, *, trust: Trust = NOBODY, hint: Any = None
) -> None:
    """Refuses a target or an argument that can't be right, before anything is called.

    `kind` is a slot's, `hint` the annotation of a constructor's argument.
    """
    hints: dict[str, Any] = {}
    if where in THEIRS and is_off(node):
        return
    if isinstance(node, Mapping) and "_target_" in node:
        _check_special(node, where)
        if kind is None:
            target = trust.nested(node["_target_"], where)
        else:
            target = trust.part(node["_target_"], where, kind)
        _check_made(target, node["_target_"], where, hint)
        hints = _hints(target)
        _check_arguments(target, node, where, hints)
    elif kind is not None:
        given = where if isinstance(node, Mapping) else f"{where}={shown(node)}"
        raise UserError(f"{given} has no _target_; name its class")
    for place, value in _values(node, where):
        check(value, place, trust=trust, hint=hints.get(place.rpartition(".")[2]))


def _values(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        yield from ((f"{where}.{name}", value) for name, value in node.items())
    elif isinstance(node, list):
        yield from ((f"{where}[{index}]", value) for index, value in enumerate(node))


def _check_special(node: Mapping[str, Any], where: str) -> None:
    """The keys that are about the call itself."""
    for name, kind in SPECIAL.items():
        if name in node and type(node[name]) is not kind:
            raise unfit(f"{where}.{name}", node[name], kind)
    for name in {"_convert_", "_recursive_"} & node.keys():
        raise UserError(f"{where}.{name}: every part gets its parts, dicts and lists; leave it out")


def _check_made(target: Any, path: str, where: str, hint: Any) -> None:
    """Where an optimizer or a scheduler is wanted, a network is none, and neither is the other."""
    if not isinstance(target, type) or not issubclass(target, (nn.Module, *MADE_LATER)):
        return
    for option in _options(hint):
        wanted = get_args(option)[-1] if get_origin(option) is Callable else None
        if wanted in MADE_LATER and not issubclass(target, wanted):
            name = wanted.__name__
            raise UserError(f"{where}._target_={path} makes no {name}; {MADE_LATER[wanted]}")


def _check_arguments(
    target: Any, node: Mapping[str, Any], where: str, hints: Mapping[str, Any]
) -> None:
    try:
        parameters = dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return  # a builtin without a signature
    parameters = {**OF_ALL.get(where, {}), **parameters}
    if isinstance(target, type) and issubclass(target, optim.Optimizer):
        parameters.setdefault("groups", GROUPS)
    given = {name: value for name, value in node.items() if name not in SPECIAL}
    name = getattr(target, "__name__", str(target))
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    inherited, is_all = parameters_of(node["_target_"]) if is_open else ([], True)
    known = {*inherited, *(key for key, p in parameters.items() if p.kind is not p.VAR_KEYWORD)}
    for key in given:
        if is_all and key not in known:
            raise UserError(
                f"{where}.{key}: {name} takes no such argument; {suggestion(key, known)}"
            )
    # The Task adds the first argument of these, and `total_steps`.
    is_later = isinstance(target, type) and issubclass(target, tuple(MADE_LATER))
    if is_later and not node.get("_partial_"):
        raise UserError(f"{where}: the Task makes its {name} later; add ++{where}._partial_=true")
    if is_later or not node.get("_partial_"):
        rest = list(parameters.items())[is_later + len(node.get("_args_", ())) :]
        for key, parameter in rest:
            is_plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            is_needed = is_plain and parameter.default is parameter.empty and key not in given
            if is_needed and not (is_later and key == "total_steps"):
                raise UserError(f"{where}.{key} is missing; {name} needs it, add +{where}.{key}=…")
    for key, value in given.items():
        has_no_default = key not in parameters or parameters[key].default is not None
        is_auto = (where, key, value) == ("data", "workers", "auto")  # whatever a class's hint says
        if not is_auto and (value is not None or has_no_default):
            _check_type(value, hints.get(key), f"{where}.{key}")


def _check_type(value: Any, hint: Any, where: str) -> None:
    """Refuses only what is certain: a plain value where the annotation names other plain types, or
    a part."""
    if hint is None or not isinstance(value, (*SCALARS, type(None))):
        return
    options = _options(hint)
    if Any in options or type(value) in options or (float in options and type(value) is int):
        return
    if any(option in SCALARS for option in options):
        raise unfit(where, value, hint)
    if all(map(_is_part, options)):
        given = f"{where}={shown(value)} is {kind_of(value)}"
        raise UserError(f"{given}; name its class: {where}={{_target_:…}}")


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_part(option: Any) -> bool:
    is_layer = isinstance(option, type) and issubclass(option, nn.Module | types.NoneType)
    return is_layer or get_origin(option) is Callable


def _hints(target: Any) -> dict[str, Any]:
    try:
        return get_type_hints(getattr(target, "__init__") if isinstance(target, type) else target)  # noqa: B009
    except Exception:
        return {}  # annotations that don't resolve are no reason to refuse a run


def _built(node: Any, where: str, trust: Trust) -> Any:
    if isinstance(node, list):
        return [_built(value, place, trust) for place, value in _values(node, where)]
    if is_off(node) or not isinstance(node, Mapping):
        return None if is_off(node) else node
    arguments = {
        name: _built(value, f"{where}.{name}", trust)
        for name, value in node.items()
        if name not in SPECIAL
    }
    if "_target_" not in node:
        return arguments
    path = node["_target_"]
    target = locate(path, f"{where}._target_")
    positional = _built(node.get("_args_", []), f"{where}._args_", trust)
    part = Later(target, *positional, **arguments)
    part.where = where
    if not node.get("_partial_"):
        part = part()
    trust.refuse_returned(part, path, where)
    return part


class Later(functools.partial):
    """A node's call, which names the node's key when it fails."""

    where: str

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().__call__(*arguments, **keywords)
        except (ValueError, RuntimeError, TypeError, KeyError) as error:
            below = traceback.extract_tb(error.__traceback__)[1:]
            if not _is_about_arguments(error, below):
                raise
            said = first_line(ValueError(*error.args))  # the text of a KeyError is quoted
        name = getattr(self.func, "__name__", str(self.func))
        plain = {key: value for key, value in self.keywords.items() if isinstance(value, SCALARS)}
        texts = [key for key, value in plain.items() if isinstance(value, str)]
        if said == "'str' object is not callable" and len(texts) == 1:
            key, value = texts[0], plain[texts[0]]
            raise UserError(
                f"{self.where}.{key}={value} is text, and {name} calls it; for a function write "
                f"{self.where}.{key}={{_target_:{value},_partial_:true}}"
            )
        meant = [key for key, value in plain.items() if str(value) in said]
        if len(meant) == 1:
            raise UserError(f"{self.where}.{meant[0]}={plain[meant[0]]}: {name} says: {said}")
        place = f" ({below[-1].filename}, line {below[-1].lineno})" if below else ""
        raise UserError(f"{self.where}: {name} says: {said}{place}")


def _is_about_arguments(error: Exception, below: list[traceback.FrameSummary]) -> bool:
    """Whether a constructor refuses its own arguments, as Adam does lr=-1.

    An error from deeper is a bug, which needs its traceback. So does a TypeError or a KeyError,
    except where all the code that ran is torch's.
    """
    is_its_own = all(frame.name in ("__init__", "__new__") for frame in below[1:])
    if isinstance(error, ValueError | RuntimeError) and is_its_own:
        return True
    return all(frame.filename.startswith(TORCH) for frame in below)
