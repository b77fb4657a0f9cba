"""What every mode of a Trainer needs: a placed task, its data, and where and how they run."""

from dataclasses import dataclass

from dpframe.data import DataModule
from dpframe.launch.signals import Interruption
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.placement import Precision
from dpframe.trainer.task_metrics import TaskMetrics


@dataclass(frozen=True)
class Shared:
    task: Task
    data: DataModule
    strategy: Strategy
    seed: int
    precision: Precision
    task_metrics: TaskMetrics
    interruption: Interruption | None

    @property
    def draws_as(self) -> int:
        """Which process's random numbers this one draws; each logical share has its own."""
        return 0 if self.strategy.logical_shares else self.strategy.rank
