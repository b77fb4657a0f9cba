"""The order of a shuffled epoch: each row once, as random as randperm's, without a list of all."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import loader_of
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from dpframe import Mix, seeding
from dpframe.data import Loader, permutation
from dpframe.data.divided import OwnRows
from dpframe.data.order import Order
from dpframe.data.shuffle import DRAWN, Computed
from dpframe.data.source import Source
from dpframe.data.together import Parts, Together

HUGE = 10**9
ORDERS = 4  # of each kind are judged
CELLS = 64


@pytest.mark.parametrize("rows", [*range(1, 40), 1023, 1024, 1025, 40_000, DRAWN + 1])
def test_an_order_that_is_computed_has_each_row_once(rows):
    order = Computed(rows, seed=7)(0, rows)
    assert torch.equal(order.sort().values, torch.arange(rows))


def test_a_stretch_of_an_order_does_not_depend_on_where_it_begins():
    order = Order(HUGE, 1, shuffle=True, seed=1).numbers(2)
    whole = order(HUGE - 1000, HUGE)
    assert torch.equal(whole, torch.cat([order(HUGE - 1000, HUGE - 1), order(HUGE - 1, HUGE)]))
    assert int(whole.min()) >= 0 and int(whole.max()) < HUGE


def test_orders_of_a_million_rows_are_those_of_randperm_and_larger_ones_are_computed():
    generator = torch.Generator().manual_seed(seeding.mix(3, 5))
    assert torch.equal(
        permutation(DRAWN, seed=3, epoch=5), torch.randperm(DRAWN, generator=generator)
    )
    rows = DRAWN + 1
    assert torch.equal(
        permutation(rows, seed=3, epoch=5), Computed(rows, seeding.mix(3, 5))(0, rows)
    )


# As random as randperm


def by_randperm(rows: int, epoch: int) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))


def by_computing(rows: int, epoch: int) -> Tensor:
    return Computed(rows, seeding.mix(0, epoch))(0, rows)


def far_from_chance(cells: Tensor, free: int) -> float:
    """Chi-square of numbers that should be in all cells alike, of which so many are free: from its
    mean, in its standard deviations."""
    expected = len(cells) / CELLS**2
    counts = torch.bincount(cells, minlength=CELLS**2).double()
    return float((counts - expected).square().sum() / expected - free) / math.sqrt(2 * free)


def of_positions(order: Tensor, _: Tensor) -> float:
    """Where in the epoch the rows of each part of the data come."""
    rows = len(order)
    places = torch.arange(rows) * CELLS // rows
    # Of each part of the data, and of the epoch, the last cell follows from the others.
    return far_from_chance(places * CELLS + order * CELLS // rows, (CELLS - 1) ** 2)


def of_epochs(order: Tensor, other: Tensor) -> float:
    """At the same place of two orders, how far apart the rows are in the data."""
    rows = len(order)
    return far_from_chance((order - other) % rows * CELLS**2 // rows, CELLS**2 - 1)


def of_neighbours(apart: int) -> Callable[[Tensor, Tensor], float]:
    """The same of rows so far apart in one order."""
    return lambda order, _: of_epochs(order, order.roll(apart))


ROWS = DRAWN + 1
BASE = math.isqrt(ROWS) + 1  # of the digits: rows so far apart have one of them in common
MEASURES = {
    "positions": of_positions,
    "neighbours": of_neighbours(1),
    "next but one": of_neighbours(2),
    "a digit in common": of_neighbours(BASE),
    "epochs": of_epochs,
}


def judged(order_of: Callable[[int, int], Tensor], measure: Any) -> float:
    """The mean over some orders, in its standard deviations."""
    orders = [order_of(ROWS, epoch) for epoch in range(ORDERS + 1)]
    pairs = zip(orders, orders[1:], strict=False)
    return sum(measure(*pair) for pair in pairs) / math.sqrt(ORDERS)


@pytest.mark.parametrize("order_of", [by_randperm, by_computing])
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_an_order_is_random_as_far_as_chi_square_tells(order_of, measure):
    assert abs(judged(order_of, measure)) < 3


def test_chi_square_tells_an_order_of_too_few_rounds(monkeypatch):
    monkeypatch.setattr("dpframe.data.shuffle.ROUNDS", 4)
    assert judged(by_computing, MEASURES["a digit in common"]) > 10


# Bytes


class Numbers(Dataset):
    """Rows that are computed."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        return row


class Bytes(TorchFunctionMode):
    """Counts what torch's functions make, as tensors and as lists."""

    made = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **kwargs or {})
        if isinstance(result, Tensor):
            self.made += result.nbytes
        if isinstance(result, list):
            self.made += 8 * len(result)
        return result


def source(rows: int, shuffle: bool = True) -> Source:
    return Source(Numbers(rows), 128, shuffle, None, 0, list)


def mixed(rows: int) -> Mix:
    return Mix({"many": Numbers(rows), "few": Numbers(1000)}, {"many": 7, "few": 3})


def loader(dataset: Any, **given: Any) -> Loader:
    return loader_of(dataset, batch_size=128, collate=list, **given)


def together(rows: int) -> Loader:
    sources = {"many": source(rows), "few": source(1000)}
    parts = Parts(sources, "longest")
    return loader(Together(sources, "longest"), sampler=parts)


LOADERS: dict[str, Callable[[int], Loader]] = {
    "shuffled": lambda rows: loader(Numbers(rows), shuffle=True),
    "in order": lambda rows: loader(Numbers(rows)),
    "mixed": lambda rows: loader(mixed(rows), shuffle=True),
    "mixed in order": lambda rows: loader(mixed(rows)),
    "several in a step": together,
    "by rank": lambda rows: loader(OwnRows(Numbers(rows), shuffle=True, seed=0, rank=0)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_an_epoch_begins_without_the_numbers_of_all_its_rows(kind):
    rows = 16 * DRAWN
    with Bytes() as counted:
        made = LOADERS[kind](rows)
        batch = next(made.epoch(1))
    assert batch.rows
    assert counted.made < 2 * rows


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "by rank"])
def test_a_resume_computes_nothing_of_the_batches_before_its_place(kind):
    rows = 16 * DRAWN
    made = LOADERS[kind](rows)
    with Bytes() as counted:
        batch = next(made.epoch(1, skip=made.batches - 2))
    assert batch.rows
    assert counted.made < 2 * rows


@pytest.mark.parametrize("kind", LOADERS)
def test_an_epoch_goes_on_where_it_was_left(kind, monkeypatch):
    monkeypatch.setattr("dpframe.data.order.COMPUTED", 300)
    for drawn in (0, DRAWN):
        monkeypatch.setattr("dpframe.data.order.DRAWN", drawn)
        whole = [batch.shares for batch in LOADERS[kind](2000).epoch(1)]
        for skip in (0, 1, 3, len(whole) - 1):
            rest = LOADERS[kind](2000).epoch(1, skip=skip, limit=len(whole))
            assert [batch.shares for batch in rest] == whole[skip:]
