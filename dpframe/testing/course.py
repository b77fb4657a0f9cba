"""A course: one short training in float64, which the strategy and the reference both do."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from dpframe import seeding
from dpframe.data import DataModule
from dpframe.task import Task
from dpframe.testing.tasks import HELD_OUT_ROWS, TRAINED_ROWS, Small, Table, Weighted
from dpframe.trainer.settings import TrainerSettings


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
