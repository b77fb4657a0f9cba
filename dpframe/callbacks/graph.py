"""The model as a graph, for TensorBoard's GRAPHS tab."""

import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpframe import seeding
from dpframe.data import Batch
from dpframe.data.module import mapped, tensors_of
from dpframe.errors import first_line
from dpframe.task import Task
from dpframe.trainer.callback import Callback
from dpframe.trainer.compute.placement import default_dtype
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
        if self.is_missing and trainer.strategy.sharding.cuts:
            self.is_missing = False
            _warn(f"{trainer.strategy.name} has parts of the weights only", trainer.task)

    def on_batch_start(self, trainer: "Trainer", batch: Batch) -> None:
        shares = [share.batch for share in batch.shares if share.rows] if self.is_missing else []
        if not shares:
            return
        self.is_missing = False
        task = trainer.task
        tensors = tuple(tensors_of(shares[0]))
        module = as_module(task, shares[0])
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
                    logger.graph(module, tensors)
                except Exception as error:  # torch raises many kinds
                    _warn(first_line(error), task)


def as_module(task: Task, batch: Any) -> nn.Module:
    """`predict_step` as a module with the task's name and parts, which takes a batch's tensors."""

    class Model(nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            given = iter(tensors)
            return task.predict_step(
                mapped(lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, batch)
            )

    Model.__name__ = type(task).__name__
    model = Model()
    for name, part in task.named_children():
        model.add_module(name, part)
    for name, parameter in task.named_parameters(recurse=False):
        model.register_parameter(name, parameter)
    for name, buffer in task.named_buffers(recurse=False):
        model.register_buffer(name, buffer)
    return model


def _warn(reason: str, task: Task) -> None:
    log.warning("callbacks.graph: %s can't be shown: %s", type(task).__name__, reason)
