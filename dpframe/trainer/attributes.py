"""Attributes of a task that its steps change: a hidden state, a running mean, a queue of rows.

Those that are plain are a part of checkpoints; others are named once.
"""

import logging
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpframe.checkpoint.plain import PLAIN
from dpframe.data.divided import LARGE_BYTES
from dpframe.parameters import version_of
from dpframe.task import Task
from dpframe.trainer.put_back import OF_MODULES

DEQUE, ON_DEVICE, ARRAY, GENERATOR = "deque", "on_device", "array", "generator"
log = logging.getLogger("dpframe")
WRAPPED = "dpframe.kept"  # the key of what is kept as something else
OF_TASKS = OF_MODULES | {*vars(Task()), *vars(Task)}
Path = tuple[str, str]  # a module's name, and its attribute's


class NotPlain(Exception):
    """Why a checkpoint can't hold a value."""


class OfAStep(Exception):
    """A value has a part of a step's graph, so that it can't outlive the step."""


class Attributes:
    """What has changed since this was made."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._held: list[Any] = []  # what is known by its identity has to stay alive
        self._before = {path: _mark(value, self._held) for path, value in _attributes(task)}
        self.unkept: dict[str, str] = {}  # what else has changed, and what it is
        self._has_warned = False

    def state_dict(self) -> dict[str, Any]:
        """By module and attribute. Fills `unkept`."""
        kept: dict[str, dict[str, Any]] = {}
        for (module, name), value in _attributes(self._task):
            if self._before.get((module, name)) == _mark(value, []):
                continue
            try:
                content = packed(value)
            except NotPlain as what:
                self.unkept[f"{module}.{name}".lstrip(".")] = str(what)
            except OfAStep:
                continue
            else:
                kept.setdefault(module, {})[name] = content
        return kept

    def warn_once(self, is_main: bool) -> None:
        """Of what has changed and is not kept, unless the task keeps something itself."""
        unkept, self.unkept = self.unkept, {}
        keeps = self._task.keeps_state
        if keeps is None:
            keeps = hasattr(self._task, "on_save")
        if not unkept or self._has_warned or not is_main or keeps:
            return
        self._has_warned = True
        name = (self._task.own_class or type(self._task)).__name__
        what = ", ".join(f"{path} ({kind})" for path, kind in unkept.items())
        log.warning(
            f"{name} has attributes that change in training and are not in checkpoints: {what}; "
            "make them numbers, tensors, or lists, dicts and deques of these, or keep them by "
            "on_save and on_load"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        modules = dict(self._task.named_modules())
        for module, its in state.items():
            for name, content in its.items() if module in modules else ():
                own: Any = vars(modules[module])
                own[name] = self._loaded(own.get(name), content)
                self._before.pop((module, name), None)  # else a task that had it already saves none

    def _loaded(self, now: Any, content: Any) -> Any:
        value = unpacked(content, self._task.device)
        if isinstance(now, torch.Generator):
            now.set_state(value.get_state())
            return now
        if isinstance(now, Tensor) and isinstance(value, Tensor) and _fits(now, value):
            now.detach().copy_(value)  # others may have the same one, or a view of it
            return now
        is_alike = isinstance(value, type(now)) or (
            isinstance(now, dict) and isinstance(value, dict)  # whose kind the file does not know
        )
        return _refilled(now, value) if is_alike else value


def _refilled(value: Any, content: Any) -> Any:
    """With what it had before; somebody else may hold the same list, dict or deque."""
    if isinstance(value, dict | set):
        value.clear()
        value.update(content)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(content)
    else:
        return content
    return value


def _fits(now: Tensor, value: Tensor) -> bool:
    return now.is_leaf and (now.shape, now.dtype) == (value.shape, value.dtype)


def _attributes(task: Task) -> Iterator[tuple[Path, Any]]:
    """Of the user's own modules: torch's, Lightning's and metrics keep theirs by themselves."""
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    for name, module in task.named_modules():
        is_wrapper = module is task and task.own_class is not None
        package = type(module).__module__.partition(".")[0]
        if is_wrapper or package == "torch" or isinstance(module, metric):
            continue
        for key, value in vars(module).items():
            if key not in OF_TASKS:
                yield (name, key), value


def _mark(value: Any, held: list[Any], depth: int = 0) -> Any:
    """Equal to the mark of another moment if nothing has changed, as far as that can be told."""
    kind = type(value)
    if kind in PLAIN or _is_scalar(value):
        return kind, value if kind is int else repr(value)
    if kind in (list, tuple, deque, set):
        return kind, [_mark(each, held, depth) for each in value]
    if isinstance(value, dict):
        held += value  # its keys
        return kind, [(id(key), _mark(each, held, depth)) for key, each in value.items()]
    held.append(value)
    if isinstance(value, nn.Parameter):
        return id(value)
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return id(value), hash(value.getstate())
    if hasattr(value, "bit_generator"):  # NumPy's
        return id(value), repr(value.bit_generator.state)
    if _is_array(value):
        return id(value), hash(value.tobytes()) if value.nbytes <= LARGE_BYTES else None
    is_theirs = kind.__module__.partition(".")[0] in ("torch", "dpframe")
    if depth or is_theirs or callable(value) or not hasattr(value, "__dict__"):
        return id(value)
    return id(value), [(key, _mark(each, held, 1)) for key, each in vars(value).items()]


def packed(value: Any) -> Any:
    """As a checkpoint can hold it."""
    kind = type(value)
    if kind in PLAIN and value != b"":
        return value
    if kind in (list, tuple, set):
        return kind(packed(each) for each in value)
    if kind is deque:
        return {WRAPPED: DEQUE, "of": [packed(each) for each in value], "length": value.maxlen}
    if isinstance(value, dict):
        return {_plain_key(key): packed(each) for key, each in value.items()}
    if kind is Tensor:
        if value.requires_grad and not value.is_leaf:
            raise OfAStep
        own = value.detach()
        return own.clone() if own.device.type == "cpu" else {WRAPPED: ON_DEVICE, "of": own.cpu()}
    if kind is torch.Generator:
        return {WRAPPED: GENERATOR, "of": value.get_state()}
    if _is_array(value) or _is_scalar(value):
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
    if kind == ON_DEVICE:
        return inner.to(device)
    if kind == GENERATOR:
        drawer = torch.Generator()
        drawer.set_state(inner)
        return drawer
    return inner.numpy()[()] if kind == ARRAY else inner


def _plain_key(key: Any) -> Any:
    if type(key) not in (str, int, float, bool):
        raise NotPlain(f"a dict with a {type(key).__name__} as a key")
    return key


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _is_scalar(value: Any) -> bool:
    """One of NumPy's numbers."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


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
