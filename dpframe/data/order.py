"""The order of an epoch: which rows make which global batch, by a seed or by the user's sampler."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset

from dpframe import seeding
from dpframe.data.mix import Mix, spread
from dpframe.data.together import Parts
from dpframe.errors import UserError

Agree = Callable[[Any], Any]
"""A strategy's `Collectives.broadcast`: the main process's value, in every process."""


def order_of(
    dataset: Any,
    batch_size: int,
    shuffle: bool,
    seed: int,
    sampler: Iterable | Parts | None,
    agree: Agree,
    *,
    drop_last: bool = False,
    label: str = "train_sampler returned",
) -> "Order | SamplerOrder | TogetherOrder | None":
    """None for a stream, whose order is unknown. `label` begins the errors about the sampler."""
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise UserError("an IterableDataset has its own order; return None from train_sampler")
        return None
    if isinstance(sampler, Parts):
        return TogetherOrder.of(sampler, dataset.cumulative_sizes, seed, agree)
    if sampler is not None:
        return SamplerOrder(sampler, batch_size, len(dataset), seed, agree, drop_last, label)
    if isinstance(dataset, Mix):
        return MixOrder(dataset.rows, batch_size, shuffle, seed, drop_last, mix=dataset)
    return Order(len(dataset), batch_size, shuffle, seed, drop_last)


def permutation(rows: int, *, seed: int, epoch: int) -> Tensor:
    """The order of a shuffled epoch: a fact of (seed, epoch), the same on every strategy."""
    generator = torch.Generator().manual_seed(seeding.mix(seed, epoch))
    return torch.randperm(rows, generator=generator)


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

    def epoch(self, epoch: int) -> Iterator[Tensor]:
        if self.shuffle:
            rows = permutation(self.rows, seed=self.seed, epoch=epoch)
        else:
            rows = torch.arange(self.rows)
        # Not `rows.split`, which makes millions of tensors at once of a large data set.
        for start in range(0, self.end, self.batch_size):
            yield rows[start : start + self.batch_size]


@dataclass
class MixOrder(Order):
    """Of a Mix, each of whose sets goes on from epoch to epoch."""

    mix: Mix = field(kw_only=True)

    def epoch(self, epoch: int) -> Iterator[Tensor]:
        rows = self.mix.numbers(epoch * self.end, (epoch + 1) * self.end, self._pass)
        for start in range(0, self.end, self.batch_size):
            yield rows[start : start + self.batch_size]

    def _pass(self, place: int, rows: int, number: int) -> Tensor:
        seed = seeding.mix(self.seed, place)
        return permutation(rows, seed=seed, epoch=number) if self.shuffle else torch.arange(rows)


@dataclass
class SamplerOrder:
    """A user's own sampler (rows) or batch sampler (lists of rows), in its own order. `label`
    begins the errors about it."""

    sampler: Any
    batch_size: int
    rows: int
    seed: int
    agree: Agree = lambda value: value
    drop_last: bool = False
    label: str = "train_sampler returned"

    def __post_init__(self) -> None:
        self._drawn: tuple[int, list[Tensor]] = (-1, [])  # the last epoch, and its batches
        _check_length(self.sampler, self.label)

    @cached_property
    def batches(self) -> int:
        return len(self.epoch(0))

    def epoch(self, epoch: int) -> list[Tensor]:
        """Draws each epoch once and in order: so a generator of the sampler's own moves as if no
        run had been resumed, and a second look does not move it."""
        last, _ = self._drawn
        if last != epoch:
            for skipped in range(last + 1, epoch):
                self._draw(skipped)
            self._drawn = epoch, self._batches_of(epoch)
        return self._drawn[1]

    def _draw(self, epoch: int) -> list[Any]:
        samplers: list[Any] = [self.sampler, getattr(self.sampler, "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        with seeding.seeded(self.seed, epoch):
            return list(self.sampler)

    def _batches_of(self, epoch: int) -> list[Tensor]:
        # The draws of torch, NumPy and Python are the same in every process. A sampler may draw by
        # other means: the main process's draw is the one that is used.
        drawn = self.agree(self._draw(epoch))
        if not drawn:
            raise UserError(
                f"{self.label} a {type(self.sampler).__name__} of no rows; make it draw some"
            )
        if isinstance(drawn[0], (list, tuple)) or getattr(drawn[0], "ndim", 0) > 0:
            if self.drop_last:
                raise UserError(
                    f"data.drop_last=true, and {self.label} a {type(self.sampler).__name__}, "
                    "which makes the batches itself; leave out the last one there, and set "
                    "data.drop_last=false"
                )
            batches = [torch.as_tensor(batch).long() for batch in drawn if len(batch)]
        else:
            rows = torch.tensor([int(row) for row in drawn], dtype=torch.int64)
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
            name: order_of(
                source.dataset,
                source.batch_size,
                source.shuffle,
                seeding.mix(seed, place),
                source.sampler,
                agree,
                drop_last=source.drop_last,
                label=source.label,
            )
            for place, (name, source) in enumerate(parts.sources.items())
        }
        return cls(orders, ends, parts.length)

    def epoch(self, epoch: int) -> Iterator[Tensor]:
        """Samplers draw all of it at once, and once."""
        first, (last, drawn) = epoch * self.batches, self._drawn
        if last != epoch:
            of_samplers = {n: o for n, o in self._orders.items() if isinstance(o, SamplerOrder)}
            drawn = {
                name: list(islice(_onward(order, first), self.batches))
                for name, order in of_samplers.items()
            }
            self._drawn = epoch, drawn
        each = [drawn.get(name) or _onward(order, first) for name, order in self._orders.items()]
        starts = [0, *self._ends.tolist()]
        for parts in islice(zip(*each, strict=False), self.batches):
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
                f"epoch {epoch} and {order.batches} in the first one; of several sets in a step "
                "each has to have as many in each epoch"
            )
        yield from islice(order.epoch(epoch), skipped if epoch == first else 0, None)


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
