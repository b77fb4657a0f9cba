"""The ResNet-18 of larger.py as a recipe's task, on made-up images of 32x32."""

import torch
from larger import ResNet
from torch import Tensor
from torch.utils.data import TensorDataset

import dpframe


class Classifier(dpframe.Task):
    def __init__(self, optimizer: object) -> None:
        super().__init__(ResNet(), optimizer)

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"loss": self.net.loss(batch, "")}


class Images(dpframe.DataModule):
    def __init__(self, batch_size: int, rows: int) -> None:
        super().__init__(batch_size)
        self.rows = rows

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(torch.randn(self.rows, 3, 32, 32), torch.randint(10, (self.rows,)))
