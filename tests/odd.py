"""A task whose steps return what they should not, and a DataModule of odd data sets."""

import sys
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import dpframe

RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda loss: None,
    "list": lambda loss: [loss],
    "tensor": lambda loss: loss,
    "empty": lambda loss: {},
    "no loss": lambda loss: {"mae": loss},
    "a number": lambda loss: {"loss": 1.0},
    "a vector": lambda loss: {"loss": torch.stack([loss, loss])},
    "detached": lambda loss: {"loss": loss.detach()},
    "no weight": lambda loss: {"loss": loss, "weight": None},
    "weights": lambda loss: {"loss": loss, "weight": torch.ones(2)},
    "text": lambda loss: {"loss": loss, "mae": "low"},
    "no number": lambda loss: {"loss": loss, "mae": None},
    "numbers": lambda loss: {"loss": loss, "mae": torch.ones(3)},
    "exits": lambda loss: sys.exit(0),
    "": lambda loss: {"loss": loss},
}


class Odd(dpframe.Task):
    def __init__(self, train: str = "", val: str = "", test: str = "", predict: str = "") -> None:
        super().__init__(torch.nn.Linear(1, 1))
        self.returns = {"train": train, "val": val, "test": test, "predict": predict}

    def measured(self, step: str, batch: Any) -> Any:
        return RETURNS[self.returns[step]](self.net(batch[0]).square().mean())

    def training_step(self, batch: Any) -> Any:
        return self.measured("train", batch)

    def validation_step(self, batch: Any) -> Any:
        return self.measured("val", batch)

    def test_step(self, batch: Any) -> Any:
        return self.measured("test", batch)

    def predict_step(self, batch: Any) -> Any:
        return self.measured("predict", batch)

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Broken(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> Any:
        if row == 25:
            raise LookupError("the user's own words")
        return torch.ones(1), torch.ones(1)


class Spins(Broken):
    def __getitem__(self, row: int) -> Any:
        return torch.ones(1), torch.ones(1) * (sum(repeat(0)) if row == 8 else 0)


class Nothing(IterableDataset):
    def __iter__(self) -> Iterator:
        return iter(())


KINDS: dict[str, Callable[[], Any]] = {
    "some": lambda: TensorDataset(torch.ones(8, 1)),
    "none": lambda: None,
    "empty": lambda: TensorDataset(torch.ones(0, 1)),
    "list": list,
    "stream": Nothing,
    "broken": Broken,
    "spins": Spins,
}


class OddData(dpframe.DataModule):
    def __init__(
        self,
        batch_size: int = 4,
        workers: int = 0,
        *,
        train: str = "some",
        val: str = "some",
        test: str = "some",
    ) -> None:
        super().__init__(batch_size, workers, shuffle=False)
        self.kinds = {"train": train, "val": val, "test": test}

    def train_dataset(self) -> Any:
        return KINDS[self.kinds["train"]]()

    def val_dataset(self) -> Any:
        return KINDS[self.kinds["val"]]()

    def test_dataset(self) -> Any:
        return KINDS[self.kinds["test"]]()
