"""An optimizer whose step is the LightningModule's `optimizer_step`."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpframe.accelerator import has_float64
from dpframe.strategies.base import Strategy
from dpframe.trainer.outputs import Measured


class StepsByModule(Optimizer):
    """An optimizer whose step is the module's `optimizer_step`: all else is the optimizer's own."""

    def __init__(self, optimizer: Optimizer, task: Any) -> None:
        self.optimizer = optimizer
        self.task = task

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        task = self.task
        at = task.current_epoch, task.run_context.batch_index
        task.module.optimizer_step(*at, self.optimizer, closure or task.loss_of_step)

    def __getattribute__(self, name: str) -> Any:
        own = ("optimizer", "task", "step", "__class__", "__dict__")
        if name in own:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "optimizer"), name)


class StepsAgain(StepsByModule):
    """For an optimizer that computes the gradients several times, e.g. LBFGS."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        super().step(closure)


def mean_loss(outputs: list[Measured], strategy: Strategy, device: torch.device) -> Tensor:
    """Over the rows of all processes, from this one's rows and what their steps measured."""
    if strategy.logical_shares:  # added up without rounding
        losses = [rows * float(output["loss"]) for rows, output in outputs]
        total, count = strategy.collectives.sum_columns(
            [losses, [rows for rows, _ in outputs]], is_exact=True
        )
        return torch.tensor(total / count, device=device)
    dtype = torch.float64 if has_float64(device) else torch.float32
    sums = torch.zeros(2, dtype=dtype, device=device)
    for rows, output in outputs:
        sums[0] += rows * output["loss"].detach().to(sums)
        sums[1] += rows
    total, count = strategy.collectives.sum(sums)
    return total / count
