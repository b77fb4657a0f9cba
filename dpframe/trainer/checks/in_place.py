"""A step that changes weights itself: replicas that share them would each do it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpframe.errors import UserError
from dpframe.parameters import Watched
from dpframe.strategies.base import Strategy
from dpframe.task import Task


class InPlace:
    """Within a step, or a hook of a batch, a change of the task's weights is refused, e.g. of a
    momentum encoder's, where several replicas in one process have the same ones."""

    def __init__(self, task: Task, strategy: Strategy, what: str = "training_step") -> None:
        self._task, self._what = task, what
        self._replicas = strategy.replicas
        share = strategy.replicas > strategy.world_size and not strategy.has_fixed_shares
        self.is_needed = share and not task.optimizes_by_hand
        self._weights: Watched | None = None  # before the first time

    def begin(self, *args: Any) -> None:
        if self._weights is None:
            self._weights = Watched(self._task.named_parameters() if self.is_needed else ())
        self._weights.begin()

    def end(self, *args: Any) -> None:
        if self._weights is not None and (changed := self._weights.changed()):
            kind = self._task.own_class.__name__
            is_around = self._task.own_class is not type(self._task)
            way = "" if is_around else ", or change it in on_step_end"
            raise UserError(
                f"{kind}.{self._what} changes {changed}, which {self._replicas} replicas in one "
                f"process share: each would change it in every step; use strategy=ddp{way}"
            )

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.begin()
        yield
        self.end()
