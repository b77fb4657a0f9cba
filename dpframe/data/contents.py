"""What is in the attributes of a data set, and whether it has changed since an earlier look."""

import types
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from dpframe.parameters import version_of

DEEPEST = 8  # attributes of attributes, e.g. Subset.dataset.datasets[1].transform.steps[0].size
OF_COLLATE = 2  # of a method's object, e.g. a DataModule, its attributes
MOST = 10_000  # values that are looked at
ITEMS = 1_000  # of a list or a dict, from all over it
HASHED_BYTES = 1 << 24  # of all arrays, which count no changes; of a larger one some pieces
PIECES = 16
PLAIN = (bool, int, float, complex, str, bytes, type(None))
WHOLE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)  # not looked into

Contents = dict[str, Any]
"""By the name of each attribute, what tells its value from a different one."""


def contents_of(value: Any, name: str, *, deepest: int = DEEPEST) -> Contents:
    contents: Contents = {}
    bytes_left = HASHED_BYTES
    for path, each in walked(value, name, deepest=deepest):
        if isinstance(each, np.ndarray):
            contents[path] = each.shape, each.dtype, _checksum(each, bytes_left)
            bytes_left = max(0, bytes_left - each.nbytes)
        else:
            contents[path] = _told(each)
    return contents


def changed(before: Contents, now: Contents) -> str:
    """The name of a value that has changed, or that is only in one of them; empty if none has."""
    names = [*now, *(name for name in before if name not in now)]
    return next((name for name in names if before.get(name) != now.get(name)), "")


def walked(
    value: Any, name: str = "", *, deepest: int = DEEPEST, items: int = ITEMS
) -> Iterator[tuple[str, Any]]:
    """What is in its attributes, and in theirs, e.g. `NAME.transform.size`, the nearest first."""
    met: set[int] = set()
    waiting = deque([(name, value, 0)])
    for _ in range(MOST):
        if not waiting:
            return
        path, value, depth = waiting.popleft()
        if not isinstance(value, PLAIN):
            if id(value) in met:
                continue
            met.add(id(value))
        yield path, value
        if depth < deepest:
            waiting.extend((path + own, part, depth + 1) for own, part in _parts(value, items))


def _parts(value: Any, items: int) -> list[tuple[str, Any]]:
    if isinstance(value, (*PLAIN, *WHOLE, Tensor)):
        return []
    if isinstance(value, list | tuple | deque):
        places = range(0, len(value), len(value) // items + 1)
        return [(f"[{place}]", value[place]) for place in places]
    if isinstance(value, dict):  # not e.g. a file of h5py, which is read by that
        step = len(value) // items + 1
        return [(f"[{key!r}]", each) for key, each in islice(list(value.items()), 0, None, step)]
    if isinstance(value, partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("", value.__self__)]
    return [(f".{name}", each) for name, each in list(getattr(value, "__dict__", {}).items())]


def _told(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return type(value), repr(value) if isinstance(value, float) else value  # NaN is alike
    if isinstance(value, Tensor):
        return _Same(value), version_of(value)
    if isinstance(value, list | tuple | deque | dict | set | frozenset):
        is_seen = isinstance(value, set | frozenset) and len(value) <= ITEMS
        told = frozenset(value) if is_seen else len(value)
        return type(value), told, id(value) if len(value) > ITEMS else 0
    has_parts = not isinstance(value, WHOLE) and hasattr(value, "__dict__")
    return type(value) if has_parts else _Same(value)


class _Same:
    """Equal only to that of the same object, which it does not keep alive."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._reference: Any = weakref.ref(value)
        except TypeError:
            self._reference = None

    def __eq__(self, other: object) -> bool:
        is_alive = self._reference is None or self._reference() is not None
        return isinstance(other, _Same) and self._id == other._id and is_alive


def _checksum(array: Any, bytes_left: int) -> Any:
    """What is in a file, in no order of memory, fixed or no numbers is not read."""
    is_read = array.flags.writeable and array.flags.c_contiguous and not array.dtype.hasobject
    if not is_read or hasattr(array, "filename") or not bytes_left:
        return _Same(array)
    data = memoryview(array.reshape(-1).view("uint8"))
    if len(data) <= bytes_left:
        return zlib.crc32(data)
    starts = [len(data) * number // PIECES for number in range(PIECES)]
    return tuple(zlib.crc32(data[at : at + bytes_left // PIECES]) for at in starts)
