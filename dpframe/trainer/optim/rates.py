"""`task.scale_lr`: learning rates for another batch than the one that they were chosen for."""

from typing import Any

from torch.optim import Optimizer

from dpframe.errors import UserError
from dpframe.task import SeenProgress, Task
from dpframe.trainer.settings import TrainerSettings, scale_settings


class ScaledRates:
    """Multiplies the learning rates for the optimizer's step, and restores them after it, so that
    schedulers, checkpoints and callbacks see the rates that are set."""

    def __init__(self, given: Any, *, rows: int, job: SeenProgress) -> None:
        """`rows` of an update, over all replicas."""
        self.settings = scale_settings(given)
        self.rows = rows
        self.job = job
        self.scale = self.settings.scale(rows)

    @staticmethod
    def of(task: Task, settings: TrainerSettings, batch_size: int) -> "ScaledRates":
        kind = task.own_class.__name__
        if task.optimizes_by_hand:
            raise UserError(
                f"task.scale_lr={task.scale_lr}: {kind} steps its optimizers itself; scale the "
                "rates in it, and leave task.scale_lr out"
            )
        if not batch_size:
            raise UserError(
                f"task.scale_lr={task.scale_lr}: how many rows dpframe.Batches give is not known "
                "before they are read; set the rates for them, and leave task.scale_lr out"
            )
        job = task.run_context.progress
        assert job is not None
        return ScaledRates(task.scale_lr, rows=batch_size * settings.accumulate, job=job)

    def now(self) -> float:
        """The factor at this step. Warm-up rises from 1; a scale below 1 has none."""
        done, steps = self.job.global_step, self.settings.warmup_steps
        if done >= steps or self.scale < 1:
            return self.scale
        return 1 + (self.scale - 1) * done / steps

    def apply(self, optimizer: Optimizer) -> None:
        factor, self._set = self.now(), [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor  # which may be a tensor

    def undo(self, optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._set, strict=True):
            group["lr"] = rate

    def __str__(self) -> str:
        settings, rows = self.settings, self.rows
        line = (
            f"task.scale_lr: an update has {rows} rows, {rows / settings.batch_size:.4g} times the "
            f"{settings.batch_size} that the rates are for: they are {self.scale:.4g} times what "
            f"is set ({settings.factor:g} for twice the rows)"
        )
        if settings.warmup_steps and self.scale > 1:
            line += f", after {settings.warmup_steps} steps of warm-up"
        return line
