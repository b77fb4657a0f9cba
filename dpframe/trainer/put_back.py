"""What a step may change is as before it: weights, buffers, attributes and generators."""

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dpframe.data.divided import LARGE_BYTES
from dpframe.parameters import version_of
from dpframe.task import Task

KEPT_BYTES = 1 << 30  # of trained weights; larger ones are not expected to be changed by a step
PLAIN = (bool, int, float, complex, str, bytes, type(None))
OF_MODULES = {*vars(nn.Module())}  # torch's own attributes
OF_OTHERS = ("dpframe", "lightning", "pytorch_lightning", "torch", "torchmetrics")
DEEPEST = 4  # of what is in attributes


@contextmanager
def put_back(task: Task) -> Iterator[None]:
    """Within, the task has copies of its buffers and attributes, of which those that are one object
    are one copy; afterwards it has the same objects again, as they were. Weights are put back."""
    modules = list(task.modules())
    memo: dict[int, Any] = {id(each): each for each in chain(modules, task.parameters())}
    held = [task.run_context]  # so that no id comes twice
    trained = sum(p.nbytes for p in task.parameters() if p.requires_grad)
    weights = [
        (weight, weight.detach().clone(), version_of(weight))
        for weight in task.parameters()
        if not weight.requires_grad or trained < KEPT_BYTES
    ]
    trains = [(weight, weight.requires_grad) for weight in task.parameters()]
    before = [_contents(vars(module)) for module in modules]
    buffers = [(m, *pair) for m in modules for pair in m.named_buffers(recurse=False)]
    for module, name, buffer in buffers:
        setattr(module, name, memo.setdefault(id(buffer), buffer.detach().clone()))
    for module, (own, _) in zip(modules, before, strict=True):
        for name, value in own.items():
            if name not in OF_MODULES and _is_copied(value):
                vars(module)[name] = _copy(value, memo, held)
    try:
        yield
    finally:
        for module, (own, inner) in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(own)
            for container, content in inner:
                container.clear()
                container.update(content)
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        for weight, is_trained in trains:
            weight.requires_grad_(is_trained)
        with torch.no_grad():
            for weight, content, version in weights:
                if version is None or version_of(weight) != version:
                    weight.copy_(content)


def _contents(own: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """A module's attributes, and what is in torch's dicts and sets among these, e.g. of buffers;
    hooks are left alone, as strategies have some that take themselves away."""
    parts = (own[key] for key in own.keys() & OF_MODULES if "hook" not in key)
    return dict(own), [(part, part.copy()) for part in parts if isinstance(part, dict | set)]


def _copy(value: Any, memo: dict[int, Any], held: list[Any]) -> Any:
    held.append(value)
    try:
        return deepcopy(value, memo)
    except Exception:  # it stays the same object
        return value


def _is_copied(value: Any, depth: int = 0) -> bool:
    """Numbers, text, tensors, arrays, generators, lists, dicts and the like of these, and objects
    of the user's own that have only such; nothing that is large."""
    if isinstance(value, (*PLAIN, torch.Generator, random.Random)):
        return True
    if isinstance(value, nn.Module):
        return sum(tensor.nbytes for tensor in value.parameters()) <= KEPT_BYTES
    if isinstance(value, Tensor) or _is_of_numpy(value):
        is_dense = getattr(value, "layout", torch.strided) is torch.strided
        return not is_dense or getattr(value, "nbytes", 0) <= LARGE_BYTES
    if depth > DEEPEST:
        return False
    if isinstance(value, list | tuple | deque | set):
        return all(_is_copied(each, depth + 1) for each in value)
    if isinstance(value, dict):
        return all(_is_copied(each, depth + 1) for each in value.values())
    package = type(value).__module__.partition(".")[0]
    if package in OF_OTHERS or callable(value) or not hasattr(value, "__dict__"):
        return False
    return all(_is_copied(each, depth + 1) for each in vars(value).values())


def _is_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.ndarray, numpy.generic, numpy.random.Generator)
    return isinstance(value, kinds)


@contextmanager
def widened(task: Task) -> Iterator[None]:
    """The floats of the task in float64, with the same tensors."""
    tensors = [t for t in chain(task.parameters(), task.buffers()) if t.is_floating_point()]
    before = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data
