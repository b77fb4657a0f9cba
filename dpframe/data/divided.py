"""Data that each process has a part of already, e.g. divided by rank: noticed, and read as such."""

import hashlib
import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from dpframe import seeding
from dpframe.data.copies import LARGE_BYTES, Copies
from dpframe.data.generators import Generators
from dpframe.data.module import leaves
from dpframe.data.order import Order
from dpframe.data.reading import set_epoch
from dpframe.data.shuffle import COMPUTED

LOOKED_AT = 2  # rows from the first one on; of a data set with a length also a middle and the last
CLOSE = 1e-3  # of floats, which other machines may round differently


class Floats(NamedTuple):
    """What tells a tensor from a different one."""

    shape: tuple[int, ...]
    sums: list[float]
    size: float


Look = tuple[int | None, list[list[Any]]]
"""The rows of a data set, None of a stream, and what is in some of them."""


def first_of(stream: Any, count: int) -> list[Any]:
    """Its first rows, from a copy, so that the stream stays where it is. Large tensors and arrays
    are not copied: they are what it reads."""
    large = [each for each in vars(stream).values() if getattr(each, "nbytes", 0) > LARGE_BYTES]
    return list(islice(deepcopy(stream, {id(each): each for each in large}), count))


def look(dataset: Any) -> Look | None:
    """None where it can't be told, e.g. because a read fails: the run will say so."""
    is_stream = isinstance(dataset, IterableDataset)
    try:
        with seeding.seeded(0):
            if is_stream:
                return None, [list(map(told, leaves(row))) for row in first_of(dataset, LOOKED_AT)]
            length = len(dataset)
            places = {*range(min(LOOKED_AT, length)), length // 2, length - 1}
            rows = [dataset[row] for row in sorted(places)]
            return length, [list(map(told, leaves(row))) for row in rows]
    except Exception:
        return None


def told(leaf: Any) -> Any:
    """In a few numbers or letters."""
    if hasattr(leaf, "dtype") and not isinstance(leaf, Tensor):
        try:
            leaf = torch.as_tensor(leaf)
        except Exception:
            return type(leaf).__name__
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.is_floating_point():
        flat = leaf.detach().double().flatten()
        ramp = torch.linspace(0, 1, len(flat), dtype=torch.float64, device=flat.device)
        sums = [float(x.sum()) for x in (flat, flat * ramp)]
        return Floats(tuple(leaf.shape), sums, float(flat.abs().sum()))
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        return hashlib.sha256(leaf.detach().cpu().numpy().tobytes()).hexdigest()
    if isinstance(leaf, bool | int | float | str | bytes | None):
        return leaf
    return type(leaf).__name__


def are_alike(batch: Any, gather: Callable[[Any], list[Any]]) -> bool:
    """In the main process, whether all have this batch, as far as its tensors tell."""
    own = list(map(told, leaves(batch)))
    looks = gather(own if any(hasattr(leaf, "dtype") for leaf in leaves(batch)) else None)
    return bool(looks) and None not in looks and all(is_alike(each, looks[0]) for each in looks)


def is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Floats) and isinstance(other, Floats):
        close = CLOSE * max(one.size, other.size)
        pairs = zip(one.sums, other.sums, strict=True)
        are_close = all(abs(a - b) <= close or a == b or a != a != b for a, b in pairs)
        return one.shape == other.shape and are_close
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=CLOSE) or one != one != other
    return bool(one == other)


def unlike(
    dataset: Any,
    gather: Callable[[Any], list[Any]],
    agree: Callable[[Any], Any],
    *,
    is_said: bool = False,
) -> str:
    """How the data set differs between processes; empty if it is the same in all of them.

    Rows that change at each reading, or that can't be read, tell nothing, unless it
    `is_said` that each process has rows of its own. What is read is a copy, whose own generators go
    on from one look to the next."""
    dataset = Copies().of(dataset)
    own = look(dataset)
    looks = gather(own)
    said = "rows that can't be compared" if is_said and None in looks else ""
    if looks and None not in looks:
        first = looks[0]
        other = next((rank for rank, each in enumerate(looks) if not is_alike(each, first)), None)
        if other is not None and looks[other][0] != first[0]:
            said = f"{first[0]} rows on rank 0, and {looks[other][0]} on rank {other}"
        elif other is not None:
            said = f"other rows on rank {other} than on rank 0"
    said = agree(said)
    if said.startswith("other") and not is_said:
        are_fixed = gather(is_alike(look(dataset), own))
        said = agree(said if all(are_fixed) else "")
    return said


class ByRank:
    """As `Division`, for a data set of which each process has its own part."""

    workers = 1

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def part(self, dataset: Any, rank: int) -> Any:
        return dataset

    def described(self) -> str:
        return f"what each of {self.ranks} ranks has: which rows meet in a batch depends on that"


class OwnRows(IterableDataset):
    """The rows that a process has, as a stream: the others have another number of them."""

    def __init__(self, rows: Any, *, shuffle: bool, seed: int, rank: int) -> None:
        self.rows, self.shuffle, self.seed, self.rank = rows, shuffle, seed, rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        set_epoch(self.rows, epoch)

    def __iter__(self) -> Iterator[Any]:
        some = Order(len(self.rows), COMPUTED, self.shuffle, self.seed).epoch(self.epoch)
        order = chain.from_iterable(map(Tensor.tolist, some))
        generators = Generators(self.rows)
        if not generators.are_own:  # the process's are seeded by the batch
            return (self.rows[row] for row in order)
        return (self._drawn(generators, *numbers) for numbers in enumerate(order))

    def _drawn(self, generators: Generators, place: int, row: int) -> Any:
        before = generators.states()
        try:
            generators.seed(self.seed, self.rank, self.epoch, place)
            return self.rows[row]
        finally:
            generators.restore(before)
