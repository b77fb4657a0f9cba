"""The kit's own tasks and data, and courses: short trainings for the strategy and the reference."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dpframe import Batches, DataModule, Task, TrainerSettings, UserError
from dpframe.layers.exact import DROPOUTS, convert, is_torchs
from dpframe.plugin import Source, seeding
from dpframe.trainer.checks.own import Own, kind_of

TOLERANCE = 1e-12
FLOAT32_TOLERANCE = 1e-5
HELD_OUT_ROWS = 11
TABLE_ROWS = 4096
TRAINS_NOTHING = "it trains nothing"

# ---- tasks and their data


class Small(Task):
    """A smooth network: it has no ReLU that a last digit could flip."""

    def __init__(self, *layers: nn.Module) -> None:
        layers = layers or (nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        super().__init__(nn.Sequential(*layers), partial(SGD, lr=0.02, momentum=0.9))

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        error = self._error(batch)
        return {"loss": error.square().mean(), "mae": error.abs().mean()}

    def _error(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0])[:, 0] - batch[1]


class Large(Small):
    """9,216 of its weights are one tensor: more than a strategy may treat as small."""

    def __init__(self) -> None:
        wide = nn.Linear(96, 96), nn.Tanh()
        super().__init__(nn.Linear(3, 96), nn.Tanh(), *wide, nn.Linear(96, 1))


class Weighted(Small):
    """A mean over weights instead of rows, e.g. over tokens or pixels."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        error, weights = self._error(batch), batch[2]
        total = weights.sum()
        mean = (error.square() * weights).sum() / total
        return {"loss": mean, "mae": (error.abs() * weights).sum() / total, "weight": total}


class Contrastive(Small):
    """Each row's loss is over the rows of the whole batch, wherever they are."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        own = self.net(batch[0])
        gathered = self.all_gather(torch.cat([own, batch[1][:, None]], dim=1))
        scores = own @ gathered[:, :1].T - (batch[1][:, None] - gathered[:, 1]).abs()
        return {"loss": scores.logsumexp(dim=1).mean(), "rows": float(len(gathered))}


class Normed(Small):
    """Has BatchNorm and dropout."""

    def __init__(self) -> None:
        norm = nn.BatchNorm1d(8)
        super().__init__(nn.Linear(3, 8), norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


class Watched(Normed):
    """Remembers what it draws, in which mode it is validated, and its gradients after each
    backward: at the next one's forward, and in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list] = {"drawn": [], "modes": [], "gradients": []}

    def configure_optimizer(self) -> torch.optim.Optimizer:
        optimizer = SGD(self.parameters(), lr=0.02, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: self._look())
        return optimizer

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        if self.training:
            self._look()
            drawn = torch.rand((), dtype=torch.float64, device=batch[0].device)
            self.seen["drawn"].append(float(drawn))
        return super().training_step(batch)

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        self.seen["modes"].append(self.training)
        return super().training_step(batch)

    def _look(self) -> None:
        strategy = self.run_context.strategy
        if strategy is not None and strategy.sharding.cuts:
            return  # a process has its shards of them alone
        known = [p.grad.cpu().flatten() for p in self.parameters() if p.grad is not None]
        gradient = torch.cat(known).tolist() if known else []
        if gradient and gradient not in self.seen["gradients"][-1:]:  # one look a replica
            self.seen["gradients"].append(gradient)


class Table(DataModule):
    """For these networks: three features, a target, and a weight from 1 to 5."""

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


class Squares(Task):
    """Validates 0², 1², 2² …, whose mean nobody gets right by chance, and predicts its rows."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1))

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": batch[0].double().square().mean()}

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return batch[0]


class Numbers(DataModule):
    """The rows 0 to `rows` - 1, for Squares."""

    def __init__(self, rows: int, batch_size: int) -> None:
        super().__init__(batch_size)
        self.rows = TensorDataset(torch.arange(rows))

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
    compared: str = ""  # in words
    batch_size: int = 8
    rows: int = 27
    accumulate: int = 1
    precision: str = "64"
    is_even: bool = False  # whole batches only; the data records which rows are read
    is_small: bool = True  # so that every process may keep its weights
    is_saved: bool = False  # within the second epoch, and resumed from there
    logical_replicas: int | None = None
    is_without_dropout: bool = False  # but for what is dropped by row
    epochs = 2

    def build(self) -> tuple[Task, "FirstRows"]:
        """The same weights and rows each time."""
        seeding.seed_everything(self.recipe.seed)
        task = self.recipe.task()
        task.scale_lr = None  # of the Trainer, whatever the strategy
        if self.is_without_dropout:
            for _, module, name in dropouts(task, self.recipe.settings):
                setattr(module, name, 0.0)
        return task, FirstRows(self.recipe.data(), self)

    @property
    def settings(self) -> TrainerSettings:
        """The recipe's own where they are part of the maths: clipping and schedules."""
        return replace(
            self.recipe.settings,
            accumulate=self.accumulate,
            compile=False,
            deterministic=False,
            limit_eval_batches=None,
            limit_train_batches=None,
            limit_val_batches=None,
            log_every=1,
            logical_replicas=self.logical_replicas,
            max_epochs=self.epochs,
            max_seconds=None,
            max_steps=None,
            precision=self.precision,
            sanity_batches=0,
            share_check="off",
            validate_every_epochs=1,
            validate_every_steps=None,
        )

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.precision == "64" else FLOAT32_TOLERANCE


KIT = Recipe("the kit's network", Small, Table)
WEIGHTED = Recipe("the kit's weighted network", Weighted, Table)
CONTRASTIVE = Recipe("the kit's contrastive network", Contrastive, Table)
EXACT_LAYERS = Recipe(
    "the kit's network with exact BatchNorm and dropout",
    Normed,
    Table,
    TrainerSettings(exact_layers=True),
)
WATCHED = Recipe("the kit's network with BatchNorm and dropout", Watched, Table)
LARGE = Recipe("the kit's network of 9,889 weights", Large, Table)


def courses(recipe: Recipe | None, replicas: int) -> dict[str, Course]:
    """The courses by the name of what measures them."""
    few = min(max(1, replicas - 1), 8)
    many = max(3, 2 * replicas - 1)  # two for each replica but the last

    def four_rows_each(batches: int, course: Course, shares: int = replicas) -> Course:
        return replace(course, batch_size=4 * shares, rows=batches * 4 * shares, is_even=True)

    results = {
        "kit": Course(KIT),
        # 27 rows are 7 batches of 4: the second update has two of them, the last with 3 rows.
        "accumulation": Course(KIT, "5 batches an update, then 2", 4, accumulate=5),
        "few_rows": Course(KIT, f"batches of {few} on {replicas} replicas", few, 2 * few + 1),
        "gathered": Course(CONTRASTIVE, f"batches of {many}, then {few}", many, 2 * many + few),
        "exact_layers": Course(EXACT_LAYERS, "BatchNorm and dropout as on one", accumulate=2),
        "weighted": Course(WEIGHTED, "a mean over weights, not rows", 4, accumulate=2),
        "float32": Course(LARGE, "batches of 100, 9,889 weights", 100, 250, precision="32"),
        "watched": four_rows_each(6, Course(WATCHED, accumulate=3, precision="32", is_saved=True)),
    }
    if recipe is not None:
        accumulate = recipe.settings.accumulate
        course = Course(
            recipe, accumulate=accumulate, is_small=False, is_saved=True, is_without_dropout=True
        )
        task = course.build()[0]
        # A replica's own BatchNorm refuses a share of one row.
        has_norms = own_layers(task, recipe, replicas).layers["BatchNorm"] > 0
        is_even = task.has_own("training_step") and (has_norms or bool(why_not(task, recipe)))
        results["recipe"] = four_rows_each(3, course) if is_even else course
        if count := recipe.settings.logical_replicas:
            results["bits"] = replace(
                four_rows_each(3, course, count),
                precision=recipe.settings.precision,
                is_saved=False,
                is_without_dropout=False,
                logical_replicas=count,
            )
    return results


class FirstRows(DataModule):
    """The first rows of a recipe's data, without its sampler."""

    def __init__(self, data: DataModule, course: Course) -> None:
        super().__init__(course.batch_size, workers=0, shuffle=data.shuffle)
        self.data = data
        self.module = getattr(data, "module", None)  # of Lightning's
        self.course = course
        self.collate = data.collate  # type: ignore[method-assign]

    def setup(self) -> None:
        self.data.setup()
        size = self.batch_size if self.course.is_even else 1
        self.train = self._first(self.data.train_dataset, self.course.rows, size)
        if isinstance(self.train, dict):
            raise UserError(
                f"mode=verify trains on one set, and {type(self.data).__name__}.train_dataset() "
                f"returned {', '.join(self.train)}"
            )
        self.held_out = self._first(self.data.val_dataset, HELD_OUT_ROWS)

    def train_dataset(self) -> Dataset | None:
        return self.train

    def val_dataset(self) -> Any:
        return self.held_out

    def predict_dataset(self) -> Any:
        return self._first(self.data.predict_dataset, HELD_OUT_ROWS)

    def _first(self, make: Callable[[], Any], rows: int, size: int = 1) -> Any:
        """The first rows, in whole batches of `size` if there are that many."""
        with seeding.seeded(self.course.recipe.seed):  # random augmentation is the same everywhere
            returned = make()
            if isinstance(returned, dict):
                return {name: self._of(each, rows, size) for name, each in returned.items()}
            return None if returned is None else self._of(returned, rows, size)

    def _of(self, dataset: Any, rows: int, size: int) -> Dataset:
        if isinstance(dataset, DataLoader):
            source = Source.of(dataset, self.data, "the DataModule", kind="val")
            dataset, self.collate = source.dataset, source.collate  # type: ignore[method-assign,assignment]
        if isinstance(dataset, Batches):
            raise UserError(
                "mode=verify makes its own batches, and dpframe.Batches gives ready ones; verify "
                "with a data set"
            )
        if isinstance(dataset, IterableDataset):
            first = list(islice(dataset, rows))
        else:
            first = [dataset[row] for row in range(min(rows, len(dataset)))]
        first = first[: len(first) // size * size or None]
        if type(dataset) is TensorDataset and not self.course.is_even:
            return TensorDataset(*dataset[: len(first)])  # read without Python, as in a run
        return Frozen(first)


class Frozen(Dataset):
    """Rows that were read once and stay as they are; `read` records which were asked for."""

    def __init__(self, rows: list) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        self.read.append(row)
        return self.rows[row]


def takes_turns(task: Task) -> bool:
    """Whether its training_step takes the name of an optimizer, too."""
    try:
        signature(task.training_step).bind("batch", "turn")
    except TypeError:
        return False
    return True


def dropouts(task: Task, settings: TrainerSettings) -> list[tuple[str, nn.Module, str]]:
    """The modules of each replica's own masks, and the attribute that says how much they drop."""
    found = []
    for path, module in task.named_modules():
        if settings.drops_by_row and isinstance(module, DROPOUTS) and is_torchs(module):
            continue
        name = "p" if "Dropout" in type(module).__name__ else "dropout"
        rate = getattr(module, name, 0.0)
        if module.training and isinstance(rate, float) and rate > 0:
            found.append((path, module, name))
    return found


def own_layers(task: Task, recipe: Recipe, replicas: int) -> Own:
    """Which of its layers the replicas compute each for itself."""
    settings = recipe.settings
    dropped = dropouts(task, settings)
    convert(task, batch_norm=settings.has_global_batch_norm, dropout=settings.drops_by_row)
    kinds = Counter(kind_of(module) for module in task.modules() if module.training)
    own = Own(Counter({kind: count for kind, count in kinds.items() if kind}))
    if replicas == 1:
        del own.layers["BatchNorm"]
    own.others = [f"{path} (dropout)" for path, module, _ in dropped if not kind_of(module)]
    return own


def why_not(task: Task, recipe: Recipe) -> str:
    """Why this task has no curve that the kit can compute; empty if it has."""
    if not task.has_own("training_step"):
        return TRAINS_NOTHING
    if takes_turns(task):
        return "its optimizers take turns, and the kit computes the steps of one"
    for path, module in task.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and not recipe.settings.has_global_batch_norm:
            return f"{path} is a SyncBatchNorm, which a CPU has by trainer.batch_norm=global alone"
    return ""
