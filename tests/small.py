"""A network that trains in milliseconds, its data, and a Trainer over them."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from dpframe import Callback, DataModule, Logger, Strategy, Task, Trainer, TrainerSettings, seeding
from dpframe.callbacks import progress as bar
from dpframe.data import Loader
from dpframe.data.source import Here, Source
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU
from dpframe.trainer import RunInfo, calendar, feed, progress, recorder
from dpframe.trainer.callback import HOOKS

SGD = partial(torch.optim.SGD, lr=0.05)
Adam = partial(torch.optim.Adam, lr=0.01)


class Small(Task):
    def __init__(
        self,
        optimizer: Any = SGD,
        scheduler: Any = None,
        *,
        dropout: float = 0.0,
        width: int = 8,
        net: nn.Module | None = None,
    ) -> None:
        super().__init__(net or _net(dropout, width), optimizer, scheduler)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        error = self.net(x)[:, 0] - y
        return {"loss": error.square().mean(), "mae": error.abs().mean()}

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0])


def _net(dropout: float, width: int) -> nn.Module:
    layers = nn.Linear(3, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 1)
    return nn.Sequential(*layers)


def heavy(module: nn.Module) -> Any:
    """The same module with a frozen weight of 4 MiB: as real models do, it fills more than a pipe
    on its way to ranks and back."""
    module.ballast = nn.Parameter(torch.ones(2**20), requires_grad=False)
    return module


class Scripted(Small):
    """Its val/score is what the test says, epoch by epoch."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = iter(scores)

    def summarize(self, means):
        return means if self.training else {**means, "score": next(self.scores)}


class Rows(DataModule):
    """`rows` of a sum with some noise; as many again are held out."""

    def __init__(
        self, rows: int = 20, batch_size: int = 4, *, val: bool = True, shuffle: bool = True
    ) -> None:
        super().__init__(batch_size, shuffle=shuffle)
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(2 * rows, 3, generator=generator)
        y = x.sum(dim=1) + 0.1 * torch.randn(2 * rows, generator=generator)
        self.train, self.held_out = (
            TensorDataset(x[:rows], y[:rows]),
            TensorDataset(x[rows:], y[rows:]),
        )
        self.has_val = val

    def train_dataset(self) -> Dataset:
        return self.train

    def val_dataset(self) -> Dataset | None:
        return self.held_out if self.has_val else None

    def test_dataset(self) -> Dataset:
        return self.held_out


class Given(DataModule):
    """Data sets as they are; a function is called each time that its data set is asked for."""

    def __init__(
        self, train: Any, val: Any = None, batch_size: int = 4, workers: Any = 0, **options: Any
    ) -> None:
        super().__init__(batch_size, workers, **options)
        self.train, self.val = train, val

    def train_dataset(self) -> Any:
        return self.train() if callable(self.train) else self.train

    def val_dataset(self) -> Any:
        return self.val() if callable(self.val) else self.val

    test_dataset = predict_dataset = val_dataset


class Listed(Dataset):
    """Rows that are read one by one."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


class Stream(IterableDataset):
    """Nothing tells before its end how many rows an epoch has."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Streamed(Rows):
    def train_dataset(self) -> Dataset:
        return Stream(self.train)


class Hooks(Callback):
    """Writes down (hook, step) for all hooks, or calls a function at one."""

    def __init__(self, **at: Callable[[Trainer], Any]) -> None:
        self.at = at
        self.seen: list[tuple[str, int]] = []

    def steps(self, hook: str) -> list[int]:
        return [step for name, step in self.seen if name == hook]


class Clock:
    """Stands still but for what a test adds, and a microsecond a reading."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now = 0.0
        for module in (progress, feed, calendar, recorder, bar):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=self._read))

    def _read(self) -> float:
        self.now += 1e-6
        return self.now

    def ticks(self, seconds: float) -> Callable[[Trainer], None]:
        def tick(trainer: Trainer) -> None:
            self.now += seconds

        return tick


def _noted(hook: str) -> Callable[..., None]:
    def note(self: Hooks, trainer: Trainer, *args: Any) -> None:
        self.seen.append((hook, trainer.global_step))
        if hook in self.at:
            self.at[hook](trainer)

    return note


for _hook in HOOKS:
    setattr(Hooks, _hook, _noted(_hook))


def strategy_of(where: str) -> Strategy:
    """By its name and the number of its replicas, e.g. ddp-2."""
    name, replicas = where.split("-")
    kinds = {"cpu": CPU, "data_parallel": DataParallel, "ddp": DDP}
    return kinds[name](int(replicas), "cpu")


def trainer(
    task: Task | None = None,
    data: DataModule | None = None,
    *,
    make: Callable[[], Task] = Small,
    callbacks: Any = (),
    loggers: list[Logger] | None = None,
    strategy: Strategy | None = None,
    seed: int = 0,
    directory: Any = "",
    interruption: Any = None,
    **settings: Any,
) -> Trainer:
    seeding.seed_everything(seed)
    return Trainer(
        task or make(),
        data or Rows(),
        strategy=strategy,
        settings=TrainerSettings(
            **{"max_epochs": 2, "threads": 1, "sanity_batches": 0, **settings}  # tests count them
        ),
        callbacks=callbacks,
        loggers=loggers or [],
        seed=seed,
        run=RunInfo(directory=str(directory)),
        interruption=interruption,
    )


def fitted(*args: Any, resume: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    made = trainer(*args, **settings)
    made.fit(resume)
    return made


class Grabbed(torch.optim.SGD):
    """Remembers the gradients that it was given."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, lr=lr)
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        self.seen.append(torch.cat([p.grad.flatten() for p in parameters]))
        super().step()


def gradients(**settings) -> list[Tensor]:
    made = fitted(make=lambda: Small(Grabbed), **{"max_epochs": 1, **settings})
    return made.update.optimizer.seen


def is_same(one: Any, other: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one.to_dense(), other.to_dense())
    return bool(one == other) or (one != one and other != other)


def loader_of(dataset: Any, batch_size: int = 10, **given: Any) -> Loader:
    """A Loader of a data set; what is given is for its Source, for the process that reads, or for
    itself."""
    plain = {"batch_size": batch_size, "shuffle": False, "sampler": None, "workers": 0}
    plain |= {"collate": default_collate, "shares": lambda rows: [rows], "rank": 0}
    plain |= {"looks_always": False, "agree": lambda value: value, "tally": list, "pins": False}
    plain |= {"place": lambda table: table, "seed": 0}
    given = {**plain, **dict.fromkeys(("piece", "division", "look")), **given}
    of = [{f.name: given.pop(f.name) for f in fields(k) if f.name in given} for k in (Source, Here)]
    return Loader(Source(dataset, **of[0]), Here(**of[1]), **given)
