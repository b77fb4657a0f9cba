"""Attributes of a task that its steps change: a hidden state, a running mean, a queue of rows.

Those that are plain are a part of checkpoints; others are named once.
"""

import logging
import marshal
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpframe.checkpoint.plain import PLAIN
from dpframe.data import generators
from dpframe.data.copies import LARGE_BYTES, OF_MODULES
from dpframe.parameters import version_of
from dpframe.task import Task

MANY = 100  # entries, of which one number is made at once, e.g. of a vocabulary
NO_REFERENCES = 2  # a version of marshal: later ones depend on who else has an object
WRAPPED = "dpframe.kept"  # the key of what is kept as something else
DEQUE, SET, ON_DEVICE, ARRAY = "deque", "set", "on_device", "array"
OF_TASKS = OF_MODULES | ({*vars(Task()), *vars(Task)} - {"metrics"})  # a task may have its own
OF_LIBRARIES = ("torch", "torchmetrics", "builtins", "typing")
log = logging.getLogger("dpframe")


class NotPlain(Exception):
    """Why a checkpoint can't hold a value."""


class OfAStep(Exception):
    """A value has a part of a step's graph, so that it can't outlive the step."""


class Attributes:
    """What has changed since this was made."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._package = _package(task.own_class)
        self._held: list[Any] = []  # what is known by its identity has to stay alive
        self._before = {
            (name, key): self._mark(value)
            for name, module in _own_modules(task)
            for key, value in _attributes(module)
        }
        self.unkept: dict[str, str] = {}  # what else has changed, and what it is
        self._has_warned = False

    def state_dict(self) -> dict[str, Any]:
        """By module and attribute. Fills `unkept`."""
        kept: dict[str, dict[str, Any]] = {}
        count = len(self._held)
        for name, module in _own_modules(self._task):
            for key, value in _attributes(module):
                if self._before.get((name, key)) == self._mark(value):
                    continue
                try:
                    kept.setdefault(name, {})[key] = packed(value)
                except NotPlain as what:
                    kind = _own_kind(module)
                    if kind and _package(kind) == self._package:  # others keep theirs on purpose
                        self.unkept[f"{name}.{key}".lstrip(".")] = str(what)
                except OfAStep:
                    continue
        del self._held[count:]
        return kept

    def warn_once(self, is_main: bool) -> None:
        """Of what has changed and is not kept, unless the task keeps something itself."""
        unkept, self.unkept = self.unkept, {}
        keeps = self._task.adapter.keeps_state
        if keeps is None:
            keeps = hasattr(self._task, "on_save")
        if not unkept or self._has_warned or not is_main or keeps:
            return
        self._has_warned = True
        name = self._task.own_class.__name__
        what = ", ".join(f"{path} ({kind})" for path, kind in unkept.items())
        log.warning(
            f"{name} has attributes that change in training and are not in checkpoints: {what}; "
            "make them numbers, tensors, or lists, dicts and deques of these, or keep them by "
            "on_save and on_load"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load(self._task, state)
        for name, own in state.items():
            for key in own:  # else a task that had it already saves none
                self._before.pop((name, key), None)

    def _mark(self, value: Any, depth: int = 0) -> Any:
        """Equal to the mark of another moment if nothing has changed, as far as that can be told:
        within an object of the user's own package it is looked for one level deep."""
        kind = type(value)
        if kind in PLAIN or isinstance(value, np.generic):
            return kind, value if kind is int else repr(value)  # a NaN equals no other
        if isinstance(value, list | tuple | deque | set | dict):
            entries = value.items() if isinstance(value, dict) else value
            if len(value) > MANY:
                plain = dict if isinstance(value, dict) else list
                with suppress(ValueError):  # what is in it is not plain
                    return kind, hash(marshal.dumps(plain(value), NO_REFERENCES))
            return kind, [self._mark(each, depth) for each in entries]
        self._held.append(value)
        if isinstance(value, Tensor):
            return id(value), None if isinstance(value, nn.Parameter) else version_of(value)
        if type(value) is np.ndarray:
            return id(value), hash(value.tobytes()) if value.nbytes <= LARGE_BYTES else None
        if isinstance(value, generators.KINDS):
            state = generators.state_of(value)
            return id(value), state.tolist() if isinstance(state, Tensor) else repr(state)
        is_own = _package(kind) in (self._package, "types") and hasattr(value, "__dict__")
        if depth or not is_own or callable(value):
            return id(value)
        return id(value), [(key, self._mark(each, 1)) for key, each in vars(value).items()]


def load(task: Task, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets the attributes as `Attributes.state_dict` has them. A file may be a stranger's: what
    torch, dpframe or a method of the task has as its own is refused."""
    modules = dict(_own_modules(task))
    for name in state.keys() & modules.keys():
        module: Any = modules[name]
        for key, content in state[name].items():
            now, of_class = getattr(module, key, None), getattr(type(module), key, None)
            is_computed = hasattr(type(of_class), "__set__")  # e.g. a property
            if key in OF_TASKS or not key.isidentifier() or callable(now) or is_computed:
                raise ValueError(f"{name}.{key}".lstrip(".") + " is no attribute that changes")
            vars(module)[key] = _loaded(now, unpacked(content, task.device))


def _loaded(now: Any, value: Any) -> Any:
    """What another has too, e.g. the same list or a view of the tensor, stays the same object."""
    tensors = isinstance(now, Tensor) and isinstance(value, Tensor) and now.is_leaf
    if tensors and (now.shape, now.dtype) == (value.shape, value.dtype):
        now.detach().copy_(value)
        return now
    for kind, add in ((list, "extend"), (deque, "extend"), (set, "update"), (dict, "update")):
        if isinstance(now, kind) and isinstance(value, kind):
            now.clear()
            getattr(now, add)(value)
            return now
    return value


def _own_modules(task: Task) -> Iterator[tuple[str, nn.Module]]:
    """The user's: torch's, Lightning's and metrics keep theirs by themselves."""
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    for name, module in task.named_modules():
        is_wrapper = module is task and task.own_class is not type(task)
        if _own_kind(module) and not (is_wrapper or isinstance(module, metric)):
            yield name, module


def _own_kind(module: nn.Module) -> type | None:
    """Its class, if that is not a library's; FSDP's are built on it."""
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] not in OF_LIBRARIES:
            return kind
    return None


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in vars(module).items() if key not in OF_TASKS)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def packed(value: Any) -> Any:
    """As a checkpoint can hold it."""
    kind = type(value)
    if kind in PLAIN and value != b"":
        return value
    if kind in (list, tuple):
        return kind(packed(each) for each in value)
    if kind is set:  # in which a dict could not be
        return {WRAPPED: SET, "of": [packed(each) for each in value]}
    if kind is deque:
        return {WRAPPED: DEQUE, "of": [packed(each) for each in value], "length": value.maxlen}
    if isinstance(value, dict):
        return {_plain_key(key): packed(each) for key, each in value.items()}
    if kind is Tensor:
        if value.requires_grad and not value.is_leaf:
            raise OfAStep
        own = value.detach()
        return own.clone() if own.device.type == "cpu" else {WRAPPED: ON_DEVICE, "of": own.cpu()}
    if kind is np.ndarray or isinstance(value, np.generic):
        try:
            return {WRAPPED: ARRAY, "of": torch.tensor(value.copy())}
        except TypeError:
            raise NotPlain(f"an array of {value.dtype}") from None
    raise NotPlain(f"a {kind.__name__}")


def unpacked(content: Any, device: torch.device) -> Any:
    if isinstance(content, list | tuple | set):
        return type(content)(unpacked(each, device) for each in content)
    if not isinstance(content, dict):
        return content
    if (kind := content.get(WRAPPED)) is None:
        return {key: unpacked(each, device) for key, each in content.items()}
    inner = content["of"]
    if kind == DEQUE:
        return deque((unpacked(each, device) for each in inner), content["length"])
    if kind == SET:
        return {unpacked(each, device) for each in inner}
    if kind == ON_DEVICE:
        return inner.to(device)
    return inner.numpy()[()] if kind == ARRAY else inner


def _plain_key(key: Any) -> Any:
    if type(key) not in (str, int, float, bool):
        raise NotPlain(f"a dict with a {type(key).__name__} as a key")
    return key


def of_process(
    states: Sequence[dict[str, Any]], rank: int, world_size: int
) -> tuple[dict[str, Any], list[str]]:
    """A process's part of what all of them had, and what is not as it was: of another number of
    processes, all get that of the first."""
    if len(states) == world_size or not states:
        return (states[rank] if states else {}), []
    paths = {f"{module}.{name}" for each in states for module, its in each.items() for name in its}
    names = ", ".join(sorted(path.lstrip(".") for path in paths))
    here = f"{names} of {len(states)} processes there, of the first of them on {world_size} here"
    return states[0], [here] if names else []
