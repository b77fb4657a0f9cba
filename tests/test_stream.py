"""Streams that are divided over ranks and workers, and streams that go on where they were."""

import pickle
import random
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import hand_written
import pytest
import small
import torch
from forked import on
from recorded import Recorder, logs_apart, once, weights, weights_apart
from small import Given, Hooks, loader_of, strategy_of
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from dpframe import (
    DataModule,
    ShardedStream,
    Strategy,
    Task,
    Trainer,
    UserError,
    seeding,
)
from dpframe.data import split
from dpframe.data.reading import Rows
from dpframe.data.stream import Division, Reader
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU

SIZES = [7, 1, 0, 12, 3, 5, 9]  # rows of each shard
ROWS = sum(SIZES)
BATCH_SIZE = 5
EPOCHS = 2
SEED = 3
BITS = 2**40


def rows_of(shard: int) -> range:
    return range(sum(SIZES[:shard]), sum(SIZES[: shard + 1]))


def row_of(row: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([row / ROWS, 1.0], dtype=torch.float64), torch.tensor(float(row))


class Shards(ShardedStream):
    """In an order of each epoch; every opening of a shard is written down."""

    epoch = 0

    def __init__(self, file: str = "") -> None:
        self.file = file

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shards(self) -> list[int]:
        return random.sample(range(len(SIZES)), len(SIZES)) if self.epoch else [*range(len(SIZES))]

    def read(self, shard: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self.file:
            with Path(self.file).open("a") as file:
                file.write(f"{shard}\n")
        return map(row_of, rows_of(shard))


class Noisy(Shards):
    """Its rows draw random numbers."""

    def read(self, shard: int) -> Iterator[tuple[Tensor, Tensor]]:
        return ((x + torch.rand(2).double(), y) for x, y in super().read(shard))


class Counts(IterableDataset):
    """Keeps its place by itself, and begins anew after its end."""

    at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < ROWS:
            self.at += 1
            yield row_of(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Forgets(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return map(row_of, range(ROWS))


class Line(Task):
    """Which rows a step saw is in its metric `code`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1))

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        return {name: value.mean() for name, value in per_row(self, *batch).items()}

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return batch[1]

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def per_row(task: Task, x: Tensor, row: Tensor) -> dict[str, Tensor]:
    error = task.net(x)[:, 0] - row.double() / 10
    return {"loss": error.square(), "code": 2.0 ** -row.double()}


def given(stream: Any, workers: int = 0, divided: bool = True) -> DataModule:
    return Given(stream, stream, BATCH_SIZE, workers, divide_streams=divided)


def trainer(strategy: Strategy, data: DataModule, callbacks: Any = (), **settings: Any) -> Trainer:
    settings |= {"max_epochs": EPOCHS, "precision": "64", "log_every": 1, "seed": SEED}
    settings |= {"share_check": "off", "data_timeout_seconds": 100}  # a check opens shards, too
    parts = {"strategy": strategy, "callbacks": callbacks, "loggers": [Recorder()]}
    return small.trainer(None, data, make=Line, **parts, **settings)


def fitted(made: Trainer, state: dict[str, Any] | None = None) -> dict[str, Any]:
    log = made.recorder.loggers[0].log_ if made.recorder.loggers else []
    made.fit(state)
    return {"log": log, "weights": weights(made.task)}


# Divided


def all_divided(strategy: Strategy, folder: str) -> dict[Any, Any]:
    runs = {}
    for workers, accumulate in ((0, 1), (0, 3), (2, 1)):
        file = f"{folder}/{strategy.name}-{strategy.replicas}-{workers}-{accumulate}"
        made = trainer(strategy, given(Shards(file), workers), accumulate=accumulate)
        runs[workers, accumulate] = fitted(made), made.feed.train.how
    predictions = trainer(strategy, given(Shards())).predict()
    runs["predicted"] = predictions and predictions.joined().tolist()
    return runs


@once
def divided(where: str, folder: str) -> dict[Any, Any]:
    return on(strategy_of(where), all_divided, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("read"))


def by_hand(ranks: int, accumulate: int) -> dict[str, Any]:
    """Each rank reads every n-th shard, and its own rows of a batch until it has none left."""
    torch.manual_seed(SEED)
    task = Line().double()
    x, y = (torch.stack(column) for column in zip(*map(row_of, range(ROWS)), strict=True))
    orders = [[*range(len(SIZES))]] * 2
    with seeding.seeded(SEED, 1):
        orders[1] = random.sample(range(len(SIZES)), len(SIZES))

    def batches(epoch: int) -> list[Tensor]:
        own = [[row for s in orders[epoch][r::ranks] for row in rows_of(s)] for r in range(ranks)]
        sizes, made = [len(share) for share in split(range(BATCH_SIZE), ranks)], []
        while any(own):
            made.append([row for n, rows in zip(sizes, own, strict=True) for row in rows[:n]])
            own = [rows[n:] for n, rows in zip(sizes, own, strict=True)]
        return [torch.tensor(rows) for rows in made]

    columns = x, y
    log = hand_written.fit(
        task,
        per_row,
        task.configure_optimizer(),
        columns,
        columns,
        batches=batches,
        epochs=EPOCHS,
        accumulate=accumulate,
        log_every=1,
    )
    return {"log": log, "weights": weights(task)}


WHERE = ["cpu-1", "data_parallel-2", "ddp-3"]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("where", WHERE)
def test_training_on_a_divided_stream_equals_the_loop_by_hand_over_its_batches(
    where, accumulate, folder
):
    mine, _ = divided(where, folder)[0, accumulate]
    wanted = by_hand(int(where[-1]) if "ddp" in where else 1, accumulate)
    assert logs_apart(mine["log"], wanted["log"]) <= 1e-12
    assert weights_apart(mine["weights"], wanted["weights"]) <= 1e-12


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", WHERE)
def test_every_row_of_a_divided_stream_counts_once_and_every_shard_is_opened_once(
    where, workers, folder
):
    run, how = divided(where, folder)[workers, 1]
    ends = [numbers for _, numbers in run["log"] if "train/code" in numbers]
    codes = {round(end[f"{kind}/code"] * ROWS * BITS) for end in ends for kind in ("train", "val")}
    assert len(ends) == EPOCHS and codes == {sum(BITS >> row for row in range(ROWS))}
    name = {"cpu-1": "CPU-1", "data_parallel-2": "DataParallel-2"}.get(where, where.upper())
    opened = (Path(folder) / f"{name}-{workers}-1").read_text().split()
    assert Counter(opened) == {str(shard): 2 * EPOCHS for shard in range(len(SIZES))}
    ranks = f"{where[-1]} ranks" if "ddp" in where else "1 rank"
    of_workers = " x 2 workers" if workers else ""
    assert f"a stream of 7 shards, divided over {ranks}{of_workers}: which" in how


@pytest.mark.parametrize("where", ["cpu-1", "ddp-3"])
def test_rows_to_predict_keep_their_order(where, folder):
    assert divided(where, folder)["predicted"] == list(range(ROWS))


def gathering(strategy: Strategy) -> str:
    made = trainer(strategy, given(Shards()))
    made.task.training_step = lambda batch: {"loss": made.task.all_gather(batch[0]).mean()}
    with pytest.raises(UserError) as caught:
        made.fit()
    return str(caught.value)


def test_rows_of_other_ranks_are_not_gathered_of_a_divided_stream():
    assert "on a stream that they divide, whose last batches" in on(DDP(2, "cpu"), gathering)


# Resumed

STREAMS: dict[str, Any] = {"shards": Noisy, "counts": Counts, "forgets": Forgets}
READ = [  # stream, workers, divided
    ("shards", 0, True),
    ("shards", 2, True),
    ("shards", 1, False),
    ("counts", 0, False),
    ("counts", 2, False),
    ("forgets", 1, False),
]


def taking(states: dict[int, Any]) -> Hooks:
    return Hooks(on_step_end=lambda t: states.update({t.global_step: deepcopy(t.state_dict())}))


def all_resumed(strategy: Strategy, folder: str) -> dict[Any, Any]:
    """For each way to read, the whole run and those that were resumed after its steps: two ranks
    are slow, and try half of the steps that one process tries."""
    runs = {}
    for name, workers, is_divided in READ:

        def data(stream=STREAMS[name], workers=workers, is_divided=is_divided) -> DataModule:
            return given(stream(), workers, is_divided)

        states: dict[int, Any] = {}
        runs[name, workers, "whole"] = fitted(trainer(strategy, data(), [taking(states)]))
        steps = (1, 4, len(states) // 2, len(states) - 1)
        for step in steps if strategy.world_size == 1 else steps[1::2]:
            state = deepcopy(strategy.collectives.broadcast(states[step]))
            runs[name, workers, step] = fitted(trainer(strategy, data()), state)
        if strategy.is_main:
            torch.save(states[4], f"{folder}/{name}-{workers}-{strategy.replicas}")
    return runs


@once
def resumed(where: str, folder: str) -> dict[Any, Any]:
    strategy = CPU() if where == "cpu-1" else DDP(int(where[-1]), "cpu")
    return on(strategy, all_resumed, folder)


@pytest.mark.parametrize("name, workers, is_divided", READ)
@pytest.mark.parametrize("where", ["cpu-1", "ddp-2"])
def test_a_stream_is_resumed_to_the_bit(where, name, workers, is_divided, folder):
    runs = {
        key[2]: run for key, run in resumed(where, folder).items() if key[:2] == (name, workers)
    }
    whole = runs.pop("whole")
    assert len(runs) == (4 if where == "cpu-1" else 2)
    for step, run in runs.items():
        assert weights_apart(run["weights"], whole["weights"]) == 0, step
        rest = [(at, numbers) for at, numbers in whole["log"] if at > step]
        assert rest and logs_apart([entry for entry in run["log"] if entry[0] > step], rest) == 0


def test_only_the_shard_where_a_run_was_is_opened_again(tmp_path):
    states: dict[int, Any] = {}
    fitted(trainer(CPU(), given(Shards()), [taking(states)]))
    made = trainer(CPU(), given(Shards(str(tmp_path / "read"))), max_steps=5)
    made.fit(states[4])
    validated = [str(shard) for shard in range(7)]
    assert (tmp_path / "read").read_text().split() == ["3", "4", "5", *validated]


@pytest.mark.parametrize("name, workers", [("counts", 0), ("counts", 2), ("shards", 1)])
def test_a_stream_that_is_not_divided_is_resumed_on_another_number_of_ranks(name, workers, folder):
    whole = resumed("ddp-2", folder)[name, workers, "whole"]
    state = torch.load(f"{folder}/{name}-{workers}-2")
    again = fitted(trainer(CPU(), given(STREAMS[name](), workers, False)), state)
    assert weights_apart(again["weights"], whole["weights"]) <= 1e-12


def test_a_stream_that_is_divided_otherwise_is_not_resumed(folder):
    resumed("ddp-2", folder)
    state = torch.load(f"{folder}/shards-0-2")
    with pytest.raises(UserError) as caught:
        trainer(CPU(), given(Noisy())).prepare(state)
    line = str(caught.value)
    assert "the stream=a stream of 7 shards, divided over 2 ranks: which rows meet" in line
    made = trainer(CPU(), given(Noisy()))
    made.fit(state, resume_anyway=True)
    assert made.epoch == EPOCHS


def test_a_place_that_nobody_saved_is_refused(folder):
    resumed("cpu-1", folder)
    for place in ({"workers": [{"rows": -1, "is_over": False, "stream": None}], "turn": 0}, 3):
        state = torch.load(f"{folder}/counts-0-1") | {"stream": [place]}
        with pytest.raises(UserError, match="has what this run would not have written"):
            trainer(CPU(), given(Counts(), divided=False)).prepare(state)


@pytest.mark.parametrize(
    "stream, ranks, line",
    [
        (
            Forgets(),
            2,
            "Forgets has no num_shards and shard(num_shards, index); make it a ",
        ),
        (Shards(), 8, "Shards has 7 shards for 8 ranks; make more shards, or leave divide_streams"),
    ],
)
def test_a_stream_that_can_not_be_divided_is_refused_in_one_line(stream, ranks, line):
    with pytest.raises(UserError) as caught:
        Division(stream, ranks, 0)
    assert str(caught.value).startswith(f"divide_streams=True but {line}")


def test_only_as_many_workers_read_as_there_are_shards_and_one_of_a_stream_that_ignores_them():
    class Ignores(Forgets):
        num_shards = 12

        def shard(self, num_shards: int, index: int) -> "Ignores":
            return self

    assert [Division(Shards(), 2, workers).workers for workers in (0, 2, 9)] == [0, 2, 3]
    assert Division(Ignores(), 2, 4).workers == 1


@pytest.mark.parametrize("is_divided", [False, True])
def test_a_worker_that_is_not_forked_reads_the_shares_of_a_strategy_that_can_not_be_sent(
    is_divided,
):
    """As those of ranks on GPUs are, whose strategy holds their process group."""
    rows = Rows(Shards(), torch.utils.data.default_collate)
    reader = Reader(rows, 8, lambda rows: split(rows, 3)[1:], is_divided=is_divided, rank=1)
    reader.begin(SEED, 0, reader.place(0, 1)["workers"])
    sent = pickle.loads(pickle.dumps(reader))
    batches = list(reader.batches())
    torch.testing.assert_close(list(sent.batches()), batches, rtol=0, atol=0)
    assert sum(n for shares, _ in batches for _, n in shares) == (ROWS if is_divided else 23)


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[float]:
        return (row + random.random() for row in range(24))


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_collate_of_a_stream_draws_the_same_in_a_worker_and_where_it_is_resumed(replicas):
    def read(**at: Any) -> list[Any]:
        torch.rand(1)  # by others
        shares = partial(split, replicas=replicas)
        given = {"shares": shares, "collate": noisy, "workers": at.pop("workers", 0)}
        loader = loader_of(Numbers(), 8, seed=SEED, **given)
        return [[share.batch for share in batch.shares] for batch in loader.epoch(1, **at)]

    whole = read()
    assert read(workers=1) == read() == whole and read(skip=2) == whole[2:]
    added = [number for shares in whole for _, number in shares]
    assert len(set(added)) == len(added) == 3 * replicas


def noisy(rows: list) -> tuple[list, float]:
    return rows, float(torch.rand(()))
