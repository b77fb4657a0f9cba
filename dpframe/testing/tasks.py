"""The kit's own tasks: small enough to train in milliseconds, and made to show one thing each."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset, TensorDataset

from dpframe.data import DataModule
from dpframe.task import Task

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
