"""The kit's own tasks, and courses: short trainings that strategy and reference both do."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import SGD
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from dpframe import seeding
from dpframe.data import DataModule
from dpframe.task import Task
from dpframe.testing.report import FLOAT32_TOLERANCE, TOLERANCE
from dpframe.trainer.settings import TrainerSettings

TRAINED_ROWS = 27
HELD_OUT_ROWS = 11
TABLE_ROWS = 4096


class Small(Task):
    """A smooth network: there is no ReLU that a last digit could flip."""

    def __init__(self) -> None:
        layers = nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)
        super().__init__(nn.Sequential(*layers), partial(SGD, lr=0.02, momentum=0.9))

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        error = self._error(batch)
        return {"loss": error.square().mean(), "mae": error.abs().mean()}

    def _error(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0])[:, 0] - batch[1]


class Weighted(Small):
    """A mean over weights instead of rows, as over tokens or pixels."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        error, weights = self._error(batch), batch[2]
        total = weights.sum()
        mean = (error.square() * weights).sum() / total
        return {"loss": mean, "mae": (error.abs() * weights).sum() / total, "weight": total}


class Large(Small):
    """Beyond what a strategy may take for small: 9,889 weights, of which 9,216 are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1)
        )


class Drawing(Small):
    """With BatchNorm and dropout; keeps what it draws, and in which mode it is validated."""

    def __init__(self) -> None:
        super().__init__()
        first, tanh, last = self.net.children()
        self.net = nn.Sequential(first, nn.BatchNorm1d(8), tanh, nn.Dropout(0.2), last)
        self.drawn: list[float] = []
        self.modes: set[bool] = set()

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        if self.training:
            drawn = torch.rand((), dtype=torch.float64, device=batch[0].device)
            self.drawn.append(float(drawn))
        return super().training_step(batch)

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        self.modes.add(self.training)
        return super().training_step(batch)


class Table(DataModule):
    """For all of these networks: three features, a target, and a weight from 1 to 5."""

    def setup(self) -> None:
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(TABLE_ROWS, 3, generator=generator)
        noise = torch.randn(TABLE_ROWS, generator=generator)
        rows = TensorDataset(x, x.sum(dim=1) + 0.1 * noise, torch.arange(TABLE_ROWS) % 5 + 1.0)
        self.train = TensorDataset(*rows[HELD_OUT_ROWS:])
        self.held_out = TensorDataset(*rows[:HELD_OUT_ROWS])

    def train_dataset(self) -> Dataset:
        return self.train

    def val_dataset(self) -> Dataset:
        return self.held_out


class Counted(Task):
    """Each row has a weight of its own, which an epoch of SGD moves by how often it was seen.

    In a batch of n rows a row's gradient is -1/n a time that it takes part.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(optimizer=partial(SGD, lr=1.0))
        self.seen = nn.Parameter(torch.zeros(rows))

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": -self.seen[batch[0]].mean()}


class Squares(Task):
    """Validates 0², 1², 2² …, whose mean nobody gets right by chance, and predicts its rows."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1))

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": batch[0].double().square().mean()}

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return batch[0]


class Numbers(DataModule):
    """0 to rows - 1, in batches of so many."""

    def __init__(self, rows: int, batch_size: int, shuffle: bool = False) -> None:
        super().__init__(batch_size, shuffle=shuffle)
        self.rows = TensorDataset(torch.arange(rows))

    def train_dataset(self) -> Dataset:
        return self.rows

    def val_dataset(self) -> Dataset:
        return self.rows

    def predict_dataset(self) -> Dataset:
        return self.rows


# ---- courses


@dataclass(frozen=True, eq=False)
class Recipe:
    """A task, its data, and the trainer's settings; `task` and `data` are called to make them."""

    name: str
    task: Callable[[], Task]
    data: Callable[[], DataModule]
    settings: TrainerSettings = field(default_factory=TrainerSettings)
    seed: int = 0


@dataclass(frozen=True)
class Course:
    """27 rows in batches of 8, twice: the last batch has 3, too few for some replicas."""

    recipe: Recipe
    batch_size: int = 8
    rows: int = TRAINED_ROWS
    epochs: int = 2
    accumulate: int = 1
    precision: str = "64"
    is_even: bool = False  # whole batches alone; which rows are read is kept

    def build(self) -> tuple[Task, "Few"]:
        """The same weights and rows each time."""
        seeding.seed_everything(self.recipe.seed)
        task = self.recipe.task()
        return task, Few(self.recipe.data(), self)

    def settings(self, max_steps: int | None = None) -> TrainerSettings:
        """The recipe's own, where they are part of the maths: clipping and schedules."""
        return replace(
            self.recipe.settings,
            accumulate=self.accumulate,
            compile=False,
            deterministic=False,
            limit_eval_batches=None,
            limit_train_batches=None,
            log_every=1,
            max_epochs=self.epochs,
            max_seconds=None,
            max_steps=max_steps,
            precision=self.precision,
            validate_every_epochs=1,
            validate_every_steps=None,
        )

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.precision == "64" else FLOAT32_TOLERANCE


KIT = Recipe("the kit's network", Small, Table)
WEIGHTED = Recipe("the kit's weighted network", Weighted, Table)
DRAWING = Recipe("the kit's network with BatchNorm and dropout", Drawing, Table)
LARGE = Recipe("the kit's network of 9,889 weights", Large, Table)


def kit_course() -> Course:
    return Course(KIT)


def of(recipe: Recipe, replicas: int) -> Course:
    course = Course(recipe, accumulate=recipe.settings.accumulate)
    task = course.build()[0]
    return _even(course, replicas) if trains(task) and why_not(task) else course


def accumulating() -> Course:
    """27 rows are 7 batches of 4, so the second update has two, the last of 3 rows."""
    return Course(KIT, batch_size=4, accumulate=5)


def few_rows(replicas: int) -> Course:
    return Course(KIT, batch_size=min(max(1, replicas - 1), Course.batch_size))


def weighted() -> Course:
    return Course(WEIGHTED, batch_size=4, accumulate=2)


def large() -> Course:
    """In float32, as most runs are."""
    return Course(LARGE, batch_size=100, rows=250, precision="32")


def drawing(replicas: int) -> Course:
    return _even(Course(DRAWING, precision="32"), replicas)


def _even(course: Course, replicas: int) -> Course:
    """Four rows for each replica in each of three batches: BatchNorm refuses a share of one."""
    return replace(course, batch_size=4 * replicas, rows=12 * replicas, is_even=True)


class Few(DataModule):
    """The first rows of a recipe's data, in its own order where it has none of a sampler's."""

    def __init__(self, data: DataModule, course: Course) -> None:
        super().__init__(course.batch_size, workers=0, shuffle=data.shuffle)
        self.data = data
        self.course = course
        self.collate = data.collate  # type: ignore[method-assign]

    def setup(self) -> None:
        self.data.setup()
        with self._frozen():
            size = self.batch_size if self.course.is_even else 1
            self.train = self._few(self.data.train_dataset(), self.course.rows, size)
            self.held_out = self._few(self.data.val_dataset(), HELD_OUT_ROWS)

    def train_dataset(self) -> Dataset | None:
        return self.train

    def val_dataset(self) -> Dataset | None:
        return self.held_out

    def predict_dataset(self) -> Dataset | None:
        with self._frozen():
            return self._few(self.data.predict_dataset(), HELD_OUT_ROWS)

    def _frozen(self) -> AbstractContextManager[None]:
        """Rows that are augmented at random are alike everywhere."""
        return seeding.seeded(self.course.recipe.seed)

    def _few(self, dataset: Any, rows: int, size: int = 1) -> Dataset | None:
        """The first rows, in whole batches of `size` where there are so many."""
        if dataset is None:
            return None
        if isinstance(dataset, IterableDataset):
            first: Any = list(islice(dataset, rows))
            return Frozen(first[: _whole(len(first), size)])
        first = range(_whole(min(rows, len(dataset)), size))
        if type(dataset) is TensorDataset and not self.course.is_even:
            return Subset(dataset, list(first))  # without Python for each row, as in a real run
        return Frozen([dataset[row] for row in first])


def _whole(rows: int, size: int) -> int:
    return rows // size * size or rows


class Frozen(Dataset):
    """Rows that were read once and stay as they are; `read` is which were asked for."""

    def __init__(self, rows: list) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        self.read.append(row)
        return self.rows[row]


def why_not(task: Task) -> str:
    """Why this task's curve can't be the same on every strategy; empty where it can."""
    if not trains(task):
        return "it trains nothing"
    for name, module in task.named_modules():
        what = f"{name} is a {type(module).__name__}"
        if _drops(module):
            return f"{what}, which draws other masks on other shares"
        if isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm):
            return f"{what}: other shares have other batch statistics"
    return ""


def trains(task: Task) -> bool:
    return type(task).training_step is not Task.training_step


def predicts(task: Task) -> bool:
    return type(task).predict_step is not Task.predict_step


def _drops(module: nn.Module) -> bool:
    share = getattr(module, "p" if isinstance(module, _DropoutNd) else "dropout", 0.0)
    return isinstance(share, float) and share > 0
