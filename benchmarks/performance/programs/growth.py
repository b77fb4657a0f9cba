"""Rows that cost no memory until they are read, and a task that measures as many names as asked."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpframe


class Rows(dpframe.DataModule):
    def __init__(
        self, batch_size: int = 128, workers: int = 0, rows: int = 1000, columns: int = 13
    ) -> None:
        super().__init__(batch_size, workers)
        self.rows, self.columns = rows, columns

    def train_dataset(self) -> TensorDataset:
        # Zeros of this size are pages that the system has not given out yet.
        return TensorDataset(torch.zeros(self.rows, self.columns), torch.zeros(self.rows, 1))


class Measures(dpframe.Task):
    def __init__(self, net: nn.Module, optimizer: object, names: int = 1) -> None:
        super().__init__(net, optimizer)
        self.names = [f"m{index}" for index in range(names)]

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        value = loss.detach()
        return {"loss": loss, **dict.fromkeys(self.names, value)}
