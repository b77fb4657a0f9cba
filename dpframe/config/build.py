"""Builds what `_target_` names.

Hydra's `instantiate` makes each call, and our values are its arguments as they are. Given a whole
config, it would resolve text again, which could become a node there, and wrap each error.
"""

import functools
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import hydra
from hydra.errors import InstantiationException

from dpframe.callbacks import Callback
from dpframe.config.arguments import (
    OF_ALL,
    SPECIAL,
    check,
    explain_call,
    is_made_later,
    values_of,
)
from dpframe.config.compose import Composed
from dpframe.config.schema import RunSettings, is_off
from dpframe.config.target import find, see_own_folders
from dpframe.data import DataModule
from dpframe.errors import UserError, no_super
from dpframe.loggers import Logger
from dpframe.named_metrics import NamedMetrics
from dpframe.schedules import LRSchedule, is_ours
from dpframe.strategies import Strategy
from dpframe.task import Task
from dpframe.values import shown

ATTRIBUTES = {"schedule": "lr_schedule"}  # where a task has an option by another name


def check_targets(job: Composed) -> None:
    """Checks every part of a config before anything is built."""
    see_own_folders(job.config, job.config_dir, job.start)
    for where, node, kind in slots(job.settings):
        check(node, where, kind)


def slots(settings: RunSettings) -> Iterator[tuple[str, Any, type]]:
    """Each part's key, node and kind, but for callbacks and loggers that are switched off."""
    yield "strategy", settings.strategy, Strategy
    yield "task", settings.task, Task
    yield "data", settings.data, DataModule
    for group, kind in (("callbacks", Callback), ("logger", Logger)):
        for name, node in getattr(settings, group).items():
            if not is_off(node):
                yield f"{group}.{name}", node, kind


def build(node: Mapping[str, Any], where: str, kind: type | None = None) -> Any:
    """The object that the node describes; `where` is its key in the config, for the errors."""
    check(node, where, kind)
    node, options = _split_options(node, where)
    part = _build(node, where)
    for name, value in options.items():
        made = _build(value, f"{where}.{name}")
        if name == "metrics":
            made = NamedMetrics(made)
        setattr(part, ATTRIBUTES.get(name, name), made)
    if kind is not None and not isinstance(part, kind):
        raise UserError(
            f"{where}._target_={node['_target_']} returned a {type(part).__name__}, "
            f"not a dpframe {kind.__name__}; name what makes one"
        )
    return part


def _split_options(node: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a node into what its constructor takes and the keys of `OF_ALL`, set as attributes."""
    if not OF_ALL.get(where, {}).keys() & node.keys():
        return dict(node), {}
    taken = inspect.signature(find(node["_target_"], f"{where}._target_")).parameters
    own = taken.get("metrics")
    is_needed = own is not None and own.default is own.empty
    if where == "task" and node.get("metrics") is None and not is_needed:  # its own default counts
        node = {key: value for key, value in node.items() if key != "metrics"}
    passes_on = where == "data" and any(p.kind is p.VAR_KEYWORD for p in taken.values())
    options = {
        k: v for k, v in node.items() if k in OF_ALL[where] and k not in taken and not passes_on
    }
    if where == "task":
        options |= _schedule(node, taken)
    return {k: v for k, v in node.items() if k not in options}, options


def _schedule(node: Mapping[str, Any], taken: Collection[str]) -> dict[str, Any]:
    """Also of a task whose constructor takes another thing by this name, e.g. of a diffusion."""
    given = node.get("schedule")
    if isinstance(given, Mapping) and is_ours(given):
        return {"schedule": given}
    if "schedule" not in taken and given is not None:
        target = given.get("_target_") if isinstance(given, Mapping) else None
        if target is None or not _is_schedule(find(target, "task.schedule._target_")):
            raise UserError(
                f"task.schedule={shown(given)} is no schedule; choose one by its name, e.g. "
                "task/schedule=warmup_cosine, or name a class of dpframe.LRSchedule"
            )
    return {}


def _is_schedule(target: Any) -> bool:
    return not isinstance(target, type) or issubclass(target, LRSchedule)


def _build(node: Any, where: str) -> Any:
    if isinstance(node, list):
        return [_build(value, place) for place, value in values_of(node, where)]
    if not isinstance(node, Mapping) or is_off(node):
        return None if isinstance(node, Mapping) else node
    arguments = {name: value for name, value in node.items() if name not in SPECIAL}
    positional = node.get("_args_", [])
    if node.get("_recursive_", True):
        arguments = {name: _build(value, f"{where}.{name}") for name, value in arguments.items()}
        positional = _build(positional, f"{where}._args_")
    if "_target_" not in node:
        return arguments
    path, is_later = node["_target_"], is_made_later(node, where)
    target, call = find(path, f"{where}._target_"), _call_of(path, where)
    part = PartCall(target if is_later else call, *positional, **arguments)
    part.where = where
    return part if is_later else part()


def _call_of(path: str, where: str) -> Callable[..., Any]:
    """Hydra's call of a target: it refuses what its policy has, and what such a call returns."""
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            return hydra.utils.instantiate({"_target_": path, "_partial_": True}, **_allow(path))
    except InstantiationException as error:
        raise _policy(path, where, error) from None


def _allow(path: str) -> dict[str, Any]:
    """Hydra 1.4 asks what a config may call: it is its author's code, so what is installed."""
    if "_execution_whitelist_" not in inspect.signature(hydra.utils.instantiate).parameters:
        return {}
    tops = {name.split(".")[0] for name in sys.modules} - sys.stdlib_module_names
    return {"_execution_whitelist_": [path, "builtins.*", *(f"{top}.*" for top in sorted(tops))]}


def _policy(path: str, where: str, error: Exception) -> UserError:
    said = " ".join(str(error).split())
    return UserError(f"{where}._target_={path}: Hydra says: {said}")


class PartCall(functools.partial):
    """A part's call, which names its key when it fails."""

    where: str

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().__call__(*arguments, **keywords)
        except InstantiationException as error:
            target = self._target
            raise _policy(f"{target.__module__}.{target.__qualname__}", self.where, error) from None
        except AttributeError as error:
            if "before Module.__init__() call" not in str(error):
                raise
            *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
            raise no_super(type(frame.f_locals["self"])) from None  # of Module.__setattr__
        except (ValueError, RuntimeError, TypeError, KeyError) as error:
            if (line := explain_call(error, self.where, self._target, self.keywords)) is None:
                raise
        raise line

    @property
    def _target(self) -> Any:
        return getattr(self.func, "func", self.func)  # Hydra's call is a partial, too
