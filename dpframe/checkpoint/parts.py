"""The tensors of a sharded checkpoint: parts that ranks have written, in a folder beside its file.

`strategies.sharded` writes the folder by torch.distributed.checkpoint, whose own list of contents
is a pickle. It is read by `parts.json`, which says where each part is, and has its hash.
"""

import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkstemp
from typing import Any, NoReturn

import torch
from torch import Tensor

from dpframe.checkpoint import seal
from dpframe.errors import UserError, first_line

KEY = "parts"  # in a state: the paths of its parts, by their names


class NotANumber(Exception):
    """The name of a weight that has one in this part."""


@dataclass
class Part:
    """This process's rows of a tensor; the first of them is row `first` of the whole."""

    rows: Tensor
    size: tuple[int, ...]  # of the whole
    first: int
    is_copy: bool = False  # another process writes these rows


@dataclass
class Own:
    """This process's value of a list that has one of each process, in rank order."""

    value: Any
    of_all: list[Any] = field(default_factory=list)  # on the main process, when it is written


Parts = dict[str, Part | Own]


@dataclass
class Source:
    """Where the parts of a tensor are."""

    folder: Path
    where: str  # the checkpoint's key and file, for the errors
    parts: list[Any] = field(default_factory=list)
    is_weight: bool = False

    def refuse(self, why: str) -> NoReturn:
        raise UserError(f"{self.where} can't be used: {self.folder.name}/{why}")


class Stored(Tensor):
    """A tensor of a checkpoint whose numbers are not read yet: a meta tensor."""

    source: Source

    def read(
        self, first: int = 0, count: int | None = None, *, into: Tensor | None = None
    ) -> Tensor:
        """`count` of its rows, or all; in the host's memory, or in the tensor that is given."""
        source, rest = self.source, self.shape[1:]
        last = self.shape[0] if count is None else first + count
        read = torch.empty(last - first, *rest, dtype=self.dtype) if into is None else into
        begin = 0
        for rows, *at in source.parts:
            low, high = max(begin, first), min(begin + rows, last)
            if low < high:
                part = self._part((rows, *rest), *at)
                read[low - first : high - first] = part[low - begin : high - begin]
            begin += rows
        if source.is_weight and read.is_floating_point() and bool(read.isnan().any()):
            raise UserError(f"{source.where} has weights that are not numbers; use an earlier one")
        return read

    def _part(self, size: tuple[int, ...], name: str, at: int, length: int, digest: str) -> Tensor:
        refuse = self.source.refuse
        try:
            block = seal.read_block(self.source.folder / name, at, length)
        except OSError as error:
            refuse(f"{name}: {error.strerror}")
        if seal.digest(block) != digest:
            refuse(f"{name} is {seal.DAMAGED}")
        try:
            part = torch.load(io.BytesIO(block), map_location="cpu", weights_only=True)
        except Exception as error:
            refuse(f"{name}: {first_line(error)[:160]}")
        is_right = isinstance(part, Tensor) and (part.dtype, part.shape) == (self.dtype, size)
        if not is_right or part.untyped_storage().nbytes() > length:
            refuse(f"{name} has another tensor than {seal.MANIFEST} says")
        return part


def taken_out(state: dict[str, Any]) -> tuple[dict[str, Any], Parts]:
    """The state with None in the place of each Part, and their places; and the parts by name.

    Among these is each Own, too, which stays in its place."""
    parts: Parts = {}
    places: dict[str, list[Any]] = {}

    def without(value: Any, path: list[Any]) -> Any:
        if isinstance(value, dict):
            return {key: without(inner, [*path, key]) for key, inner in value.items()}
        if not isinstance(value, Part | Own):
            return value
        name = ".".join(map(str, path))
        while name in parts:
            name += "+"
        parts[name] = value
        if isinstance(value, Own):
            return value
        places[name] = path
        return None

    rest = without(state, [])
    return {**rest, KEY: places}, parts


def gathered(state: Any) -> Any:
    """The state with what all processes have in the place of each Own."""
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    return state.of_all if isinstance(state, Own) else state


def put_in(state: dict[str, Any], folder: Path, where: str) -> str:
    """Puts `Stored` tensors in their places; returns what is wrong with the folder, or ''."""
    try:
        tensors = json.loads((folder / seal.MANIFEST).read_text())["tensors"]
        named = {
            seal.plain_name(part[1]) for tensor in tensors.values() for part in tensor["parts"]
        }
        room = sum((folder / name).stat().st_size for name in named)
        places = state.pop(KEY)
        for name, tensor in tensors.items():
            *outer, last = places.pop(name)
            holder: Any = state
            for key in outer:
                holder = holder[key]
            if holder[last] is not None or not isinstance(holder, dict):
                raise ValueError(name)
            holder[last] = stored = _stored(tensor)
            lengths = sum(part[3] for part in tensor["parts"])
            if stored.nbytes > lengths:
                raise ValueError(name)
            room -= lengths
            is_weight = outer[0] in ("task", "averaged")
            stored.source = Source(folder, where, tensor["parts"], is_weight)
        if places or room < 0:
            raise ValueError
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except seal.STRANGE:
        return f"{folder} has other parts than dpframe writes"
    return ""


def _stored(tensor: dict[str, Any]) -> Stored:
    size, dtype = tensor["size"], getattr(torch, tensor["dtype"])
    rows = [part[0] for part in tensor["parts"]]
    if not (size and all(type(n) is int and n >= 0 for n in (*size, *rows))):
        raise ValueError(size)
    if sum(rows) != size[0] or math.prod(size) >= 1 << 62:
        raise ValueError(rows)
    return torch.empty(size, dtype=dtype, device="meta").as_subclass(Stored)


def whole(state: Any, read: Callable[[Stored], Tensor] = Stored.read) -> Any:
    """The state with the values of its `Stored` tensors."""
    if isinstance(state, Stored):
        return read(state)
    if isinstance(state, dict):
        return {key: whole(value, read) for key, value in state.items()}
    return state


def in_file(stored: Stored, folder: str) -> Tensor:
    """Its numbers in a new file, which the system reads into memory where they are used."""
    number, name = mkstemp(dir=folder)
    os.close(number)
    mapped = torch.from_file(name, shared=True, size=stored.numel(), dtype=stored.dtype)
    return stored.read(into=mapped.view(stored.shape))
