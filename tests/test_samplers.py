"""A user's own order is kept, split exactly, and the same in every process; streams likewise."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import hand_written
import numpy
import pytest
import torch
from recorded import Recorder, logs_apart, once, weights, weights_apart
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from dpframe import DataModule, Strategy, Task, Trainer, TrainerSettings, UserError, seeding
from dpframe.data import Loader, split
from dpframe.strategies.cpu import CPU
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP

ROWS = 17
BATCH_SIZE = 5
SEED = 11
EPOCHS = 2


class Drawn(Sampler):
    """An order from whatever draws it."""

    def __init__(self, order: Callable[[], list[int]]) -> None:
        self.order = order

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(self.order())


class Told(Drawn):
    """An order that depends on the epoch it was told."""

    def __init__(self) -> None:
        super().__init__(lambda: [(row + self.epoch) % ROWS for row in range(ROWS)])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def own_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


ALL = range(ROWS)
VARYING = [[3], [0, 1, 2, 4, 5, 6], [7, 8], [], [9, 10, 11], [12, 13, 14, 15, 16]]
SAMPLERS: dict[str, Callable[[], Any]] = {
    "backwards": lambda: Drawn(lambda: list(reversed(ALL))),
    "random": lambda: RandomSampler(ALL),
    "random_by_its_own_generator": lambda: RandomSampler(ALL, generator=own_generator(7)),
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


def order_by_hand(name: str) -> list[list[list[int]]]:
    """The batches of each epoch, from the bare sampler."""
    sampler, epochs = SAMPLERS[name](), []
    for epoch in range(EPOCHS):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with seeding.seeded(SEED, epoch):
            drawn = list(sampler)
        if isinstance(drawn[0], int):
            drawn = [
                drawn[start : start + BATCH_SIZE] for start in range(0, len(drawn), BATCH_SIZE)
            ]
        epochs.append([[int(row) % ROWS for row in batch] for batch in drawn if len(batch)])
    return epochs


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_shares_put_together_are_the_order_of_the_sampler(name, replicas):
    per_rank = []
    for rank in range(replicas):
        seeding.seed_everything(100 + rank)  # ranks have random numbers of their own
        dataset = TensorDataset(torch.arange(ROWS))
        cut = partial(one_share, replicas=replicas, rank=rank)
        loader = Loader(
            dataset, batch_size=BATCH_SIZE, shares=cut, sampler=SAMPLERS[name](), seed=SEED
        )
        assert loader.batches == len(order_by_hand(name)[0])
        next(loader.epoch(0))  # a look, as for the graph, moves nothing
        per_rank.append([list(loader.epoch(epoch)) for epoch in range(EPOCHS)])
    for epoch, batches in enumerate(order_by_hand(name)):
        for index, wanted in enumerate(batches):
            here = [ranks[epoch][index] for ranks in per_rank]
            shares = [batch.shares[0] for batch in here]
            found = [share.batch[0].tolist()[: share.rows] for share in shares]
            assert [row for rows in found for row in rows] == wanted
            assert [len(rows) for rows in found] == [len(s) for s in split(wanted, replicas)]
            assert {batch.rows for batch in here} == {len(wanted)}
        assert {len(ranks[epoch]) for ranks in per_rank} == {len(batches)}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_epoch_that_is_gone_on_with_has_the_order_that_it_would_have_had(name):
    """A sampler with a generator of its own has to draw the epochs before it, too."""

    def orders(epochs: list[int]) -> list[list[list[int]]]:
        loader = Loader(
            TensorDataset(torch.arange(ROWS)),
            batch_size=BATCH_SIZE,
            shares=lambda rows: [rows],
            sampler=SAMPLERS[name](),
            seed=SEED,
        )
        assert loader.batches  # the first epoch is drawn for the length
        drawn = [list(loader.epoch(epoch)) for epoch in epochs]
        return [[batch.shares[0].batch[0].tolist() for batch in epoch] for epoch in drawn]

    whole = orders([0, 1, 2, 3])
    for first in (1, 2, 3):
        assert orders([*range(first, 4)]) == whole[first:]


def one_share(rows: Any, *, replicas: int, rank: int) -> list[Any]:
    return [split(rows, replicas)[rank]]


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (lambda: DistributedSampler(ALL, 2, 0), "DistributedSampler, which pads"),
        (lambda: BatchSampler(DistributedSampler(ALL, 2, 0), 3, False), "DistributedSampler"),
        (lambda: count(), "without __len__: an endless order"),
        (lambda: BatchSampler(count(), 3, False), "without __len__: an endless order"),
        (lambda: Drawn(count), "goes on after its __len__ of 17"),
        (lambda: [[1, 2], [17]], "row 17 of a data set of 17 rows"),
        (lambda: [[1, 2], [-18]], "row -18 of a data set of 17 rows"),
    ],
)
def test_a_sampler_that_cannot_be_split_is_refused_with_the_reason(sampler, reason):
    with pytest.raises(UserError, match=reason):
        loader = Loader(
            TensorDataset(torch.arange(ROWS)), batch_size=5, shares=list, sampler=sampler()
        )
        list(loader.epoch(0))


def test_a_sampler_beside_a_stream_is_refused():
    with pytest.raises(UserError, match="has its own order"):
        Loader(Plain(), batch_size=5, shares=list, sampler=[[0]])


# Streams


class Plain(IterableDataset):
    def rows(self) -> list[int]:
        return list(ALL)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for row in self.rows():
            yield row_of(row)


class Shuffled(Plain):
    """Draws its order, and more while it goes."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = random.sample(ALL, ROWS)
        while rows:
            yield row_of(rows.pop(int(torch.randint(len(rows), ()))))


class ShardsItself(Plain):
    """As torch's documentation tells streams to."""

    def rows(self) -> list[int]:
        worker = get_worker_info()
        return list(ALL) if worker is None else list(ALL)[worker.id :: worker.num_workers]


class Turned(Plain):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def rows(self) -> list[int]:
        return [(row + self.epoch) % ROWS for row in ALL]


def row_of(row: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([row / ROWS, 1.0], dtype=torch.float64), torch.tensor(
        row, dtype=torch.float64
    )


STREAMS = {"plain": Plain, "shuffled": Shuffled, "shards_itself": ShardsItself, "turned": Turned}

# Training on them


class Ids(Task):
    """Which rows a step saw is in its metric `code`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1))

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        return {name: value.mean() for name, value in per_row(self, *batch).items()}

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def per_row(task: Ids, x: Tensor, row: Tensor) -> dict[str, Tensor]:
    error = task.net(x)[:, 0] - row / 10
    return {"loss": error.square(), "code": 2.0 ** -row.double()}


class Data(DataModule):
    def __init__(self, source: str, workers: int = 0) -> None:
        super().__init__(BATCH_SIZE, workers)
        self.source = source

    def train_dataset(self) -> Dataset:
        if self.source in STREAMS:
            return STREAMS[self.source]()
        return TensorDataset(
            *(torch.stack(column) for column in zip(*map(row_of, ALL), strict=True))
        )

    def val_dataset(self) -> Dataset | None:
        return self.train_dataset() if self.source in STREAMS else None

    def train_sampler(self, dataset: Dataset) -> Any:
        if self.source == "by_the_system":  # every process draws another order
            return Drawn(lambda: random.SystemRandom().sample(ALL, ROWS))
        return SAMPLERS[self.source]() if self.source in SAMPLERS else None


RUNS = [*((name, 0) for name in [*SAMPLERS, "by_the_system"]), *((name, 0) for name in STREAMS)]
WORKERS = 2  # three replicas with two each would be nine processes


def trained(strategy: Strategy, source: str, workers: int) -> dict[str, Any]:
    torch.manual_seed(SEED)
    recorder = Recorder()
    settings = TrainerSettings(
        max_epochs=EPOCHS,
        precision="64",
        log_every=1,
        accumulate=3 if source in STREAMS else 1,  # 5 5 5 and the tail of 2
    )
    trainer = Trainer(
        Ids(),
        Data(source, workers),
        strategy=strategy,
        settings=settings,
        loggers=[recorder],
        seed=SEED,
    )
    trainer.fit()
    return {"log": recorder.log_, "weights": weights(trainer.task)}


def all_of_them(strategy: Strategy) -> dict[tuple[str, int], dict[str, Any]]:
    runs = [*RUNS, *((name, WORKERS) for name in STREAMS if strategy.replicas < 3)]
    return {run: trained(strategy, *run) for run in runs}


def in_a_rank() -> dict[tuple[str, int], dict[str, Any]]:
    strategy = DDP()
    strategy.setup()
    try:
        return all_of_them(strategy)
    finally:
        strategy.close()


@once
def results(where: str) -> dict[tuple[str, int], dict[str, Any]]:
    name, replicas = where.split("-")
    if name == "ddp":
        return DDP(int(replicas), "cpu").launch(in_a_rank)
    strategy = DataParallel(int(replicas), "cpu") if name == "data_parallel" else CPU()
    strategy.setup()
    return all_of_them(strategy)


WHERE = ["cpu-1", "data_parallel-2", "data_parallel-3", "ddp-2", "ddp-3"]
STREAMED = [
    *((where, 0) for where in WHERE),
    *((where, WORKERS) for where in WHERE if "3" not in where),
]


def by_hand(order: list[list[list[int]]], accumulate: int, *, has_val: bool) -> dict[str, Any]:
    torch.manual_seed(SEED)
    task = Ids().double()
    columns = tuple(torch.stack(column) for column in zip(*map(row_of, ALL), strict=True))
    log = hand_written.fit(
        task,
        per_row,
        task.configure_optimizer(),
        columns,
        columns if has_val else None,
        batches=lambda epoch: [torch.tensor(rows) for rows in order[epoch]],
        epochs=EPOCHS,
        accumulate=accumulate,
        log_every=1,
    )
    return {"log": log, "weights": weights(task)}


def assert_equal(mine: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert logs_apart(mine["log"], wanted["log"]) <= 1e-12
    assert weights_apart(mine["weights"], wanted["weights"]) <= 1e-12


@pytest.mark.parametrize("where", WHERE)
def test_training_in_the_order_of_a_sampler_equals_the_hand_written_loop(where):
    for name in SAMPLERS:
        assert_equal(results(where)[name, 0], by_hand(order_by_hand(name), 1, has_val=False))


@pytest.mark.parametrize("where", WHERE)
def test_an_order_that_each_process_draws_anew_is_the_one_of_the_main_process(where):
    log = results(where)["by_the_system", 0]["log"]
    assert_whole([numbers["train/code"] for _, numbers in log if "train/code" in numbers])


@pytest.mark.parametrize(("where", "workers"), STREAMED)
def test_training_on_a_stream_with_a_tail_equals_the_hand_written_loop(where, workers):
    plain = [[*ALL][start : start + BATCH_SIZE] for start in range(0, ROWS, BATCH_SIZE)]
    turned = [[(row + 1) % ROWS for row in rows] for rows in plain]
    orders = {"plain": [plain, plain], "shards_itself": [plain, plain], "turned": [plain, turned]}
    for name, order in orders.items():
        assert_equal(results(where)[name, workers], by_hand(order, 3, has_val=True))


@pytest.mark.parametrize(("where", "workers"), STREAMED)
def test_a_stream_that_draws_its_order_gives_every_row_once(where, workers):
    mine = results(where)["shuffled", workers]
    ends = [numbers for _, numbers in mine["log"] if "train/code" in numbers]
    assert_whole([numbers[f"{kind}/code"] for numbers in ends for kind in ("train", "val")])
    assert_equal(mine, results("cpu-1")["shuffled", 0])  # and in the same order everywhere
    steps = [numbers["step/code"] for _, numbers in mine["log"] if "step/code" in numbers]
    assert steps[0] != steps[2], "both epochs had the same order"


def assert_whole(codes: list[float]) -> None:
    assert codes and {round(code * ROWS * 2**16) for code in codes} == {2**17 - 1}
