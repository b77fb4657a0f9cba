"""Batches and their shares: every row once, nothing padded, and orders that seeds decide."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from dpframe.data import Loader, Share, move, permutation, split, tensors_of

REPLICAS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("rows", [*range(1, 34), 100])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_batch_is_split_as_torch_chunk_splits(rows, replicas):
    numbers = torch.arange(rows)
    shares = split(numbers, replicas)
    assert len(shares) == replicas
    chunks = numbers.chunk(replicas)
    assert all(map(torch.equal, shares, chunks))
    assert all(len(share) == 0 for share in shares[len(chunks) :])


class OneByOne(Dataset):
    """Row `i` is the number i."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        return row


class Stream(IterableDataset):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(range(self.rows))


KINDS = {
    "tensors": lambda rows: TensorDataset(torch.arange(rows)),
    "rows": OneByOne,
    "stream": Stream,
}


def shares_of(kind: str, rows: int, replicas: int, **given) -> list[list[Share]]:
    """For each batch, what each replica computes; each is read by a process of its own."""
    loaders = [
        Loader(
            KINDS[kind](rows),
            batch_size=10,
            shares=lambda batch, replica=replica: [split(batch, replicas)[replica]],
            **given,
        )
        for replica in range(replicas)
    ]
    return [
        [batch.shares[0] for batch in batches]
        for batches in zip(*(loader.epoch() for loader in loaders), strict=True)
    ]


def numbers(share: Share) -> list[int]:
    batch = share.batch[0] if isinstance(share.batch, list) else share.batch
    return batch.tolist()[: share.rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_every_row_goes_to_exactly_one_replica(kind, replicas):
    batches = shares_of(kind, 23, replicas)
    seen = [[n for share in shares for n in numbers(share)] for shares in batches]
    assert seen == [list(range(10)), list(range(10, 20)), [20, 21, 22]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_without_a_row_is_lent_one_that_does_not_count(kind):
    *_, last = shares_of(kind, 21, 4)
    assert [share.rows for share in last] == [1, 0, 0, 0]
    lent = [share.batch[0] if isinstance(share.batch, list) else share.batch for share in last]
    assert [one.tolist() for one in lent] == [[20]] * 4


@pytest.mark.parametrize("kind", ["tensors", "rows"])
def test_an_epochs_order_is_a_fact_of_seed_and_epoch(kind):
    def order(seed: int, epoch: int) -> list[int]:
        loader = Loader(
            KINDS[kind](40), batch_size=10, shares=lambda rows: [rows], shuffle=True, seed=seed
        )
        return [n for batch in loader.epoch(epoch) for n in numbers(batch.shares[0])]

    first = order(0, 0)
    assert first == order(0, 0) == permutation(40, seed=0, epoch=0).tolist()
    assert sorted(first) == list(range(40))
    assert len({tuple(order(*pair)) for pair in [(0, 0), (0, 1), (1, 0), (1, 1)]}) == 4


@pytest.mark.parametrize(
    "kind, workers", [("tensors", 0), ("rows", 0), ("rows", 2), ("stream", 0), ("stream", 2)]
)
def test_skip_and_limit_are_numbers_of_batches_in_the_epoch(kind, workers):
    loader = Loader(KINDS[kind](45), batch_size=10, shares=lambda rows: [rows], workers=workers)
    batches = [numbers(batch.shares[0]) for batch in loader.epoch(skip=1, limit=3)]
    assert batches == [list(range(10, 20)), list(range(20, 30))]


def test_skipped_rows_are_not_read():
    class Watched(OneByOne):
        read: list[int] = []

        def __getitem__(self, row: int) -> int:
            self.read.append(row)
            return row

    loader = Loader(Watched(30), batch_size=10, shares=lambda rows: [rows])
    list(loader.epoch(skip=2))
    assert Watched.read == list(range(20, 30))


def test_a_worker_draws_by_the_share_and_not_by_what_it_read_before():
    class Draws(OneByOne):
        def __getitem__(self, row: int) -> torch.Tensor:
            return torch.rand(())

    def drawn(workers: int, skip: int) -> list[list[float]]:
        one = {"batch_size": 5, "shares": lambda rows: [rows], "seed": 3}
        loader = Loader(Draws(20), workers=workers, **one)
        return [batch.shares[0].batch.tolist() for batch in loader.epoch(2, skip=skip)]

    whole = drawn(2, 0)
    assert drawn(2, 1) == whole[1:]
    assert drawn(1, 0) == whole
    assert len({tuple(batch) for batch in whole}) == 4


def test_batches_are_counted_where_a_length_is_known():
    one = {"batch_size": 10, "shares": lambda rows: [rows]}
    assert [Loader(KINDS[kind](21), **one).batches for kind in KINDS] == [3, 3, None]


def test_a_subset_of_tensors_is_tensors_and_a_data_set_of_ones_own_is_not():
    class Own(TensorDataset):
        def __getitem__(self, row: int) -> int:
            return -1

    rows = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    picked = tensors_of(Subset(Subset(rows, [1, 3, 5, 7]), [3, 0]))
    assert [column.tolist() for column in picked] == [[7, 1], [14, 2]]
    assert tensors_of(Own(torch.arange(10))) is None
    loader = Loader(Own(torch.arange(4)), batch_size=4, shares=lambda rows: [rows])
    assert [batch.shares[0].batch.tolist() for batch in loader.epoch()] == [[-1] * 4]


def test_a_collate_of_ones_own_is_called_with_rows():
    loader = Loader(
        TensorDataset(torch.arange(4)), batch_size=3, shares=lambda rows: [rows], collate=len
    )
    assert [batch.shares[0].batch for batch in loader.epoch()] == [3, 1]


Pair = namedtuple("Pair", "x y")


def test_move_keeps_the_nest_and_turns_only_floats():
    nest = {"a": [torch.ones(1), torch.ones(1).long()], "b": Pair(torch.ones(1), "text"), "c": (1,)}
    moved = move(nest, torch.device("cpu"), torch.float64)
    assert [t.dtype for t in moved["a"]] == [torch.float64, torch.int64]
    assert isinstance(moved["b"], Pair) and moved["b"].x.dtype == torch.float64
    assert (moved["b"].y, moved["c"]) == ("text", (1,))
    assert nest["a"][0].dtype == torch.float32
