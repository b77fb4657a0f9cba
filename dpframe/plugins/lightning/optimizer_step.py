"""The optimizers of a LightningModule as the Trainer gets them; one may step by the module."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpframe import Strategy, UserError
from dpframe.devices.accelerator import has_float64
from dpframe.plugin import Measured
from dpframe.plugins.lightning.module import owns
from dpframe.plugins.lightning.schedules import ScheduledOptimizer, Schedules


def with_schedules(made: ScheduledOptimizer, task: Any) -> Any:
    """What a Task's `configure_optimizer` returns of it."""
    optimizer = made.optimizer
    if not task.optimizes_by_hand and owns(task.module, "optimizer_step"):
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        needs_it = closure is not None and closure.default is closure.empty
        # Errors show the optimizer's own name.
        kind: Any = type(type(optimizer).__name__, (StepsAgain if needs_it else StepsByModule,), {})
        optimizer = kind(optimizer, task)
    if not made.schedules:
        return optimizer
    return optimizer, Schedules(made.schedules, list(task.module.trainer.lengths.values()))


class StepsByModule(Optimizer):
    """An optimizer whose step is the module's `optimizer_step`: all else is the optimizer's own."""

    def __init__(self, optimizer: Optimizer, task: Any) -> None:
        self.optimizer = optimizer
        self.task = task

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        task = self.task
        at = task.current_epoch, task.run_context.batch_index
        task.module.optimizer_step(*at, self.optimizer, closure or self._loss)

    def _loss(self) -> Tensor:
        """The closure that `optimizer_step` gets: the gradients are there already. It returns the
        mean over all rows of the last batch, the same on every rank."""
        task = self.task
        outputs, task.outputs = task.outputs, None
        if outputs is None:
            name = type(task.module).__name__
            raise UserError(
                f"{name}.optimizer_step calls its closure again in a step, and {name}'s "
                f"{type(self.optimizer).__name__} takes gradients that are computed once; "
                "set self.automatic_optimization = False in __init__ and step it in training_step"
            )
        return mean_loss(outputs, task.held.trainer.strategy, task.device)

    def __getattribute__(self, name: str) -> Any:
        own = ("optimizer", "task", "step", "_loss", "__class__", "__dict__")
        if name in own:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "optimizer"), name)


class StepsAgain(StepsByModule):
    """For an optimizer that computes the gradients several times, e.g. LBFGS."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        super().step(closure)


def mean_loss(outputs: list[Measured], strategy: Strategy, device: torch.device) -> Tensor:
    """Over the rows of all processes, from this one's rows and what their steps measured."""
    if strategy.sums.is_exact:
        losses = [rows * float(output["loss"]) for rows, output in outputs]
        columns = losses, [float(rows) for rows, _ in outputs]
        total, count = strategy.sums.of_columns(columns, strategy.collectives.sum_numbers)
        return torch.tensor(total / count, device=device)
    dtype = torch.float64 if has_float64(device) else torch.float32
    sums = torch.zeros(2, dtype=dtype, device=device)
    for rows, output in outputs:
        sums[0] += rows * output["loss"].detach().to(sums)
        sums[1] += rows
    total, count = strategy.collectives.sum(sums)
    return total / count
