"""The order of an epoch: which rows make which global batch, by a seed or by the user's sampler."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset

from dpframe import seeding
from dpframe.data.mix import Mix
from dpframe.errors import UserError

Agree = Callable[[Any], Any]
"""A strategy's `Collectives.broadcast`: the main process's value, in every process."""


def order_of(
    dataset: Any,
    batch_size: int,
    shuffle: bool,
    seed: int,
    sampler: Iterable | None,
    agree: Agree,
    *,
    drop_last: bool = False,
    label: str = "train_sampler returned",
) -> "Order | SamplerOrder | None":
    """None for a stream, whose order is unknown. `label` begins the errors about the sampler."""
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise UserError("an IterableDataset has its own order; return None from train_sampler")
        return None
    if isinstance(dataset, Mix):
        if sampler is not None:
            raise UserError(f"{label} an order of a dpframe.Mix, which has its own; leave it out")
        return MixOrder(dataset.rows, batch_size, shuffle, seed, drop_last, mix=dataset)
    if sampler is not None:
        return SamplerOrder(sampler, batch_size, len(dataset), seed, agree, drop_last, label)
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

    def numbers(self, epoch: int) -> Tensor:
        if self.shuffle:
            return permutation(self.rows, seed=self.seed, epoch=epoch)
        return torch.arange(self.rows)

    def epoch(self, epoch: int) -> Iterator[Tensor]:
        rows = self.numbers(epoch)
        # Not `rows.split`, which makes millions of tensors at once of a large data set.
        for start in range(0, self.end, self.batch_size):
            yield rows[start : start + self.batch_size]


@dataclass
class MixOrder(Order):
    """Of a Mix, each of whose sets goes on from epoch to epoch."""

    mix: Mix = field(kw_only=True)

    def numbers(self, epoch: int) -> Tensor:
        return self.mix.numbers(epoch * self.end, (epoch + 1) * self.end, self._pass)

    def _pass(self, place: int, rows: int, number: int) -> Tensor:
        return Order(rows, 1, self.shuffle, seeding.mix(self.seed, place)).numbers(number)


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
