"""`task.schedule` over an optimizer: torch's LambdaLR, stepped after each of its steps."""

from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dpframe.errors import UserError
from dpframe.schedules import LRSchedule
from dpframe.task import Task


class StepSchedule(LambdaLR):
    def __init__(self, optimizer: Optimizer, schedule: LRSchedule, steps: int) -> None:
        """`steps` of the whole training; 0: unknown."""
        self.total_steps = steps if schedule.needs_length else None
        self.described = f"{schedule} over {steps} steps" if self.total_steps else str(schedule)
        super().__init__(optimizer, partial(schedule.factor, steps=steps))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Where it was another schedule or another length, this one goes on from the same step."""
        described, total_steps = self.described, self.total_steps
        super().load_state_dict(state_dict)
        if described != self.described:
            self.described, self.total_steps = described, total_steps
            self.last_epoch -= 1
            self.step()


def schedule_over(optimizer: Optimizer, scheduler: Any, name: str, task: Task) -> StepSchedule:
    """The task's schedule as the optimizer's scheduler, which has none."""
    schedule = task.lr_schedule
    kind = (task.own_class or type(task)).__name__
    if not isinstance(schedule, LRSchedule):
        raise UserError(
            f"{kind}.lr_schedule={schedule} is no schedule; use e.g. "
            "dpframe.schedules.WarmupCosine(warmup=0.03)"
        )
    if task.optimizes_by_hand:
        raise UserError(
            f"task.schedule: {kind} steps its optimizers itself; schedule the rates in it, and "
            "leave task.schedule out"
        )
    if scheduler is not None:
        off = ", e.g. by task.scheduler=null" if task.make_scheduler else ""
        raise UserError(
            f"task.schedule: {kind} has a scheduler already; leave one of them out{off}"
        )
    steps = task.count_turns(name) if name else task.total_steps
    if schedule.needs_length and not task.total_steps:
        raise UserError(
            "task.schedule needs the length of training, and nothing says how long it will be; "
            "set trainer.max_steps"
        )
    return StepSchedule(optimizer, schedule, steps)
