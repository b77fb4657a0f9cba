"""Optimizers with a `train()` and `eval()` of their own, whose steps are at other weights.

Schedule-free ones, e.g.: an evaluation, and what a file is used for, is at their average.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpframe.composite import parts_of
from dpframe.parameters import updated_by
from dpframe.task import Task


class Modes:
    """Changes the weights that are in the task. Those of steps are kept in an evaluation, and not
    computed back, which would round them: training does not depend on evaluations and saves."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        parts = (part for optimizer in optimizers for part in parts_of(optimizer))
        self.optimizers: list[Any] = [
            part
            for part in parts
            if callable(getattr(part, "train", None)) and callable(getattr(part, "eval", None))
        ]
        self._kept: list[Tensor] | None = None  # in an evaluation
        for optimizer in self.optimizers:
            optimizer.train()

    @torch.no_grad()
    def eval(self) -> None:
        if self.optimizers and self._kept is None:
            self._kept = [weight.detach().clone() for weight in self._weights()]
            for optimizer in self.optimizers:
                optimizer.eval()

    @torch.no_grad()
    def train(self) -> None:
        if self._kept is not None:
            for optimizer in self.optimizers:
                optimizer.train()
            for weight, kept in zip(self._weights(), self._kept, strict=True):
                weight.copy_(kept)
            self._kept = None

    @contextmanager
    def training(self) -> Iterator[None]:
        """Within, the weights are those of steps."""
        is_training = self._kept is None
        self.train()
        try:
            yield
        finally:
            if not is_training:
                self.eval()

    def both(self, task: Task) -> dict[str, Any]:
        """For a checkpoint, within `training`: a resume takes the task's weights, and all else the
        others."""
        if not self.optimizers:
            return {"task": task.state_dict()}
        own = _copied(task)
        self.eval()
        averaged = _copied(task)
        self.train()
        return {"task": own, "averaged": averaged}

    def _weights(self) -> Iterator[Any]:
        return (weight for optimizer in self.optimizers for weight in updated_by(optimizer))


def _copied(task: Task) -> dict[str, Any]:
    state = task.state_dict()
    return {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in state.items()}
