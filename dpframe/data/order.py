"""The order of an epoch: which rows make which global batch, by a seed or by the user's sampler."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count, islice
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset

from dpframe import seeding
from dpframe.data.mix import Mix, spread
from dpframe.data.shuffle import COMPUTED, DRAWN, Computed, Numbers
from dpframe.data.source import Source
from dpframe.data.together import Parts
from dpframe.errors import UserError

Agree = Callable[[Any], Any]
"""A strategy's `Collectives.broadcast`: the main process's value, in every process."""


def order_of(
    dataset: Any, source: Source, seed: int, agree: Agree
) -> "Order | SamplerOrder | TogetherOrder | None":
    """Of the source's `dataset`, or of this process's part of it; None for a stream, whose order is
    unknown."""
    size, sampler, drop_last = source.batch_size, source.sampler, source.drop_last
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise UserError("an IterableDataset has its own order; return None from train_sampler")
        return None
    if isinstance(sampler, Parts):
        return TogetherOrder.of(sampler, dataset.cumulative_sizes, seed, agree)
    if sampler is not None:
        return SamplerOrder(sampler, size, len(dataset), seed, agree, drop_last, source.label)
    if isinstance(dataset, Mix):
        return MixOrder(dataset.rows, size, source.shuffle, seed, drop_last, mix=dataset)
    return Order(len(dataset), size, source.shuffle, seed, drop_last)


def permutation(rows: int, *, seed: int, epoch: int) -> Tensor:
    """The order of a shuffled epoch: a fact of (seed, epoch), the same on every strategy."""
    return Order(rows, 1, True, seed).numbers(epoch)(0, rows)


@dataclass
class Order:
    """The global batches of each epoch, as row numbers."""

    rows: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        self.end = self.rows - self.rows % self.batch_size if self.drop_last else self.rows

    @property
    def batches(self) -> int:
        return -(-self.end // self.batch_size)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Tensor]:
        """From its batch `first` on."""
        numbers, size = self.numbers(epoch), self.batch_size
        many = -(-COMPUTED // size) * size
        for start in range(first * size, self.end, many):
            some = numbers(start, min(start + many, self.end))
            for place in range(0, len(some), size):
                yield some[place : place + size]

    def numbers(self, epoch: int) -> Numbers:
        if not self.shuffle:
            return torch.arange
        seed = seeding.mix(self.seed, epoch)
        if self.rows > DRAWN:
            return Computed(self.rows, seed)
        rows = torch.randperm(self.rows, generator=torch.Generator().manual_seed(seed))
        return lambda start, stop: rows[start:stop]


@dataclass
class MixOrder(Order):
    """Of a Mix, each of whose sets goes on from epoch to epoch."""

    mix: Mix = field(kw_only=True)
    _passes: dict[int, tuple[int, Numbers]] = field(default_factory=dict, init=False)  # newest ones

    def numbers(self, epoch: int) -> Numbers:
        begun = epoch * self.end
        return lambda start, stop: self.mix.numbers(begun + start, begun + stop, self._pass)

    def _pass(self, place: int, rows: int, number: int) -> Numbers:
        if self._passes.get(place, (-1,))[0] != number:
            order = Order(rows, 1, self.shuffle, seeding.mix(self.seed, place))
            self._passes[place] = number, order.numbers(number)
        return self._passes[place][1]


@dataclass
class SamplerOrder:
    """A user's own sampler (rows) or batch sampler (lists of rows), in its own order. `label`
    begins the errors about it."""

    sampler: Any
    batch_size: int
    rows: int
    seed: int
    agree: Agree
    drop_last: bool
    label: str

    def __post_init__(self) -> None:
        self._drawn: tuple[int, list[Tensor]] = (-1, [])  # the last epoch, and its batches
        _check_length(self.sampler, self.label)

    @cached_property
    def batches(self) -> int:
        return len(self.epoch(0))

    def epoch(self, epoch: int, first: int = 0) -> list[Tensor]:
        """Draws each epoch once and in order: so a generator of the sampler's own moves as if no
        run had been resumed, and a second look does not move it."""
        last, _ = self._drawn
        if last != epoch:
            for skipped in range(last + 1, epoch):
                self._draw(skipped)
            self._drawn = epoch, self._batches_of(epoch)
        return self._drawn[1][first:]

    def _draw(self, epoch: int) -> Sequence[Any]:
        """Rows, as numbers of 8 bytes, or batches."""
        samplers: list[Any] = [self.sampler, getattr(self.sampler, "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        with seeding.seeded(self.seed, epoch):
            rows = iter(self.sampler)
            some = list(islice(rows, 1))
            if not some or _is_batch(some[0]):
                return [*some, *rows]
            return array("q", map(int, chain(some, rows)))

    def _batches_of(self, epoch: int) -> list[Tensor]:
        # The draws of torch, NumPy and Python are the same in every process. A sampler may draw by
        # other means: the main process's draw is the one that is used.
        drawn = self.agree(self._draw(epoch))
        if not drawn:
            raise UserError(
                f"{self.label} a {type(self.sampler).__name__} that draws no rows; make it "
                "draw some"
            )
        if not isinstance(drawn, array):
            if self.drop_last:
                raise UserError(
                    f"data.drop_last=true, and {self.label} a {type(self.sampler).__name__}, "
                    "which makes the batches itself; leave out the last one there, and set "
                    "data.drop_last=false"
                )
            batches = [torch.as_tensor(batch).long() for batch in drawn if len(batch)]
        else:
            rows = torch.frombuffer(drawn, dtype=torch.int64)
            end = len(rows) // self.batch_size if self.drop_last else None
            batches = list(rows.split(self.batch_size))[:end]
        for row in (int(row) for batch in batches for row in batch.aminmax()):
            if not -self.rows <= row < self.rows:
                raise UserError(
                    f"{self.label} a {type(self.sampler).__name__} that drew row {row} of a data "
                    f"set of {self.rows} rows; draw 0 to {self.rows - 1}"
                )
        return [batch % self.rows for batch in batches]


class TogetherOrder:
    """Of several sets in a step: each goes through its own epochs, whose batches are as if it were
    alone. A batch has the rows of all of them, spread evenly, so that each share has its part."""

    def __init__(
        self, orders: dict[str, Order | SamplerOrder], ends: Sequence[int], length: str
    ) -> None:
        self._orders = orders
        self._ends = torch.tensor(ends)
        batches = {name: order.batches for name, order in orders.items()}
        for name, made in batches.items():
            if not made:
                raise UserError(
                    f"drop_last=true leaves no batch of {name!r}: it has {orders[name].rows} rows, "
                    f"and a batch {orders[name].batch_size}; use a smaller batch, or "
                    "data.drop_last=false"
                )
        of_length = {"longest": max(batches.values()), "shortest": min(batches.values())}
        self.batches = (of_length | batches)[length]
        self.batch_size = sum(order.batch_size for order in orders.values())
        self.rows = self.batches * self.batch_size  # at most
        self._drawn: tuple[int, dict[str, list[Tensor]]] = (-1, {})  # in an epoch, by samplers

    @classmethod
    def of(cls, parts: Parts, ends: Sequence[int], seed: int, agree: Agree) -> Self:
        orders: dict[str, Any] = {
            name: order_of(source.dataset, source, seeding.mix(seed, place), agree)
            for place, (name, source) in enumerate(parts.sources.items())
        }
        return cls(orders, ends, parts.length)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Tensor]:
        """Samplers draw all of it at once, and once."""
        begun, (last, drawn) = epoch * self.batches, self._drawn
        if last != epoch:
            of_samplers = {n: o for n, o in self._orders.items() if isinstance(o, SamplerOrder)}
            drawn = {
                name: list(islice(_onward(order, begun), self.batches))
                for name, order in of_samplers.items()
            }
            self._drawn = epoch, drawn
        each = [
            drawn[name][first:] if name in drawn else _onward(order, begun + first)
            for name, order in self._orders.items()
        ]
        starts = [0, *self._ends.tolist()]
        for parts in islice(zip(*each, strict=False), self.batches - first):
            rows = torch.cat([part + start for part, start in zip(parts, starts, strict=False)])
            yield rows[spread(tuple(map(len, parts)))]

    def fewest(self) -> Iterator[tuple[str, int]]:
        """The rows of each set's smallest batch, where no sampler makes it."""
        for name, order in self._orders.items():
            if isinstance(order, Order):
                yield name, order.end % order.batch_size or order.batch_size

    def places(self, rows: Tensor) -> list[int]:
        """Of these rows in their batch, in which the rows of the first set come first."""
        counts = torch.bucketize(rows, self._ends, right=True).bincount(minlength=len(self._ends))
        return spread(tuple(counts.tolist())).tolist()


def _onward(order: Order | SamplerOrder, batch: int) -> Iterator[Tensor]:
    """Its batches from this one on, epoch after epoch."""
    first, skipped = divmod(batch, order.batches)
    for epoch in count(first):
        if isinstance(order, SamplerOrder) and (made := len(order.epoch(epoch))) != order.batches:
            raise UserError(
                f"{order.label} a {type(order.sampler).__name__} that makes {made} batches in "
                f"epoch {epoch} and {order.batches} in the first one; with several sets in a "
                "step, each needs the same number in every epoch"
            )
        yield from order.epoch(epoch, skipped if epoch == first else 0)


def _is_batch(drawn: Any) -> bool:
    return isinstance(drawn, list | tuple) or getattr(drawn, "ndim", 0) > 0


def _check_length(sampler: Any, label: str) -> None:
    if isinstance(sampler, DistributedSampler) or isinstance(
        getattr(sampler, "sampler", None), DistributedSampler
    ):
        raise UserError(
            f"{label} a DistributedSampler, which pads and splits by itself; "
            "return the plain sampler: the strategy splits each global batch exactly"
        )
    try:
        len(sampler)
    except TypeError:
        raise UserError(
            f"{label} a {type(sampler).__name__} without __len__: an endless "
            "order can't be split exactly; give it a length"
        ) from None
