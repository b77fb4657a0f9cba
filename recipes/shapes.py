"""Shapes: shows which rows of a batch each replica gets; it predicts and never trains."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpframe

if TYPE_CHECKING:
    from dpframe.plugin import Predictions


class Shapes(dpframe.Task):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)

    def predict_step(self, batch: tuple[Tensor]) -> dict[str, Tensor]:
        (x,) = batch
        return {"input": x, "output": self.net(x)}


class ShapesData(dpframe.DataModule):
    """Random rows, the same ones whatever the run's seed."""

    def __init__(
        self,
        batch_size: int = 30,
        workers: int | str = 0,
        shuffle: bool = False,
        rows: int = 100,
        features: int = 5,
    ) -> None:
        super().__init__(batch_size, workers, shuffle)
        self.rows = rows
        self.features = features

    def predict_dataset(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(self.rows, self.features, generator=generator))


class PrintShapes(dpframe.Callback):
    """One line a replica from inside the model, then one line for the whole batch."""

    def on_predict_end(self, trainer: "dpframe.Trainer", predictions: "Predictions") -> None:
        for shares in predictions.batches:
            for share in shares:
                inputs, outputs = share["input"].shape, share["output"].shape
                print(f"\tIn Model: input size {inputs} output size {outputs}")
            inputs, outputs = _joined(shares, "input"), _joined(shares, "output")
            print(f"Outside: input size {inputs} output_size {outputs}")


def _joined(shares: list[dict[str, Tensor]], name: str) -> torch.Size:
    # Added up, not concatenated: the shares may still lie on their replicas' devices.
    shapes = [share[name].shape for share in shares]
    return torch.Size((sum(shape[0] for shape in shapes), *shapes[0][1:]))
