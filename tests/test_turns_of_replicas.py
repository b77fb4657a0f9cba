"""Replicas that take turns in one process: what a step sets for a while is its replica's own."""

from typing import Any

import pytest
import torch
from small import Rows, Small, fitted
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

from dpframe.strategies import CPU, DataParallel

EXACT = 1e-12


class Normed(Small):
    """Its BatchNorm gathers within a forward, so that replicas take turns there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        return {"loss": mse_loss(self.net(x)[:, 0], y) + self.more(x)}

    def more(self, x: Tensor) -> Any:
        raise NotImplementedError


class Keeping(nn.Linear):
    """Leaves something of its output as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.left = y.square().mean()
        return y


class Attribute(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = Keeping(3, 8)

    def more(self, x: Tensor) -> Any:
        return self.net[0].left


class Hook(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.feature = output

    def more(self, x: Tensor) -> Any:
        return self.feature.square().mean()


class Functional(Normed):
    """Computes with other weights, as a hypernetwork or a teacher does."""

    def more(self, x: Tensor) -> Any:
        weights = {name: 1.1 * weight for name, weight in self.net.named_parameters()}
        return functional_call(self.net, weights, (x,)).square().mean()


class Modes(Normed):
    def more(self, x: Tensor) -> Any:
        self.net.eval()
        gathered = self.all_gather(self.net(x).detach())
        self.net.train()
        return (self.net(x) - gathered.mean()).square().mean()


class Momentum(Normed):
    """Its second pass does not move the running statistics."""

    def more(self, x: Tensor) -> Any:
        norm: Any = self.net[1]
        norm.momentum = 0.0
        y = self.net(x + 0.1)
        norm.momentum = 0.1
        return y.square().mean()


class Counts(Normed):
    """Counts its steps."""

    steps = 0

    def more(self, x: Tensor) -> Any:
        self.steps += 1
        return self.steps * self.net(x).square().mean()


@pytest.mark.parametrize("kind", [Attribute, Hook, Functional, Modes, Momentum, Counts])
def test_what_a_step_sets_is_not_seen_by_another_replica(kind):
    given: dict[str, Any] = {"precision": "64", "exact_layers": True, "max_epochs": 2}
    states = []
    for strategy in (CPU(), DataParallel(3, "cpu")):
        torch.manual_seed(0)
        states.append(fitted(kind(), Rows(23, 9), strategy=strategy, **given).task.state_dict())
    one, three = states
    assert all(torch.allclose(three[key], one[key], rtol=0, atol=EXACT) for key in one)
