"""Rows that cost no memory until they are read, and a task that measures as many names as asked."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpframe


class Rows(dpframe.DataModule):
    def __init__(self, batch_size: int = 128, rows: int = 1000, columns: int = 13) -> None:
        super().__init__(batch_size)
        self.rows, self.columns = rows, columns

    def train_dataset(self) -> TensorDataset:
        # Zeros of this size are pages that the system has not given out yet.
        return TensorDataset(torch.zeros(self.rows, self.columns), torch.zeros(self.rows, 1))


class Measures(dpframe.Task):
    def __init__(self, sizes: list[int], optimizer: object, names: int = 1) -> None:
        layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
        super().__init__(nn.Sequential(*layers[:-1]), optimizer)
        self.names = [f"m{index}" for index in range(names)]

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        value = loss.detach()
        return {"loss": loss, **dict.fromkeys(self.names, value)}
