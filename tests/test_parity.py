"""Change the strategy, not the maths: every strategy equals the loop written by hand."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import hand_written
import pytest
import torch
from forked import on
from recorded import Recorder, logs_apart, once, weights, weights_apart
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset, TensorDataset

from dpframe import DataModule, LRSchedule, Strategy, Task, Trainer, TrainerSettings
from dpframe.data import permutation
from dpframe.recipes.boston import Boston, BostonData
from dpframe.recipes.lenet import LeNet, LeNetData
from dpframe.schedules import WarmupCosine
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.processes import Processes
from dpframe.strategies.single import CPU

SEED = 3
TOLERANCE = {"64": 1e-12, "32": 1e-5}
FLOAT32_STEPS = 20

# Tasks and data


class Pixels(Task):
    """A mean over weights, not rows; with a parameter that is a bare number."""

    def __init__(self, optimizer: Any, scheduler: Any = None, kind: type = Tensor) -> None:
        super().__init__(perceptron(4), optimizer, scheduler)
        self.shift = nn.Parameter(torch.tensor(0.25))
        self.kind = kind

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y, weight = batch
        error = self.net(x)[:, 0] + self.shift - y
        total = weight.sum()
        return {
            "loss": (error.square() * weight).sum() / total,
            "mae": (error.abs() * weight).sum() / total,
            "weight": total if self.kind is Tensor else self.kind(total),
        }


class Table(DataModule):
    def __init__(self, rows: int, batch_size: int, *, one_by_one: bool = False) -> None:
        super().__init__(batch_size)
        draw = partial(torch.rand, generator=torch.Generator().manual_seed(1))
        weight = torch.arange(1.0, rows + 1) % 5 + 1
        self.columns = (draw(rows, 4), 3 * draw(rows), weight)
        self.wrap = OneByOne if one_by_one else lambda *columns: TensorDataset(*columns)

    def train_dataset(self) -> Dataset:
        return self.wrap(*self.columns)

    def val_dataset(self) -> Dataset:
        return self.wrap(*(column[:7] for column in self.columns))


class OneByOne(Dataset):
    """Rows that only a DataLoader can read."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        return tuple(column[row] for column in self.columns)


def perceptron(features: int) -> nn.Sequential:
    layers = [nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)]
    return nn.Sequential(*layers)


# What was measured, a row at a time


def boston_rows(task: Boston, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    error = (task.net(x) - y)[:, 0]
    return {"loss": error.square(), "mae": error.abs()}


def boston_summary(means: dict[str, float]) -> dict[str, float]:
    return {**means, "rmse": math.sqrt(means["loss"])}


def pixel_rows(task: Pixels, x: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
    error = task.net(x)[:, 0] + task.shift - y
    return {"loss": error.square(), "mae": error.abs(), "weight": weight}


def lenet_rows(task: LeNet, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    logits = task.net(images)
    picked = logits.log_softmax(dim=1).gather(1, labels[:, None])[:, 0]
    return {"loss": -picked, "accuracy": (logits.argmax(dim=1) == labels).double()}


# The cases


@dataclass
class Case:
    task: Callable[..., Task]
    data: Callable[[], DataModule]
    per_row: Callable[..., dict[str, Tensor]]
    optimizer: Callable[..., torch.optim.Optimizer]
    scheduler: Callable[..., Any] | None = None
    summarize: Callable[[dict[str, float]], dict[str, float]] = dict
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: LRSchedule | None = None


def cosine(total: int, step: int) -> float:
    """What WarmupCosine(warmup=3, final=0.1) is, by hand."""
    return min(
        (step + 1) / 4, 0.1 + 0.45 * (1 + math.cos(math.pi * max(0, step - 3) / (total - 3)))
    )


boston = partial(
    Case,
    lambda o, s: Boston(perceptron(13), o, s),
    BostonData,
    boston_rows,
    summarize=boston_summary,
)
pixels = partial(Case, Pixels, partial(Table, 40, 9), pixel_rows)
CASES = {
    "boston": boston(partial(Adam, lr=0.01), settings={"max_epochs": 5}),
    "accumulation_with_a_tail": boston(
        partial(Adam, lr=0.01),
        settings={"max_epochs": 3, "accumulate": 3, "log_every": 2},
    ),
    "decoupled_weight_decay": boston(
        partial(Adam, lr=0.01, weight_decay=0.3, decoupled_weight_decay=True),
        settings={"max_epochs": 4},
    ),
    "clip_norm": boston(
        partial(SGD, lr=0.01, momentum=0.9),
        settings={"max_epochs": 4, "clip_norm": 2.0, "accumulate": 2, "log_every": 3},
    ),
    "clip_both": boston(
        partial(Adam, lr=0.01), settings={"max_epochs": 3, "clip_norm": 3.0, "clip_value": 0.5}
    ),
    "one_cycle": boston(
        partial(SGD, lr=1e-4),
        partial(OneCycleLR, max_lr=2e-4),
        settings={"max_epochs": 3, "scheduler_every": "step", "log_every": 1},
    ),
    "warmup_cosine": boston(
        partial(SGD, lr=1e-3, momentum=0.9),
        settings={"max_epochs": 6, "accumulate": 2, "log_every": 1},
        schedule=WarmupCosine(warmup=3, final=0.1),
    ),
    "step_schedule": boston(
        partial(Adam, lr=0.02), partial(StepLR, step_size=2), settings={"max_epochs": 5}
    ),
    "plateau": boston(
        partial(SGD, lr=2e-3, momentum=0.5),
        partial(ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.05),
        settings={"max_epochs": 12, "clip_norm": 20.0},
    ),
    "stopped_inside_an_epoch": boston(
        partial(Adam, lr=0.01), settings={"max_epochs": 9, "max_steps": 14, "log_every": 5}
    ),
    "weights": pixels(
        partial(Adam, lr=0.01), settings={"max_epochs": 4, "accumulate": 2, "log_every": 2}
    ),
    "weights_that_are_numbers": Case(
        partial(Pixels, kind=float),
        partial(Table, 40, 9),
        pixel_rows,
        partial(SGD, lr=0.05, momentum=0.9),
        settings={"max_epochs": 4, "clip_norm": 0.5, "log_every": 1},
    ),
    "fewer_rows_than_replicas": Case(
        Pixels,
        partial(Table, 17, 5),  # 5 5 5 2: on four replicas 2 2 1 0 and 1 1 0 0
        pixel_rows,
        partial(Adam, lr=0.01),
        settings={"max_epochs": 4, "log_every": 3},
    ),
    "one_row_a_batch": Case(
        Pixels,
        partial(Table, 5, 1, one_by_one=True),
        pixel_rows,
        partial(SGD, lr=0.01),
        settings={"max_epochs": 5, "accumulate": 2, "log_every": 1},
    ),
    "few_rows_accumulated": boston(
        partial(Adam, lr=0.01),
        settings={"max_epochs": 1, "max_steps": 20, "accumulate": 3, "log_every": 4},
    ),
    "lenet": Case(
        lambda o, s: LeNet(o, s),
        LeNetData,
        lenet_rows,
        partial(SGD, lr=0.2),
        settings={"max_epochs": 1, "max_steps": 12, "log_every": 5},
    ),
}
CASES["few_rows_accumulated"].data = partial(BostonData, batch_size=3)  # on four ranks 1 1 1 0
CASES["accumulation_with_a_tail"].data = partial(BostonData, batch_size=50)  # 8 x 50 and 4 rows

# Running them


def settings_of(case: Case, precision: str) -> TrainerSettings:
    given = {"max_epochs": 10, "log_every": 50, **case.settings}
    if precision == "32":
        given["max_steps"] = min(FLOAT32_STEPS, given.get("max_steps") or FLOAT32_STEPS)
    return TrainerSettings(precision=precision, **given)


def trained(strategy: Strategy, name: str, precision: str) -> dict[str, Any]:
    case = CASES[name]
    torch.manual_seed(SEED)
    recorder = Recorder()
    task = case.task(case.optimizer, case.scheduler)
    task.lr_schedule = case.schedule
    trainer = Trainer(
        task,
        case.data(),
        strategy=strategy,
        settings=settings_of(case, precision),
        loggers=[recorder],
        seed=SEED,
    )
    trainer.fit()
    return {"log": recorder.log_, "weights": weights(trainer.task)}


@once
def by_hand(name: str, precision: str) -> dict[str, Any]:
    case, settings = CASES[name], settings_of(CASES[name], precision)
    torch.manual_seed(SEED)
    task = case.task(None, None).to(torch.float64 if precision == "64" else torch.float32)
    data = case.data()
    data.setup()
    train, val = columns(data.train_dataset(), task), columns(data.val_dataset(), task)
    optimizer = case.optimizer(task.parameters())
    steps = math.ceil(math.ceil(len(train[0]) / data.batch_size) / settings.accumulate)
    total = min(settings.max_steps or math.inf, settings.max_epochs * steps)
    known = {"total_steps": int(total)} if settings.scheduler_every == "step" else {}
    scheduler = case.scheduler and case.scheduler(optimizer, **known)
    if case.schedule is not None:
        scheduler = LambdaLR(optimizer, partial(cosine, int(total)))
    log = hand_written.fit(
        task,
        case.per_row,
        optimizer,
        train,
        val,
        batches=lambda epoch: permutation(len(train[0]), seed=SEED, epoch=epoch).split(
            data.batch_size
        ),
        epochs=settings.max_epochs,
        max_steps=settings.max_steps,
        accumulate=settings.accumulate,
        clip_norm=settings.clip_norm,
        clip_value=settings.clip_value,
        scheduler=scheduler,
        scheduler_every="step" if case.schedule else settings.scheduler_every,
        log_every=settings.log_every,
        summarize=case.summarize,
    )
    return {"log": log, "weights": weights(task)}


def columns(dataset: Any, task: Task) -> tuple[Tensor, ...]:
    dtype = next(task.parameters()).dtype
    found = dataset.tensors if isinstance(dataset, TensorDataset) else dataset.columns
    return tuple(c.to(dtype) if c.is_floating_point() else c for c in found)


FEW_ROWS = ["fewer_rows_than_replicas", "one_row_a_batch", "few_rows_accumulated"]
SOME = ["boston", "accumulation_with_a_tail", "clip_norm", "weights", *FEW_ROWS]
# Each case on three ranks; on two and four what their shares are another case of.
BY_RANKS: dict[tuple[type[Processes], int], dict[str, list[str]]] = {
    (DDP, 2): {"64": SOME, "32": [*SOME, "lenet"]},
    (DDP, 3): {"64": list(CASES)},
    (DDP, 4): {"64": SOME},
    (FSDP, 2): {"64": SOME},
    (FSDP, 3): {"64": list(CASES)},
}
# On one replica and on three virtual ones each case, too.
BY_ONE: dict[tuple[int, str], list[str]] = {
    (1, "64"): list(CASES),
    (1, "32"): list(CASES),
    (2, "64"): SOME,
    (3, "64"): list(CASES),
    (3, "32"): SOME,
    (4, "64"): SOME,
}


def all_of_them(strategy: Processes) -> dict[tuple[str, str], dict[str, Any]]:
    """In one group of ranks, which takes seconds to start."""
    return {
        (name, precision): trained(strategy, name, precision)
        for precision, names in BY_RANKS[type(strategy), strategy.replicas].items()
        for name in names
    }


@once
def by_ranks(kind: type[Processes], replicas: int) -> dict[tuple[str, str], dict[str, Any]]:
    return on(kind(replicas, "cpu"), all_of_them)


@pytest.mark.parametrize(
    ("name", "replicas", "precision"),
    [(name, *way) for way, names in BY_ONE.items() for name in names],
)
def test_one_process_equals_the_hand_written_loop(name, replicas, precision):
    strategy = CPU() if replicas == 1 else DataParallel(replicas, "cpu")
    check(trained(strategy, name, precision), name, precision)


@pytest.mark.parametrize(
    ("kind", "replicas", "precision", "name"),
    [
        (*ranks, precision, name)
        for ranks, of_precision in BY_RANKS.items()
        for precision, names in of_precision.items()
        for name in names
    ],
)
def test_ranks_equal_the_hand_written_loop(kind, replicas, name, precision):
    check(by_ranks(kind, replicas)[name, precision], name, precision)


def check(mine: dict[str, Any], name: str, precision: str) -> None:
    wanted = by_hand(name, precision)
    apart = (
        logs_apart(mine["log"], wanted["log"]),
        weights_apart(mine["weights"], wanted["weights"]),
    )
    print(f"PARITY {name} {precision} {apart[0]:.1e} {apart[1]:.1e}")
    assert max(apart) <= TOLERANCE[precision]
