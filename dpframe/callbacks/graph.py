"""The model as a graph, for TensorBoard's GRAPHS tab."""

import logging
import warnings
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpframe import seeding
from dpframe.data import Batch
from dpframe.data.module import leaves, mapped
from dpframe.errors import first_line
from dpframe.task import Task
from dpframe.trainer.callback import Callback
from dpframe.trainer.default_dtype import default_dtype
from dpframe.trainer.evaluation import restore_modes

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

log = logging.getLogger("dpframe")


class Graph(Callback):
    """Traces `predict_step` on the first batch, without changing what is trained.

    What can't be traced is one warning.
    """

    def on_fit_start(self, trainer: "Trainer") -> None:
        # A resumed run has its graph.
        self.is_missing = bool(trainer.loggers) and trainer.global_step == 0
        if self.is_missing and trainer.strategy.sharding is not None:
            self.is_missing = False
            _warn(f"{trainer.strategy.name} has parts of the weights only", trainer.task)

    def on_batch_start(self, trainer: "Trainer", batch: Batch) -> None:
        shares = [share.batch for share in batch.shares if share.rows] if self.is_missing else []
        if not shares:
            return
        self.is_missing = False
        task = trainer.task
        tensors = tensors_in(shares[0])
        named = type(type(task).__name__, (PredictStep,), {})  # as the graph shows it
        module = named(task, shares[0], list(tensors))
        with (
            restore_modes(task),
            torch.no_grad(),
            seeding.seeded(trainer.seed),
            default_dtype(trainer.precision.dtype),
            warnings.catch_warnings(action="ignore"),
        ):
            task.eval()
            for logger in trainer.loggers:
                try:
                    logger.graph(module, tuple(tensors.values()))
                except Exception as error:  # torch raises many kinds
                    _warn(first_line(error), task)


class PredictStep(nn.Module):
    """`predict_step` of those tensors of a batch whose numbers, among its leaves, are `used`."""

    def __init__(self, task: Task, batch: Any, used: Sequence[int]) -> None:
        super().__init__()
        self.task = task
        self.batch = mapped(lambda leaf: None if isinstance(leaf, Tensor) else leaf, batch)
        self.used = list(used)

    def forward(self, *tensors: Tensor) -> Any:
        given = dict(zip(self.used, tensors, strict=True))
        numbers = count()
        batch = mapped(lambda leaf: given.get(next(numbers), leaf), self.batch)
        return self.task.predict_step(batch)


def tensors_in(batch: Any) -> dict[int, Tensor]:
    """The tensors of a batch by their numbers among its leaves."""
    return {at: leaf for at, leaf in enumerate(leaves(batch)) if isinstance(leaf, Tensor)}


def _warn(reason: str, task: Task) -> None:
    log.warning("callbacks.graph: %s can't be shown: %s", type(task).__name__, reason)
