"""Means over the weights that steps return, e.g. tokens, in place of means over rows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpframe.accelerator import has_float64
from dpframe.data import move
from dpframe.errors import UserError
from dpframe.metrics import SOMETIMES_WEIGHTED
from dpframe.strategies.collectives import Collectives
from dpframe.trainer.outputs import Measured


@dataclass
class Weighting:
    """Of the steps of one optimizer: all return a weight, or none does.

    The backwards add up to a gradient that is divided by the rows. The sum of the weights is known
    after the forwards, so what it has to be multiplied by comes later.
    """

    collectives: Collectives
    device: torch.device
    is_exact: bool = False
    is_used: bool | None = None  # None before the first batch

    def of(self, measured: list[Measured]) -> list[Any]:
        """Each share's weight; none where steps return no weight.

        The processes agree once, after the first batch; a later batch that differs is refused in
        the process that has it."""
        if self.is_used is None:
            here = {"weight" in output for _, output in measured}
            several = self.collectives.sum_numbers([float(True in here), float(False in here)])
            if 0.0 not in several:
                raise UserError(SOMETIMES_WEIGHTED)
            self.is_used = several[0] > 0
        for _, output in measured:
            if ("weight" in output) is not self.is_used:
                raise UserError(SOMETIMES_WEIGHTED)
        return [output["weight"] for _, output in measured] if self.is_used else []

    def factor(self, rows: int, weights: list[Any]) -> Tensor:
        """The rows of the whole step over the sum of its weights; 0 where that sum is 0."""
        device = self.device
        if not has_float64(device):  # the host sums them
            device, weights = torch.device("cpu"), [float(weight) for weight in weights]
        if self.is_exact:  # the host sums them without rounding
            column = [float(weight) for weight in weights]
            weights = self.collectives.sum_columns([column], is_exact=True)
        here = torch.zeros((), dtype=torch.float64, device=device)
        for weight in weights:  # numbers, and tensors on any replica's device
            here = here + move(weight, here.device)
        total = here if self.is_exact else self.collectives.sum(here.sum())
        return torch.where(total == 0, 0.0, rows / total)


class IgnoredWeights(Weighting):
    """Where a task steps its optimizers itself: a weight that it returns counts in means alone."""

    def of(self, measured: list[Measured]) -> list[Any]:
        return []
