"""What a run tells its loggers: its config, its numbers, its model."""

import logging
import time
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dpframe.data import Batch
from dpframe.loggers import Guarded, Logger
from dpframe.loggers.base import Scalar
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.predictions import on_cpu

BETWEEN_FLUSHES = 0.2  # seconds
log = logging.getLogger("dpframe")
TELLING = ("max_epochs", "max_steps", "precision", "accumulate", "clip_norm", "clip_value")


@dataclass
class Run:
    """Where a run's files go, and the config it came from."""

    directory: str = ""  # none
    recipe: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    public: dict[str, Any] | None = None  # `config` as files may have it; None: as it is
    config_text: str = ""
    is_repeated: bool = False  # from its first step, in the directory of a job that failed


class Report:
    def __init__(self, loggers: Iterable[Logger], run: Run) -> None:
        self.loggers = [Guarded(logger) for logger in loggers]
        self.run = run
        self._flushed_at = 0.0
        self.last: tuple[int, dict[str, float]] = (-1, {})  # the newest step that has numbers

    def reopen(self, strategy: Strategy, scalars: dict[str, float], *, step: int) -> None:
        """Goes on after `step`, which has had these numbers so far: what else there is goes."""
        self.open(strategy, purge_step=step)
        if scalars:
            self.log(scalars, step=step)

    def open(self, strategy: Strategy, *, purge_step: int | None = None) -> None:
        run = self.run
        purge_step = 0 if run.is_repeated and purge_step is None else purge_step
        facts: dict[str, Scalar] = {"strategy": strategy.name, "replicas": strategy.replicas}
        for logger in self.loggers:
            logger.open(
                run.directory,
                config=run.config_text,
                hparams=facts | hyperparameters(run.config if run.public is None else run.public),
                purge_step=purge_step,
            )

    def graph(self, task: Task, batch: Batch) -> None:
        """Drawn from a copy, so that nothing of it can reach training."""
        try:
            module = Predict(deepcopy(task).cpu())
        except Exception as error:  # it holds an open file, say
            log.warning("no model graph: %s can't be copied: %s", type(task).__name__, error)
            return
        for logger in self.loggers:
            logger.graph(module, on_cpu(batch.shares[0].batch))

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        before = self.last[1] if self.last[0] == step else {}
        self.last = step, before | scalars
        for logger in self.loggers:
            logger.log(scalars, step=step)

    def tend(self) -> None:
        """What was logged is to survive the process, but for what is newer than this."""
        if time.perf_counter() - self._flushed_at > BETWEEN_FLUSHES:
            self.flush()

    def flush(self) -> None:
        self._flushed_at = time.perf_counter()
        for logger in self.loggers:
            logger.flush()

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        for logger in self.loggers:
            logger.close(metrics, succeeded=succeeded)


class Predict(nn.Module):
    """A task as the module that a graph shows: its batch in, its prediction out."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Any) -> Any:
        return self.task.predict_step(batch)


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """What decides the curve, by its key: the task, the data and some of the trainer's settings."""
    kept = {name: part for name in ("task", "data") if (part := config.get(name))}
    trainer = config.get("trainer", {})
    kept["trainer"] = {name: trainer[name] for name in TELLING if name in trainer}
    return flat(kept) | {name: config[name] for name in ("recipe", "seed") if name in config}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """`{"task": {"optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01}}}` as
    `{"task.optimizer": "Adam", "task.optimizer.lr": 0.01}`; nulls and lists are left out."""
    numbers: dict[str, Scalar] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            if "_target_" in value and prefix:
                numbers[f"{prefix}{name}"] = str(value["_target_"]).rpartition(".")[2]
            numbers |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float, str, bool)) and not name.startswith("_"):
            numbers[f"{prefix}{name}"] = value
    return numbers
