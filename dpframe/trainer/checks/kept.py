"""What a task keeps in plain attributes from step to step, beside its weights and buffers."""

import random
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpframe.data.copies import OF_MODULES
from dpframe.metrics import is_metric

LARGE = 1 << 20  # numbers: larger ones are not looked at
MANY = 64  # of a list, as many entries are looked at
DEEP = 3  # containers in one another


class KeptValue(NamedTuple):
    """The value of an attribute: which object it is, and what is in it."""

    object: int
    content: Any


def kept_in(task: nn.Module) -> dict[str, KeptValue]:
    """By the names of attributes. What torchmetrics keeps is counted over all replicas."""
    found = {}
    for name, module in task.named_modules():
        if is_metric(module):
            continue
        for attribute, value in vars(module).items():
            if attribute not in OF_MODULES and (content := _content(value)) is not None:
                found[f"{name}.{attribute}".lstrip(".")] = KeptValue(id(value), content)
    return found


def moving(before: Mapping[str, KeptValue], now: Mapping[str, KeptValue]) -> set[str]:
    """Those that hold something else now than before, or of all rows than of a share."""
    known = {name: kept.content for name, kept in before.items()}
    return {name for name, kept in now.items() if known.get(name) != kept.content}


def _content(value: Any, deep: int = DEEP) -> Any:
    """None of what is not looked into."""
    if isinstance(value, bool | int | float | complex | str):
        return value
    if isinstance(value, Tensor):
        return _sum(value) if value.layout is torch.strided and value.numel() <= LARGE else None
    if isinstance(value, set):
        return len(value)
    if isinstance(value, list | tuple | deque | dict) and deep:
        parts = value.values() if isinstance(value, dict) else value
        return len(value), tuple(_content(part, deep - 1) for part in islice(parts, MANY))
    if isinstance(value, torch.Generator):
        return float(value.get_state().double().sum())
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if type(value).__module__.partition(".")[0] == "numpy":
        return _of_numpy(value)
    return None


def _sum(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), complex(tensor.detach().cpu().to(torch.complex128).sum())


def _of_numpy(value: Any) -> Any:
    if hasattr(value, "bit_generator"):
        return repr(value.bit_generator.state)
    if hasattr(value, "nbytes") and value.dtype.kind in "biufc" and value.size <= LARGE:
        return tuple(value.shape), complex(value.sum())
    return None
