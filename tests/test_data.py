"""Batches and their shares: every row once, nothing padded, and orders that seeds decide."""

import random
import tracemalloc
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

import numpy
import pytest
import torch
from small import Stream, is_same, loader_of
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dpframe import DataModule, UserError, seeding
from dpframe.data import Loader, Share, is_tensors, move, permutation, split
from dpframe.data.module import leaves, mapped
from dpframe.data.reading import table_of
from dpframe.devices.accelerator import has_streams

REPLICAS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_batch_is_split_as_torch_chunk_splits(replicas):
    for rows in [*range(1, 34), 100]:
        numbers = torch.arange(rows)
        shares = split(numbers, replicas)
        chunks = numbers.chunk(replicas)
        assert len(shares) == replicas
        assert all(map(torch.equal, shares, chunks))
        assert all(len(share) == 0 for share in shares[len(chunks) :])


class OneByOne(Dataset):
    """Row `i` is the number i."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        self.read.append(row)
        return row


class Together(OneByOne):
    def __getitems__(self, rows: list[int]) -> list[int]:
        return [self[row] for row in rows]


class Noisy(OneByOne):
    def __getitem__(self, row: int) -> Tensor:
        return torch.rand(())


KINDS = {
    "tensors": lambda rows: TensorDataset(torch.arange(rows)),
    "rows": OneByOne,
    "stream": lambda rows: Stream(range(rows)),
}


def shares_of(kind: str, rows: int, replicas: int) -> list[list[Share]]:
    """For each batch, what each replica computes; each is read by a process of its own."""
    loaders = [
        loader_of(KINDS[kind](rows), shares=lambda batch, rank=rank: [split(batch, replicas)[rank]])
        for rank in range(replicas)
    ]
    return [
        [batch.shares[0] for batch in batches]
        for batches in zip(*(loader.epoch() for loader in loaders), strict=True)
    ]


def numbers(share: Share) -> list[int]:
    if share.batch is None:
        return []
    batch = share.batch[0] if isinstance(share.batch, list) else share.batch
    return batch.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_every_row_goes_to_one_replica_and_for_one_without_nothing_is_read(kind, replicas):
    *batches, last = shares_of(kind, 21, replicas)
    seen = [[n for share in shares for n in numbers(share)] for shares in batches]
    assert seen == [list(range(10)), list(range(10, 20))]
    assert [share.rows for share in last] == [1, *[0] * (replicas - 1)]
    assert [numbers(share) for share in last] == [[20], *[[]] * (replicas - 1)]
    assert [share[:3] for share in last[1:]] == [(None, 0, 1)] * (replicas - 1)
    assert {share.total for shares in batches for share in shares} == {10}


@pytest.mark.parametrize("kind", ["tensors", "rows"])
def test_an_epochs_order_is_a_fact_of_seed_and_epoch(kind):
    def order(seed: int, epoch: int) -> list[int]:
        loader = loader_of(KINDS[kind](40), shuffle=True, seed=seed)
        return [n for batch in loader.epoch(epoch) for n in numbers(batch.shares[0])]

    first = order(0, 0)
    assert first == order(0, 0) == permutation(40, seed=0, epoch=0).tolist()
    assert sorted(first) == list(range(40))
    assert len({tuple(order(*pair)) for pair in [(0, 0), (0, 1), (1, 0), (1, 1)]}) == 4


@pytest.mark.parametrize(
    "kind, workers", [("tensors", 0), ("rows", 0), ("rows", 2), ("stream", 0), ("stream", 2)]
)
def test_skip_and_limit_are_numbers_of_batches_in_the_epoch(kind, workers):
    dataset = KINDS[kind](45)
    loader = loader_of(dataset, workers=workers)
    for _ in range(2):  # an epoch that was left early, with rows under way, and the next one
        batches = [numbers(batch.shares[0]) for batch in loader.epoch(skip=1, limit=3)]
        assert batches == [list(range(10, 20)), list(range(20, 30))]
    if (kind, workers) == ("rows", 0):
        assert dataset.read == 2 * list(range(10, 30)), "skipped rows are not read"


def test_a_worker_draws_by_the_share_and_not_by_what_it_read_before():
    def drawn(workers: int, skip: int) -> list[list[float]]:
        loader = loader_of(Noisy(20), 5, workers=workers, seed=3)
        return [batch.shares[0].batch.tolist() for batch in loader.epoch(2, skip=skip)]

    whole = drawn(2, 0)
    assert drawn(2, 1) == whole[1:]
    assert drawn(1, 0) == whole
    assert len({tuple(batch) for batch in whole}) == 4


def test_batches_are_counted_where_a_length_is_known():
    assert [loader_of(KINDS[kind](21)).batches for kind in KINDS] == [3, 3, None]


def test_a_subset_of_tensors_is_tensors_and_a_data_set_of_ones_own_is_not():
    class Own(TensorDataset):
        def __getitem__(self, row: int) -> int:
            return -1

    rows = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    subset = Subset(Subset(rows, [1, 3, 5, 7]), [3, 0, -2])
    table = table_of(subset)
    assert [column.tolist() for column in table.whole()] == [[7, 1, 5], [14, 2, 10]]
    assert len(table) == 3
    assert all(a is b for a, b in zip(table.tensors, rows.tensors, strict=True))  # no copy
    (batch,) = loader_of(subset, 3).epoch()
    assert [column.tolist() for column in batch.shares[0].batch] == [[7, 1, 5], [14, 2, 10]]
    assert not is_tensors(Own(torch.arange(10)))
    batches = loader_of(Own(torch.arange(4)), 4).epoch()
    assert [batch.shares[0].batch.tolist() for batch in batches] == [[-1] * 4]


@pytest.mark.parametrize("rows", [range(100_000), range(99_999, -1, -3), range(5, 3)])
def test_a_subset_of_a_range_makes_no_list_of_its_rows(rows):
    dataset = TensorDataset(torch.arange(100_000))
    tracemalloc.start()
    table = table_of(Subset(dataset, rows))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.whole()[0].tolist() == list(rows)
    assert most < 100_000, "a list has 8 bytes a row, and 28 for its number"


@pytest.mark.parametrize("kind", KINDS)
def test_a_collate_of_ones_own_is_called_with_rows(kind):
    loader = loader_of(KINDS[kind](4), 3, collate=len)
    assert [batch.shares[0].batch for batch in loader.epoch()] == [3, 1]


@pytest.mark.parametrize("dataset", [OneByOne(16), Together(16), Stream(range(16))])
def test_no_dataloader_is_between_where_there_are_no_workers(monkeypatch, dataset):
    def refuse(loader: DataLoader) -> None:
        raise AssertionError("a DataLoader was asked")

    monkeypatch.setattr(DataLoader, "__iter__", refuse)
    assert sum(batch.rows for batch in loader_of(dataset, 8).epoch()) == 16


def test_rows_that_draw_leave_the_random_numbers_of_the_process_as_they_are():
    before = seeding.random_state()
    list(loader_of(Noisy(16), 8).epoch())
    assert is_same(seeding.random_state(), before)


Pair = namedtuple("Pair", "x y")


def test_move_keeps_the_nest_and_turns_only_floats():
    nest = {"a": [torch.ones(1), torch.ones(1).long()], "b": Pair(torch.ones(1), "text"), "c": (1,)}
    moved = move(nest, torch.device("cpu"), torch.float64)
    assert [t.dtype for t in moved["a"]] == [torch.float64, torch.int64]
    assert isinstance(moved["b"], Pair) and moved["b"].x.dtype == torch.float64
    assert (moved["b"].y, moved["c"]) == ("text", (1,))
    assert nest["a"][0].dtype == torch.float32


class Encoding(UserDict):
    """As a tokenizer's BatchEncoding: it moves itself, but casts nothing."""

    def __init__(self, data: dict, offsets: str) -> None:
        super().__init__(data)
        self.offsets = offsets

    def to(self, device: torch.device) -> "Encoding":
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Named(dict):
    """Its items are its attributes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.__dict__ = self


class Marked(dict):
    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass(frozen=True)
class Table:
    x: Tensor
    more: list[Tensor]
    name: str = ""


class Graph:
    """As PyG's Data: what it applies a function to is changed in place."""

    def __init__(self, x: Tensor, edges: Tensor) -> None:
        self.x, self.edges, self.name = x, edges, "a graph"

    def to(self, device: torch.device, non_blocking: bool = False) -> "Graph":
        return self.apply(lambda part: part.to(device) if isinstance(part, Tensor) else part)

    def apply(self, function: Callable[[Any], Any]) -> "Graph":
        for name, value in vars(self).items():
            setattr(self, name, function(value))
        return self


@pytest.mark.parametrize("kind", [OrderedDict, Named, Marked, partial(Encoding, offsets="kept")])
def test_mappings_keep_their_type_and_what_is_in_them_is_cast(kind):
    given = kind({"x": torch.ones(1), "n": torch.ones(1).long(), "in": {"y": [torch.ones(1)]}})
    moved = move(given, torch.device("cpu"), torch.float64)
    assert type(moved) is type(given) and list(moved) == list(given)
    assert [leaf.dtype for leaf in leaves(moved)] == [torch.float64, torch.int64, torch.float64]
    assert {leaf.dtype for leaf in leaves(given)} == {torch.float32, torch.int64}
    if isinstance(moved, Encoding):
        assert moved.offsets == "kept"
    if isinstance(moved, Named | Marked):
        assert moved.x is moved["x"]
    twice = mapped(lambda leaf: 2 * leaf, defaultdict(list, a=[1], b=2))
    assert twice == {"a": [2], "b": 4} and twice["c"] == []
    assert mapped(lambda leaf: 2 * leaf, MappingProxyType({"a": 1})) == {"a": 2}


def test_what_is_in_dataclasses_and_in_objects_that_apply_a_function_is_cast():
    table = Table(torch.ones(1), [torch.ones(1)], "t")
    moved = move(table, torch.device("cpu"), torch.float64)
    assert isinstance(moved, Table) and moved.name == "t" and table.x.dtype == torch.float32
    assert [moved.x.dtype, moved.more[0].dtype] == [torch.float64] * 2
    graph = Graph(torch.ones(1), torch.ones(1).long())
    moved = move([graph], torch.device("cpu"), torch.float64)[0]
    assert (moved.x.dtype, moved.edges.dtype, moved.name) == (torch.float64, torch.int64, "a graph")
    assert graph.x.dtype == torch.float32  # it may be a row of the data set


class Noted(torch.Tensor):
    def to(self, *where, **how):  # type: ignore[override]
        return how["non_blocking"]


@pytest.mark.parametrize("kind, expected", [("cuda", True), ("xpu", True), ("mps", False)])
def test_a_copy_is_waited_for_on_mps_which_may_read_memory_that_is_freed(kind, expected):
    assert move(torch.ones(1).as_subclass(Noted), torch.device(kind, 0)) is expected


@pytest.mark.parametrize("kind, expected", [("cuda", True), ("xpu", True), ("mps", False)])
def test_memory_is_pinned_for_devices_that_copy_beside_computation(kind, expected):
    assert has_streams(torch.device(kind, 0)) is expected


# A user's own order

ROWS = 17
SEED = 11
EPOCHS = 2
ALL = range(ROWS)


class Drawn(Sampler):
    """An order from whatever draws it."""

    def __init__(self, order: Callable[[], list[int]]) -> None:
        self.order = order

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(self.order())


class Told(Drawn):
    """An order that depends on the epoch that it is told."""

    def __init__(self) -> None:
        super().__init__(lambda: [(row + self.epoch) % ROWS for row in range(ROWS)])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


VARYING = [[3], [0, 1, 2, 4, 5, 6], [7, 8], [], [9, 10, 11], [12, 13, 14, 15, 16]]
SAMPLERS: dict[str, Callable[[], Any]] = {
    "backwards": lambda: Drawn(lambda: list(reversed(ALL))),
    "random": lambda: RandomSampler(ALL),
    "random_by_its_own_generator": lambda: RandomSampler(
        ALL, generator=torch.Generator().manual_seed(7)
    ),
    "random_with_replacement": lambda: RandomSampler(ALL, replacement=True, num_samples=23),
    "weighted": lambda: WeightedRandomSampler([1.0 + row for row in ALL], 12),
    "subset": lambda: SubsetRandomSampler([2, 3, 5, 7, 11, 13]),
    "by_numpy": lambda: Drawn(lambda: numpy.random.permutation(ROWS).tolist()),
    "by_python": lambda: Drawn(lambda: random.sample(ALL, ROWS)),
    "told_the_epoch": Told,
    "batches": lambda: BatchSampler(SequentialSampler(ALL), 3, drop_last=False),
    "batches_less_the_tail": lambda: BatchSampler(RandomSampler(ALL), 4, drop_last=True),
    "lists": lambda: VARYING,
    "tensors": lambda: [torch.tensor(rows) for rows in VARYING if rows],
    "negative_rows": lambda: Drawn(lambda: [-1 - row for row in ALL]),
}


def order_by_hand(name: str, batch_size: int = 5) -> list[list[list[int]]]:
    """The batches of each epoch, from the bare sampler."""
    sampler, epochs = SAMPLERS[name](), []
    for epoch in range(EPOCHS):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with seeding.seeded(SEED, epoch):
            drawn = list(sampler)
        if isinstance(drawn[0], int):
            starts = range(0, len(drawn), batch_size)
            drawn = [drawn[start : start + batch_size] for start in starts]
        epochs.append([[int(row) % ROWS for row in batch] for batch in drawn if len(batch)])
    return epochs


@pytest.mark.parametrize("name", ["batches", "lists"])
def test_batches_of_a_samplers_own_can_not_lose_their_last_one(name):
    with pytest.raises(
        UserError, match=r"^data.drop_last=true, and train_sampler returned a .*ch m"
    ):
        list(sampled(name, drop_last=True).epoch(0))


def test_a_user_may_say_that_a_data_set_is_a_ready_loader():
    for method in ("train_dataset", "val_dataset", "test_dataset", "predict_dataset"):
        assert DataLoader in get_args(get_type_hints(getattr(DataModule, method))["return"])


def sampled(name: str, **given: Any) -> Loader:
    rows = TensorDataset(torch.arange(ROWS))
    return loader_of(rows, 5, sampler=SAMPLERS[name](), seed=SEED, **given)


@pytest.mark.parametrize("name", SAMPLERS)
def test_shares_put_together_are_the_order_of_the_sampler(name):
    for replicas in (1, 2, 3, 4):
        per_rank = []
        for rank in range(replicas):
            seeding.seed_everything(100 + rank)  # ranks have random numbers of their own
            loader = sampled(name, shares=lambda rows, r=rank, n=replicas: [split(rows, n)[r]])
            assert loader.batches == len(order_by_hand(name)[0])
            next(loader.epoch(0))  # a look moves nothing
            per_rank.append([list(loader.epoch(epoch)) for epoch in range(EPOCHS)])
        for epoch, batches in enumerate(order_by_hand(name)):
            for index, rows in enumerate(batches):
                here = [ranks[epoch][index] for ranks in per_rank]
                shares = [numbers(batch.shares[0]) for batch in here]
                assert [row for share in shares for row in share] == rows
                assert [len(share) for share in shares] == [len(s) for s in split(rows, replicas)]
                assert {batch.rows for batch in here} == {len(rows)}
            assert {len(ranks[epoch]) for ranks in per_rank} == {len(batches)}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_epoch_that_a_run_resumes_in_has_the_order_that_it_would_have_had(name):
    """A sampler with a generator of its own has to draw the epochs before it, too."""

    def orders(epochs: list[int]) -> list[list[list[int]]]:
        loader = sampled(name)
        assert loader.batches  # the first epoch is drawn for the length
        drawn = [list(loader.epoch(epoch)) for epoch in epochs]
        return [[numbers(batch.shares[0]) for batch in epoch] for epoch in drawn]

    whole = orders([0, 1, 2, 3])
    for first in (1, 2, 3):
        assert orders([*range(first, 4)]) == whole[first:]


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (lambda: DistributedSampler(ALL, 2, 0), "DistributedSampler, which pads"),
        (lambda: BatchSampler(DistributedSampler(ALL, 2, 0), 3, False), "DistributedSampler"),
        (lambda: count(), "without __len__: an endless order"),
        (lambda: BatchSampler(count(), 3, False), "without __len__: an endless order"),
        (list, "train_sampler returned a list that draws no rows"),
        (lambda: [[1, 2], [17]], "row 17 of a data set of 17 rows"),
        (lambda: [[1, 2], [-18]], "row -18 of a data set of 17 rows"),
    ],
)
def test_a_sampler_that_cannot_be_split_is_refused_with_the_reason(sampler, reason):
    with pytest.raises(UserError, match=reason):
        loader = loader_of(TensorDataset(torch.arange(ROWS)), sampler=sampler())
        list(loader.epoch(0))


def test_a_sampler_beside_a_stream_is_refused():
    with pytest.raises(UserError, match="has its own order"):
        loader_of(Stream(range(5)), sampler=[[0]])


# Errors name their rows


class Bad(Dataset):
    """Twelve rows; what the tenth is decides the fault."""

    ROWS = {
        "shape": {"x": torch.ones(3), "y": (1, 1.0)},
        "keys": {"x": torch.ones(4)},
        "parts": {"x": torch.ones(4), "y": (1,)},
        "kinds": {"x": torch.ones(4), "y": ("a", 1.0)},
        "nothing": None,
    }

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> Any:
        if row != 9:
            return {"x": torch.ones(4), "y": (row, 1.0)}
        return self.ROWS[self.fault] if self.fault in self.ROWS else getattr(self, self.fault)()

    def odd(self) -> Any:
        raise LookupError("it is broken")

    def refused(self) -> Any:
        raise UserError("row 9 has no label; fix labels.csv")


class BadStream(IterableDataset):
    def __init__(self, rows: Dataset) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[row] for row in range(12))


READ = pytest.mark.parametrize(
    "dataset, workers", [(each, n) for each in (Bad, lambda f: BadStream(Bad(f))) for n in (0, 1)]
)
STACKED = "rows 8 and 9 of {0} can't be stacked: "
LINES = {
    "shape": f"{STACKED}shapes (4,) and (3,); make all rows alike, or combine them in your "
    "DataModule's collate",
    "keys": f"{STACKED}KeyError: 'y'; make all",
    "parts": f"{STACKED}RuntimeError: each element in list of batch should be of equal size",
    "kinds": f"{STACKED}TypeError: ",
    "nothing": f"{STACKED}TypeError: ",
    "refused": "row 9 has no label; fix labels.csv",
}


@READ
def test_rows_that_do_not_fit_together_are_told_with_their_numbers(dataset, workers):
    for fault, line in LINES.items():
        rows = dataset(fault)
        with pytest.raises(UserError) as caught:
            list(loader_of(rows, 4, workers=workers).epoch())
        assert str(caught.value).startswith(line.format(type(rows).__name__)), fault


def test_a_row_that_torch_can_never_stack_is_one_line():
    class Own:
        pass

    with pytest.raises(UserError) as caught:
        list(loader_of(Subset([{"x": [1, Own()]}] * 4, [0, 2])).epoch())
    line = str(caught.value)
    assert line.startswith("row 0 of Subset of list can't be stacked: TypeError: default_collate: ")
    assert "Own" in line and "\n" not in line


@READ
def test_what_a_row_raises_keeps_its_traceback_and_has_its_number(dataset, workers):
    rows = dataset("odd")
    with pytest.raises(LookupError, match="it is broken") as caught:
        list(loader_of(rows, 4, workers=workers).epoch())
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert told.rstrip().endswith(f"while reading row 9 of {type(rows).__name__}")
    if workers:
        assert 'in odd\n    raise LookupError("it is broken")' in told
    else:
        assert caught.traceback[-1].name == "odd"


def test_rows_read_together_and_a_collate_of_ones_own_are_told_by_all_their_numbers():
    class Raises(Bad):
        def __getitems__(self, rows: list[int]) -> Any:
            raise LookupError(rows)

    def collate(rows: list) -> Any:
        raise LookupError(len(rows))

    for dataset, given, note in (
        (Raises(""), {}, "while reading rows 0 1 2 3 of Raises"),
        (Bad(""), {"collate": collate}, "while collating rows 0 1 2 3 of Bad"),
    ):
        with pytest.raises(LookupError) as caught:
            list(loader_of(dataset, 4, **given).epoch())
        assert caught.value.__notes__ == [note]
