"""What a `_target_` is given, against what it takes: checked before, and explained after a call."""

import inspect
import re
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import hydra
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler

from dpframe.callbacks import Callback
from dpframe.config.hints import LATER
from dpframe.config.schema import OF_EVERY_DATA, is_off
from dpframe.config.target import find, in_full, taken_by
from dpframe.data import DataModule
from dpframe.errors import UserError, first_line, not_one_of, suggestion
from dpframe.loggers import Logger
from dpframe.scheduler_lengths import is_filled_in
from dpframe.task import Task
from dpframe.values import fits, kind_of, options_of, parameters_of, shown, unfit

SPECIAL: dict[str, Any] = {  # the keys that are about the call itself
    "_target_": str,
    "_args_": list,
    "_partial_": bool,
    "_recursive_": bool,
    "_convert_": str,
}
CONVERSIONS = ("partial", "object", "all")  # alike: a class gets plain lists and dicts
TORCH, HYDRA = (str(Path(inspect.getfile(each)).parent) for each in (torch, hydra))
SCALARS = (bool, int, float, str)
GROUPS = inspect.Parameter("groups", inspect.Parameter.KEYWORD_ONLY, default={})
"""An argument of every optimizer, which the Task takes out and makes parameter groups of."""
MATCH = inspect.Parameter("match", inspect.Parameter.KEYWORD_ONLY, default="")
OF_OPTIMIZER = re.compile(r"task\.optimizer(s\.\w+)?\.groups\.\w+")
"""A group that names an optimizer of its own, which the Task makes of what it matches."""
OF_DATA = {name: inspect.signature(DataModule).parameters[name] for name in OF_EVERY_DATA}
"""Of every DataModule, whatever its constructor takes."""
OF_TASK = {
    name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    for name in ("metrics", "scale_lr", "schedule")
}
MODULES = ("task.module", "data.module")  # of dpframe.lightning
OF_ALL = {"data": OF_DATA, "task": OF_TASK}
OF_LIGHTNING: dict[type, tuple[str, str]] = {  # its class for a part, and what to do with it
    Callback: ("Callback", "docs/from-lightning.md lists dpframe's, e.g. callbacks=ema"),
    Task: ("LightningModule", "use recipe=lightning task.module._target_={}"),
    DataModule: ("LightningDataModule", "use recipe=lightning data.module._target_={}"),
}
MADE_LATER = (optim.Optimizer, LRScheduler)  # by the Task


def check(node: Any, where: str, kind: type | None = None) -> None:
    """Refuses a target or an argument that can't be right, before anything is called. `kind` is
    what is wanted there."""
    if where in MODULES and is_off(node):
        return
    if isinstance(node, Mapping) and "_target_" in node:
        _check_special(node, where)
        target = find(node["_target_"], f"{where}._target_")
        if kind is not None:
            _check_kind(target, f"{where}._target_={node['_target_']}", kind)
        _check_arguments(target, node, where)
        if not node.get("_recursive_", True):
            return
    elif kind is not None:
        given = where if isinstance(node, Mapping) else f"{where}={shown(node)}"
        off = "" if kind not in (Callback, Logger) else f", or leave it out by {where}=null"
        raise UserError(f"{given} has no _target_; name its class{off}")
    for place, value in values_of(node, where):
        check(value, place)


def values_of(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        yield from ((f"{where}.{name}", value) for name, value in node.items())
    elif isinstance(node, list):
        yield from ((f"{where}[{index}]", value) for index, value in enumerate(node))


def is_made_later(node: Mapping[str, Any], where: str) -> bool:
    return bool(node.get("_partial_")) or OF_OPTIMIZER.fullmatch(where) is not None


def _check_special(node: Mapping[str, Any], where: str) -> None:
    for name, kind in SPECIAL.items():
        if name in node and type(node[name]) is not kind:
            raise unfit(f"{where}.{name}", node[name], kind)
    if (how := node.get("_convert_", "all")) not in CONVERSIONS:
        raise not_one_of(f"{where}._convert_", how, CONVERSIONS)


def _check_kind(target: Any, given: str, kind: type) -> None:
    """A class is below `kind`; a function may say what it returns, and is asked when it has."""
    made = target if isinstance(target, type) else _hints(target).get("return")
    if not isinstance(made, type) or issubclass(made, kind):
        return
    name = kind.__name__
    theirs, instead = OF_LIGHTNING.get(kind, ("", ""))
    if any(base.__name__ == theirs for base in made.__mro__):
        use = instead.format(given.partition("=")[2])
        raise UserError(f"{given} is a {theirs} of Lightning's; {use}")
    raise UserError(f"{given} is not a dpframe {name}; name a class or a function that makes one")


def _check_arguments(target: Any, node: Mapping[str, Any], where: str) -> None:
    if not (parameters := parameters_of(target)):
        return
    parameters = {**OF_ALL.get(where, {}), **parameters}
    if isinstance(target, type) and issubclass(target, optim.Optimizer):
        extra = MATCH if OF_OPTIMIZER.fullmatch(where) else GROUPS
        parameters.setdefault(extra.name, extra)
    given = {name: value for name, value in node.items() if name not in SPECIAL}
    name = getattr(target, "__name__", str(target))
    for key in given:
        if key not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            raise _not_taken(f"{where}.{key}", target, parameters)
    # The Task adds the first argument of these, and lengths.
    is_later = isinstance(target, type) and issubclass(target, MADE_LATER)
    if is_later and not is_made_later(node, where):
        raise UserError(f"{where}: the Task makes its {name} later; add ++{where}._partial_=true")
    if is_later or not is_made_later(node, where):
        rest = list(parameters.items())[is_later + len(node.get("_args_", ())) :]
        for key, parameter in rest:
            is_plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            is_needed = is_plain and parameter.default is parameter.empty and key not in given
            if is_needed and not (is_later and is_filled_in(target, key)):
                raise UserError(f"{where}.{key} is missing; {name} needs it, add +{where}.{key}=…")
    hints = _hints(target)
    for key, value in given.items():
        has_no_default = key not in parameters or parameters[key].default is not None
        is_auto = (where, key, value) == ("data", "workers", "auto")  # whatever a class's hint says
        if not is_auto and (value is not None or has_no_default):
            _check_type(value, hints.get(key), f"{where}.{key}")


def _check_type(value: Any, hint: Any, where: str) -> None:
    """Refuses only what is certain: a plain value where the annotation names other plain types, or
    a part."""
    if hint is None or not isinstance(value, (*SCALARS, type(None))) or fits(value, hint):
        return
    options = options_of(hint)
    if any(option in SCALARS for option in options):
        raise unfit(where, value, hint)
    if all(map(_is_part, options)):
        raise _no_part(where, value)


def _no_part(where: str, value: Any) -> UserError:
    """The line for a plain value where a part is wanted, e.g. task.optimizer=sgd."""
    path = in_full(value) if isinstance(value, str) else ""
    use = f"{where}._target_={path}" if path else f"{where}={{_target_:…}}"
    return UserError(f"{where}={shown(value)} is {kind_of(value)}; name its class: {use}")


def _is_part(option: Any) -> bool:
    is_layer = isinstance(option, type) and issubclass(option, nn.Module | types.NoneType)
    return is_layer or get_origin(option) is Callable


def _hints(target: Any) -> dict[str, Any]:
    try:
        return get_type_hints(getattr(target, "__init__") if isinstance(target, type) else target)  # noqa: B009
    except Exception:
        return {}  # annotations that don't resolve are no reason to refuse a run


def _not_taken(where: str, target: Any, taken: Iterable[str]) -> UserError:
    name, key = getattr(target, "__name__", str(target)), where.rpartition(".")[2]
    bases = target.__mro__[1:] if isinstance(target, type) else ()
    if any(key in parameters_of(base) for base in bases if "__init__" in vars(base)):
        use = "let its __init__ take **options, and call super().__init__(**options)"
    else:
        use = suggestion(key, taken)
    return UserError(f"{where}: {name} takes no such argument; {use}")


def explain_call(
    error: Exception, where: str, target: Any, keywords: Mapping[str, Any]
) -> UserError | None:
    """The line for what a target says of its arguments; None: it is a bug, with a traceback."""
    said = first_line(ValueError(*error.args))  # the text of a KeyError is quoted
    name = getattr(target, "__name__", str(target))
    unknown = re.search(r"\) got an unexpected keyword argument '(\w+)'", said)
    if unknown and (key := unknown[1]) in keywords and key not in parameters_of(target):
        taken = taken_by(target)[0]  # it went through a `**more`
        return _not_taken(f"{where}.{key}", target, taken)
    frames = traceback.extract_tb(error.__traceback__)[1:]
    below = [frame for frame in frames if not frame.filename.startswith(HYDRA)]
    if not _is_about_arguments(error, below):
        return None
    plain = {key: value for key, value in keywords.items() if isinstance(value, SCALARS)}
    texts = [key for key, value in plain.items() if isinstance(value, str)]
    if said == "'str' object is not callable" and len(texts) == 1:
        key, value = texts[0], plain[texts[0]]
        return UserError(
            f"{where}.{key}={value} is text, and {name} calls it; for a function write "
            f"{where}.{key}={{_target_:{value},_partial_:true}}"
        )
    meant = [key for key, value in plain.items() if str(value) in said]
    if len(meant) == 1:
        return UserError(f"{where}.{meant[0]}={plain[meant[0]]}: {name} says: {said}")
    place = f" ({below[-1].filename}, line {below[-1].lineno})" if below else ""
    return UserError(f"{where}: {name} says: {said}{place}")


def explain_text_called(error: Exception, task: Mapping[str, Any]) -> UserError | None:
    """The line for a part that is text, where `configure_optimizer` of a task without annotations
    calls it."""
    frames = traceback.extract_tb(error.__traceback__)
    texts = {key: task[key] for key in LATER if isinstance(task.get(key), str)}
    is_text = str(error) == "'str' object is not callable"
    if not is_text or frames[-1].name != "configure_optimizer" or len(texts) != 1:
        return None
    (key, value), *_ = texts.items()
    return _no_part(f"task.{key}", value)


def _is_about_arguments(error: Exception, below: list[traceback.FrameSummary]) -> bool:
    """Whether a constructor refuses its own arguments, as Adam does lr=-1.

    An error from deeper is a bug, which needs its traceback. So does a TypeError or a KeyError,
    except where all the code that ran is torch's.
    """
    is_its_own = all(frame.name in ("__init__", "__new__") for frame in below[1:])
    if isinstance(error, ValueError | RuntimeError) and is_its_own:
        return True
    return all(frame.filename.startswith(TORCH) for frame in below)
