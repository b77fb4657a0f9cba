"""The task of growth.py by a tuned loop: so many names, and so many sets to validate on."""

import math
from collections.abc import Iterator

import problems
import torch
import tuned
from marks import Marks
from torch import nn
from torch.utils.data import TensorDataset


def epochs(
    marks: Marks, train: TensorDataset, held_out: dict[str, TensorDataset], names: int
) -> Iterator[dict[str, float]]:
    """Yields the means of each epoch when it is over, for ever."""
    net = problems.perceptron()
    tuned.without_dynamo()
    update = tuned.step_of(torch.optim.Adam(net.parameters(), lr=0.01, fused=True))
    parameters = list(net.parameters())
    x, y = train.tensors
    more = [f"m{index}" for index in range(names)]
    while True:
        marks.begin()
        net.train()
        outputs, rows = [], []
        for index in torch.randperm(len(x)).split(128):
            loss = (net(x.index_select(0, index)) - y.index_select(0, index)).square().mean()
            if not math.isfinite(loss.item()):
                raise RuntimeError(f"the loss is {loss.item()}")
            loss.backward()
            update()
            for parameter in parameters:
                parameter.grad = None
            outputs.append(dict.fromkeys(["loss", *more], loss.detach()))
            rows.append(len(index))
        means = weighted(outputs, rows)
        marks.train()
        means |= validated(net, held_out)
        marks.end()
        yield means


def weighted(outputs: list[dict[str, torch.Tensor]], rows: list[int]) -> dict[str, float]:
    """The means over the rows, of all names at once."""
    values = torch.stack([value for output in outputs for value in output.values()])
    weights = torch.tensor(rows, dtype=torch.float64)
    sums = values.reshape(len(outputs), -1).T.double() @ weights
    return dict(zip(outputs[0], (sums / weights.sum()).tolist(), strict=True))


def validated(net: nn.Module, held_out: dict[str, TensorDataset]) -> dict[str, float]:
    """Each set is one batch."""
    net.eval()
    with torch.no_grad():
        return {
            f"val/{name}/loss": (net(data.tensors[0]) - data.tensors[1]).square().mean().item()
            for name, data in held_out.items()
        }
