"""A step that `trainer.on_nonfinite=skip` leaves out: all that it has changed is put back.

Not the random numbers that were drawn, nor weights that no optimizer updates.
"""

from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from dpframe.data.copies import OF_MODULES
from dpframe.errors import Failure
from dpframe.parameters import updated_by
from dpframe.task import Task
from dpframe.trainer.optim.step import OptimizerStep
from dpframe.trainer.progress import Progress
from dpframe.trainer.settings import TrainerSettings
from dpframe.trainer.task_metrics import TaskMetrics

MUTABLE = (Tensor, list, tuple, dict, set, deque)  # or with such in it
SHORT = 100  # entries; what is in a longer list, e.g. the outputs so far, is taken to stay
PutBack = Callable[[], object]


class LeftOut:
    """Has what a task was before each turn, and counts the turns that are left out."""

    def __init__(
        self, task: Task, task_metrics: TaskMetrics, progress: Progress, settings: TrainerSettings
    ) -> None:
        self.may_be = settings.on_nonfinite == "skip"
        self._task = task
        self._task_metrics = task_metrics
        self._progress = progress
        self._most = settings.max_skipped_steps  # turns of an optimizer in a row
        self._put_back: list[PutBack] = []
        self._in_row: dict[str, int] = {}  # by optimizer
        self._begun: str | None = None  # the optimizer of the newest turn, if it is not left out
        self._step = 0  # of that turn
        self._is_updated = False  # whether a turn before it in its step was made

    def begin(self, update: OptimizerStep) -> None:
        """Before a turn."""
        step = self._progress.global_step
        if self._begun is not None:
            self._in_row[self._begun] = 0
        is_same_step = self._step == step
        self._is_updated = is_same_step and (self._is_updated or self._begun is not None)
        self._begun, self._step = update.name, step
        self._progress.left_out_step = 0
        self._put_back = [*self._kept(update)]

    def end(self, update: OptimizerStep, *, is_logged: bool) -> None:
        """In place of the rest of the turn."""
        progress = self._progress
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()
        update.skip(is_logged=is_logged)
        self._begun = None
        progress.skipped_steps += 1
        if not self._is_updated:
            progress.left_out_step = self._step + 1
        self._in_row[update.name] = count = self._in_row.get(update.name, 0) + 1
        if self._most is not None and count > self._most:
            raise Failure(
                f"step {self._step + 1}: {count} steps in a row were left out, as their losses or "
                "gradients are not finite; look at their rows, lower task.optimizer.lr, or raise "
                f"trainer.max_skipped_steps={self._most}"
            )

    def _kept(self, update: OptimizerStep) -> Iterator[PutBack]:
        for module in self._task.modules():
            yield _buffers(module)
            yield _attributes(module)
        yield _attributes(self._task_metrics.added)
        if update.needs_closure:  # it moves the weights before it computes their loss
            yield from map(_content, updated_by(update.optimizer))
            state = deepcopy(update.optimizer.state_dict())
            yield lambda: update.optimizer.load_state_dict(state)


def _buffers(module: nn.Module) -> PutBack:
    kept = [(name, each, _content(each)) for name, each in module.named_buffers(recurse=False)]

    def put_back() -> None:
        for name, buffer, fill in kept:
            fill()
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)

    return put_back


def _attributes(owner: Any) -> PutBack:
    own = vars(owner)
    values = {name: value for name, value in own.items() if name not in OF_MODULES}
    inner = [_content(value) for value in values.values() if isinstance(value, MUTABLE)]

    def put_back() -> None:
        for fill in inner:
            fill()
        for name in own.keys() - values.keys() - OF_MODULES:
            if own[name] is None or isinstance(own[name], (*MUTABLE, bool, int, float)):
                del own[name]
        own.update(values)

    return put_back


def _content(value: Any) -> PutBack:
    """Of a tensor, or a list, tuple, dict, set or deque of values; others are taken to stay."""
    if isinstance(value, Tensor):
        content: Any = value.detach().clone()
        return lambda: value.copy_(content)  # a BatchNorm's versions do not tell its changes
    if not isinstance(value, MUTABLE):
        return lambda: None
    holder: Any = value
    content = value.copy() if isinstance(value, dict | set) else [*value]
    parts: Any = content.values() if isinstance(value, dict) else content
    parts = parts if len(parts) <= SHORT else ()
    inner = [_content(part) for part in parts if isinstance(part, MUTABLE)]

    def put_back() -> None:
        for fill in inner:
            fill()
        if not isinstance(value, tuple):  # somebody else may hold the same one
            holder.clear()
            (holder.update if isinstance(value, dict | set) else holder.extend)(content)

    return put_back
