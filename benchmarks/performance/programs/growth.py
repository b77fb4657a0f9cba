"""Rows that cost no memory until they are read, a part of them, several sets to validate on, and a
task that measures as many names as asked."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import dpframe


class Rows(dpframe.DataModule):
    def __init__(
        self,
        batch_size: int = 128,
        rows: int = 1000,
        columns: int = 13,
        sets: int = 0,
        is_written: bool = True,
        is_subset: bool = False,
    ) -> None:
        super().__init__(batch_size)
        self.rows, self.columns, self.sets = rows, columns, sets
        self.is_written, self.is_subset = is_written, is_subset

    def train_dataset(self) -> Dataset:
        def column(width: int) -> Tensor:
            if self.is_written:
                return torch.zeros(self.rows, width)
            return torch.zeros(1, width).expand(self.rows, width)  # one row is all of them

        rows = TensorDataset(column(self.columns), column(1))
        return Subset(rows, range(self.rows)) if self.is_subset else rows

    def val_dataset(self) -> dict[str, Dataset] | None:
        if not self.sets:
            return None
        x = torch.zeros(128, self.columns)
        return {f"set{index}": TensorDataset(x, x[:, :1]) for index in range(self.sets)}


class Measures(dpframe.Task):
    def __init__(self, sizes: list[int], optimizer: object, names: int = 1) -> None:
        layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
        super().__init__(nn.Sequential(*layers[:-1]), optimizer)
        self.names = [f"m{index}" for index in range(names)]

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        value = loss.detach()
        return {"loss": loss, **dict.fromkeys(self.names, value)}

    validation_step = training_step
