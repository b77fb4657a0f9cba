"""What a step may change is put back after it: weights, buffers, attributes and generators."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dpframe.task import Task

KEPT_BYTES = 1 << 30  # of trained weights; larger ones are not expected to be changed by a step
PLAIN = (bool, int, float, complex, str, bytes, type(None))
OF_MODULES = {*vars(nn.Module())}  # torch's own attributes


@contextmanager
def put_back(task: Task) -> Iterator[None]:
    """Weights, buffers and plain attributes of the task and its modules are as before."""
    trained = sum(p.nbytes for p in task.parameters() if p.requires_grad)
    tensors = [
        (tensor, tensor.detach().clone())
        for tensor in chain(task.parameters(), task.buffers())
        if not tensor.requires_grad or trained < KEPT_BYTES
    ]
    owns = [vars(module) for module in task.modules()]
    attributes = [
        {name: (value, deepcopy(value)) for name, value in own.items() if is_own(name, value)}
        for own in owns
    ]
    drawers = [each for own in owns for each in own.values() if isinstance(each, torch.Generator)]
    states = [drawer.get_state() for drawer in drawers]
    trains = [(weight, weight.requires_grad) for weight in task.parameters()]
    try:
        yield
    finally:
        for weight, is_trained in trains:
            weight.requires_grad_(is_trained)
        with torch.no_grad():
            for tensor, content in tensors:
                tensor.copy_(content)
        for own, kept in zip(owns, attributes, strict=True):
            for name in [n for n, value in own.items() if n not in kept and is_own(n, value)]:
                del own[name]
            for name, (value, content) in kept.items():
                own[name] = value if alike(value, content) else refilled(value, content)
        for drawer, state in zip(drawers, states, strict=True):
            drawer.set_state(state)


def refilled(value: Any, content: Any) -> Any:
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


def is_own(name: str, value: Any) -> bool:
    return name not in OF_MODULES and is_plain(value)


def alike(one: Any, other: Any) -> bool:
    """Of plain values."""
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def is_plain(value: Any) -> bool:
    """Numbers, text, tensors, and lists, dicts and deques of these."""
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, Tensor):
        return value.is_leaf or not value.requires_grad
    if isinstance(value, PLAIN):
        return True
    if type(value) in (list, tuple, deque, set):
        return all(map(is_plain, value))
    is_dict = type(value) in (dict, Counter, OrderedDict, defaultdict)
    return is_dict and all(map(is_plain, value.values()))


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
