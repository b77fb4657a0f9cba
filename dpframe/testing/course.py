"""The kit's own tasks, and courses: short trainings that strategy and reference both do."""

from collections.abc import Callable
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
from dpframe.trainer.settings import TrainerSettings

TRAINED_ROWS = 27
HELD_OUT_ROWS = 11


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


class Table(DataModule):
    """For both networks: three features, a target, and a weight from 1 to 5."""

    def setup(self) -> None:
        count = TRAINED_ROWS + HELD_OUT_ROWS
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        noise = torch.randn(count, generator=generator, dtype=torch.float64)
        weights = torch.arange(count, dtype=torch.float64) % 5 + 1
        rows = TensorDataset(x, x.sum(dim=1) + 0.1 * noise, weights)
        self.train = TensorDataset(*rows[:TRAINED_ROWS])
        self.held_out = TensorDataset(*rows[TRAINED_ROWS:])

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
    epochs: int = 2
    accumulate: int = 1

    def build(self) -> tuple[Task, "Few"]:
        """The same weights and rows each time."""
        seeding.seed_everything(self.recipe.seed)
        task = self.recipe.task()
        return task, Few(self.recipe.data(), self.batch_size, seed=self.recipe.seed)

    def settings(self) -> TrainerSettings:
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
            max_steps=None,
            precision="64",
            validate_every_epochs=1,
            validate_every_steps=None,
        )


KIT = Recipe("the kit's network", Small, Table)
WEIGHTED = Recipe("the kit's weighted network", Weighted, Table)


def kit_course() -> Course:
    return Course(KIT)


def of(recipe: Recipe) -> Course:
    return Course(recipe, accumulate=recipe.settings.accumulate)


def accumulating() -> Course:
    """27 rows are 7 batches of 4, so the third step has one batch, of 3 rows."""
    return Course(KIT, batch_size=4, accumulate=3)


def few_rows(replicas: int) -> Course:
    return Course(KIT, batch_size=min(max(1, replicas - 1), Course.batch_size))


def weighted() -> Course:
    return Course(WEIGHTED, batch_size=4, accumulate=2)


class Few(DataModule):
    """The first rows of a recipe's data, in its own order where it has none of a sampler's."""

    def __init__(self, data: DataModule, batch_size: int, *, seed: int) -> None:
        super().__init__(batch_size, workers=0, shuffle=data.shuffle)
        self.data = data
        self.seed = seed
        self.collate = data.collate  # type: ignore[method-assign]

    def setup(self) -> None:
        self.data.setup()
        with seeding.seeded(self.seed):  # rows that are augmented at random: alike everywhere
            self.train = few(self.data.train_dataset(), TRAINED_ROWS)
            self.held_out = few(self.data.val_dataset(), HELD_OUT_ROWS)

    def train_dataset(self) -> Dataset | None:
        return self.train

    def val_dataset(self) -> Dataset | None:
        return self.held_out


class Frozen(Dataset):
    """Rows that were read once and stay as they are."""

    def __init__(self, rows: list) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


def few(dataset: Any, rows: int) -> Dataset | None:
    if dataset is None:
        return None
    if isinstance(dataset, IterableDataset):
        return Frozen(list(islice(dataset, rows)))
    first = range(min(rows, len(dataset)))
    if type(dataset) is TensorDataset:  # read without Python for each row, as in a real run
        return Subset(dataset, list(first))
    return Frozen([dataset[row] for row in first])


def why_not(task: Task) -> str:
    """Why this task's curve can't be the same on every strategy; empty where it can."""
    if type(task).training_step is Task.training_step:
        return "it trains nothing"
    for name, module in task.named_modules():
        what = f"{name} is a {type(module).__name__}"
        if _drops(module):
            return f"{what}, which draws other masks on other shares"
        if isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm):
            return f"{what}: other shares have other batch statistics"
    return ""


def _drops(module: nn.Module) -> bool:
    share = getattr(module, "p" if isinstance(module, _DropoutNd) else "dropout", 0.0)
    return isinstance(share, float) and share > 0
