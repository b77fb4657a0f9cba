"""Copies of what a task or a data set keeps, which share what is large with it."""

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from functools import partial
from io import IOBase
from threading import Lock, RLock
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

LARGE_BYTES = 1 << 26  # that are copied, of all tensors and arrays
MANY = 1000  # of a list or a dict with more entries than that, these are not copied
MOST = 100_000  # objects
OF_MODULES = {*vars(nn.Module())}  # torch's own attributes of each, e.g. a dict of its buffers
PLAIN = (bool, int, float, complex, str, bytes, type(None))
CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial, type)
HELD = (Iterator, IOBase, type(Lock()), type(RLock()))  # an object with one has no copy
OF_OTHERS = ("dpframe", "lightning", "pandas", "pytorch_lightning", "torch", "torchmetrics")


class Copies:
    """What is one object is one copy. The same object stays what can't be copied, large tensors and
    arrays, and functions."""

    def __init__(self, known: Iterable[Any] = ()) -> None:
        """`known` are not copied."""
        self.shared: list[Any] = []  # what else is not
        self.opaque: list[Any] = []  # of these, what may change for all that is known
        self._held = list(known)  # so that no id comes twice
        self._memo: dict[int, Any] = {id(each): each for each in self._held}
        self._left = LARGE_BYTES

    def of(self, value: Any) -> Any:
        try:
            return self._of(value)
        except Exception:
            self.opaque.append(value)
            self._memo[id(value)] = value
            return value

    def _of(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return value
        if id(value) not in self._memo:
            self._held.append(value)
            made = self._copied(value) if len(self._held) < MOST else value
            if made is value:
                self.shared.append(value)
            self._memo[id(value)] = made
        return self._memo[id(value)]

    def _copied(self, value: Any) -> Any:
        kind = type(value)
        package, _, rest = kind.__module__.partition(".")
        if isinstance(value, Tensor) or (package == "numpy" and hasattr(value, "nbytes")):
            return self._array(value)
        if isinstance(value, list | deque | dict | tuple | set):
            return self._container(value)
        if isinstance(value, random.Random | torch.Generator) or rest.startswith("random."):
            return deepcopy(value)
        if isinstance(value, HELD):
            raise TypeError(f"a {kind.__name__} has no copy")
        # Of which a part may be shared.
        is_known = isinstance(value, nn.Module | Dataset) or hasattr(kind, "__getitem__")
        if isinstance(value, CODE) or (package in OF_OTHERS and not is_known):
            return value
        if not hasattr(value, "__dict__") or hasattr(kind, "__del__"):
            if package not in sys.stdlib_module_names:
                self.opaque.append(value)
            return value
        if hasattr(kind, "__deepcopy__"):
            return deepcopy(value, self._memo)
        if (made := copy(value)) is not value:
            self._memo[id(value)] = made
            for name, part in vars(made).items():
                vars(made)[name] = self.of(part) if is_known else self._of(part)
        return made

    def _array(self, value: Any) -> Any:
        size = value.nbytes
        if isinstance(value, Tensor) and value.layout is torch.strided:
            size = value.untyped_storage().nbytes()  # of which it may be a view
        if size > self._left:
            return value
        self._left -= size
        if not isinstance(value, Tensor):
            return copy(value)
        is_plain = type(value) is Tensor and not value.requires_grad and size == value.nbytes
        if is_plain or not value.is_leaf:
            return value.detach().clone()
        return deepcopy(value, self._memo)

    def _container(self, value: Any) -> Any:
        if isinstance(value, tuple):
            parts = [self._of(each) for each in value] if len(value) <= MANY else value
            if all(part is each for part, each in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        self._memo[id(value)] = made = copy(value)
        if isinstance(value, set) or len(value) > MANY:
            return made
        for key in value if isinstance(value, dict) else range(len(value)):
            made[key] = self._of(value[key])
        return made
