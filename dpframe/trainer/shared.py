"""What every mode of a Trainer needs: a placed task, its data, and where and how they run."""

from dataclasses import dataclass

from dpframe.data import DataModule, Loader
from dpframe.launch.signals import Interruption
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.evaluation import Evaluation
from dpframe.trainer.feed import evaluated
from dpframe.trainer.placement import Precision
from dpframe.trainer.settings import TrainerSettings
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

    def evaluations(
        self, kind: str, settings: TrainerSettings, loaders: dict[str, Loader] | None = None
    ) -> dict[str, Evaluation]:
        """Of the `val`, `test` or `predict` data sets, by their names."""
        if loaders is None:
            loaders = evaluated(kind, self.data, self.strategy, settings, seed=self.seed)
        return {
            name: Evaluation(
                self.task,
                kind,
                loader,
                self.strategy,
                name=name,
                precision=self.precision,
                limit_batches=settings.limit(kind, loader.batches),
                task_metrics=self.task_metrics,
                interruption=self.interruption,
            )
            for name, loader in loaders.items()
        }
