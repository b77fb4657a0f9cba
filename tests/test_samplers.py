"""Training in a user's own order and on streams equals the loop by hand, on every strategy."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import hand_written
import pytest
import torch
from forked import on
from recorded import Recorder, logs_apart, once, weights, weights_apart
from small import fitted, strategy_of
from test_data import ALL, EPOCHS, ROWS, SAMPLERS, SEED, Drawn, order_by_hand
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from dpframe import DataModule, Strategy, Task, Trainer, TrainerSettings
from dpframe.callbacks.averages import SWA

BATCH_SIZE = 5
TRAINED = ["random_by_its_own_generator", "weighted", "told_the_epoch", "lists"]  # of the SAMPLERS

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

    def train_dataset(self) -> Any:
        if self.source in STREAMS:
            return STREAMS[self.source]()
        rows = TensorDataset(
            *(torch.stack(column) for column in zip(*map(row_of, ALL), strict=True))
        )
        name = self.source.removeprefix("ready_")
        return self.source != name and LOADERS[name](rows) or rows

    def val_dataset(self) -> Dataset | None:
        return self.train_dataset() if self.source in STREAMS else None

    def train_sampler(self, dataset: Dataset) -> Any:
        if self.source == "by_the_system":  # every process draws another order
            return Drawn(lambda: random.SystemRandom().sample(ALL, ROWS))
        return SAMPLERS[self.source]() if self.source in SAMPLERS else None


def told_to_begin(worker: int) -> None:
    os.environ["BEGAN"] = "1"


def stacked(rows: list) -> list[Tensor]:
    assert (get_worker_info() is None) or os.environ["BEGAN"]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


LOADERS: dict[str, Callable[[Dataset], DataLoader]] = {  # each in the order of a sampler
    "backwards": lambda rows: DataLoader(rows, sampler=SAMPLERS["backwards"](), batch_size=5),
    "weighted": lambda rows: DataLoader(
        rows,
        sampler=SAMPLERS["weighted"](),
        batch_size=5,
        num_workers=1,
        collate_fn=stacked,
        worker_init_fn=told_to_begin,
        prefetch_factor=3,
    ),
    "told_the_epoch": lambda rows: DataLoader(
        rows, sampler=SAMPLERS["told_the_epoch"](), batch_size=5, collate_fn=stacked
    ),
    "lists": lambda rows: DataLoader(rows, batch_sampler=SAMPLERS["lists"]()),
}


RUNS = [
    *((f"ready_{name}", 3) for name in LOADERS),  # a loader has workers of its own
    *((name, 0) for name in [*TRAINED, "by_the_system"]),
    *((name, workers) for name in STREAMS for workers in (0, 1)),
]


def trained(strategy: Strategy, source: str, workers: int) -> dict[str, Any]:
    recorder = Recorder()
    accumulate = 3 if source in STREAMS else 1  # 5 5 5 and the tail of 2
    settings: dict[str, Any] = {"precision": "64", "log_every": 1, "accumulate": accumulate}
    settings |= {"max_epochs": EPOCHS, "loggers": [recorder], "seed": SEED}
    made = fitted(None, Data(source, workers), make=Ids, strategy=strategy, **settings)
    return {"log": recorder.log_, "weights": weights(made.task)}


def all_of_them(strategy: Strategy) -> dict[tuple[str, int], dict[str, Any]]:
    return {run: trained(strategy, *run) for run in RUNS}


@once
def results(where: str) -> dict[tuple[str, int], dict[str, Any]]:
    return on(strategy_of(where), all_of_them)


WHERE = ["cpu-1", "data_parallel-2", "ddp-3"]


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
    for name in TRAINED:
        assert_equal(results(where)[name, 0], by_hand(order_by_hand(name), 1, has_val=False))


@pytest.mark.parametrize("where", WHERE)
def test_training_on_a_ready_data_loader_equals_the_hand_written_loop(where):
    for name in LOADERS:
        assert_equal(
            results(where)[f"ready_{name}", 3], by_hand(order_by_hand(name), 1, has_val=False)
        )


@pytest.mark.parametrize("where", WHERE)
def test_an_order_that_each_process_draws_for_itself_is_the_one_of_the_main_process(where):
    log = results(where)["by_the_system", 0]["log"]
    assert_whole([numbers["train/code"] for _, numbers in log if "train/code" in numbers])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("where", WHERE)
def test_training_on_a_stream_with_a_tail_equals_the_hand_written_loop(where, workers):
    plain = [[*ALL][start : start + BATCH_SIZE] for start in range(0, ROWS, BATCH_SIZE)]
    turned = [[(row + 1) % ROWS for row in rows] for rows in plain]
    orders = {"plain": [plain, plain], "shards_itself": [plain, plain], "turned": [plain, turned]}
    for name, order in orders.items():
        assert_equal(results(where)[name, workers], by_hand(order, 3, has_val=True))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("where", WHERE)
def test_a_stream_that_draws_its_order_gives_every_row_once(where, workers):
    mine = results(where)["shuffled", workers]
    ends = [numbers for _, numbers in mine["log"] if "train/code" in numbers]
    assert_whole([numbers[f"{kind}/code"] for numbers in ends for kind in ("train", "val")])
    assert_equal(mine, results("cpu-1")["shuffled", 0])  # and in the same order everywhere
    steps = [numbers["step/code"] for _, numbers in mine["log"] if "step/code" in numbers]
    assert steps[0] != steps[2], "both epochs had the same order"


def assert_whole(codes: list[float]) -> None:
    assert codes and {round(code * ROWS * 2**16) for code in codes} == {2**17 - 1}


class Uneven(Ids):
    """Of epochs with another number of batches each, and a schedule by epochs."""

    def configure_optimizer(self) -> Any:
        optimizer = super().configure_optimizer()
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


class UnevenData(Data):
    def __init__(self) -> None:
        super().__init__("uneven")

    def train_sampler(self, dataset: Dataset) -> Any:
        return UnevenBatches()


class UnevenBatches:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[row, row + 1] for row in range(5 - self.epoch)])

    def __len__(self) -> int:
        return 5


def test_max_steps_at_the_end_of_an_epoch_of_fewer_batches_ends_that_epoch():
    """The epochs have 5, 4 and 3 batches: a run of 9 steps has ended two of them."""
    ended = []
    for limit in ({"max_epochs": 2}, {"max_steps": 9, "max_epochs": 3}):
        average = SWA(start_epoch=0)
        settings = TrainerSettings(threads=1, precision="64", **limit)
        trainer = Trainer(Uneven(), UnevenData(), settings=settings, callbacks=[average])
        trainer.fit()
        ended.append((trainer.epoch, trainer.update.learning_rates(), average.count))
    assert ended[0] == ended[1] == (2, {"": 0.0025}, 2)
