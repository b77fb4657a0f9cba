"""What a task keeps in attributes from step to step, by which the next step's loss is another."""

from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from small import Rows, Small, fitted, trainer
from torch import Tensor

from dpframe import Strategy
from dpframe.strategies import CPU, DDP, DataParallel

TWO = partial(DataParallel, 2, "cpu")
OWN = "of each replica's own: {} (kept from step to step)"


class Keeping(Small):
    """Adds to its loss what it has kept of the steps before."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = self.begin()

    def begin(self) -> Any:
        return 0.0

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        y = self.net(batch[0])[:, 0]
        loss = (y - batch[1]).square().mean()
        return {"loss": loss + self.more(y)}

    def more(self, y: Tensor) -> Any:
        raise NotImplementedError


class Mean(Keeping):
    def more(self, y: Tensor) -> Any:
        before, self.kept = self.kept, 0.9 * self.kept + 0.1 * y.detach().mean()
        return (y - before).square().mean()


class Seen(Keeping):
    def more(self, y: Tensor) -> Any:
        before, self.kept = self.kept, self.kept + len(y)
        return y.square().mean() / (1 + before)


class Queue(Keeping):
    def begin(self) -> Any:
        return deque(maxlen=8)

    def more(self, y: Tensor) -> Any:
        loss = sum((y - other).square().mean() for other in self.kept) / 8
        self.kept.append(y.detach().mean())
        return loss


class Counter(Keeping):
    """As many on any number of replicas."""

    def more(self, y: Tensor) -> Any:
        self.kept += 1
        return y.square().mean() / self.kept


class History(Keeping):
    """Is kept, but no loss depends on it."""

    def begin(self) -> Any:
        return []

    def more(self, y: Tensor) -> Any:
        self.kept.append(float(y.detach().mean()))
        return 0.0


class Left(Keeping):
    """Is set anew by each step."""

    def more(self, y: Tensor) -> Any:
        self.kept = y.square().mean()
        return self.kept


class Gathered(Keeping):
    def more(self, y: Tensor) -> Any:
        rows = self.all_gather(y.detach())
        before, self.kept = self.kept, 0.9 * self.kept + 0.1 * rows.mean()
        return (y - before).square().mean()


class InList(Keeping):
    """Counts in a list, which replicas of one process have together."""

    def begin(self) -> Any:
        return [0]

    def more(self, y: Tensor) -> Any:
        self.kept[0] += 1
        return y.square().mean() / self.kept[0]


TOLD = [Mean, Seen, Queue]
ALIKE = [Counter, History, Left, Gathered]


@pytest.mark.parametrize("kind", TOLD)
def test_what_moves_by_a_replicas_rows_is_named(kind):
    torch.manual_seed(0)
    assert trainer(kind(), strategy=TWO()).prepare().own == OWN.format("kept")
    assert trainer(kind()).prepare().own == ""


def runs(strategy: Strategy) -> dict[str, Any]:
    """The line, and the weights, of each kind."""
    found = {}
    for kind in (*TOLD, *ALIKE, InList):
        torch.manual_seed(0)
        given: dict[str, Any] = {"precision": "64", "max_epochs": 1}
        made = fitted(kind(), Rows(23, 8), strategy=strategy, **given)
        found[kind.__name__] = made.training.own, made.task.state_dict()
    return found


@pytest.mark.parametrize("strategy", [TWO(), DDP(2, "cpu")], ids=lambda s: s.name)
def test_what_has_no_line_is_the_same_and_what_has_one_is_not(strategy):
    one, two = runs(CPU()), on(strategy, runs)
    for name, (line, weights) in two.items():
        wanted = one[name][1]
        is_same = all(torch.allclose(weights[n], wanted[n], rtol=0, atol=1e-12) for n in wanted)
        assert is_same == (line == ""), name
