"""A loss that is NaN or infinite ends the run, or its step is left out: it never gets further."""

import logging
import math
from itertools import islice
from typing import TYPE_CHECKING

import torch

from dpframe import task
from dpframe.errors import Failure
from dpframe.strategies.base import Strategy
from dpframe.task import Measured, is_nothing

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer

SHOWN = 20
log = logging.getLogger("dpframe")


class LossGuard:
    """Looks at every loss before its backward, so that the other ranks can't get past it either.

    On a GPU the losses are read where the run waits for it anyway: at log steps, and before a
    validation or a checkpoint. With `on_nonfinite=skip` all processes agree batch by batch.
    """

    def __init__(self, strategy: Strategy, on_nonfinite: str) -> None:
        self._strategy = strategy
        self._skips = on_nonfinite == "skip"
        self._is_deferred = not (self._skips or strategy.device.type in task.READ_AT_ONCE)
        self._unread: list[tuple[list[Measured], int, int]] = []

    def refuses(self, trainer: "Trainer", measured: list[Measured], batch_index: int) -> bool:
        """Whether the step is to be left out; called with each batch's measurements."""
        step = trainer.global_step + 1
        if self._is_deferred:
            self._unread.append((measured, step, batch_index))
            return False
        is_bad = False
        for rows, output in measured:
            if not math.isfinite(output["loss"].item()) and not is_nothing(rows, output):
                is_bad = True
        if not self._skips:
            if is_bad:
                raise _failure(trainer, measured, step, batch_index)
            return False
        if is_bad:
            log.warning("%s; this step is left out", _said(trainer, measured, step, batch_index))
        return self._strategy.tally([float(is_bad)])[0] > 0

    def read(self, trainer: "Trainer") -> None:
        """What was deferred, at one wait."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        losses = [output["loss"] for measured, *_ in unread for _, output in measured]
        place = losses[0].device  # replicas have one each
        if bool(torch.stack([loss.double().to(place) for loss in losses]).isfinite().all()):
            return
        for measured, step, batch_index in unread:
            if not all(math.isfinite(output["loss"].item()) for _, output in measured):
                raise _failure(trainer, measured, step, batch_index)


def _failure(trainer: "Trainer", measured: list[Measured], step: int, batch_index: int) -> Failure:
    kept = trainer.checkpoint
    return Failure(
        f"{_said(trainer, measured, step, batch_index)}; training stopped before the update"
        f"{f', and {kept} is as it was' if kept else ''}; look at those rows, lower "
        "task.optimizer.lr, or leave such steps out with trainer.on_nonfinite=skip"
    )


def _said(trainer: "Trainer", measured: list[Measured], step: int, batch_index: int) -> str:
    shares = _rows(trainer, batch_index)
    found = []
    for number, (here, output) in enumerate(measured):
        value = output["loss"].item()
        if not math.isfinite(value) and not is_nothing(here, output):
            rows = f", rows {_listed(shares[number])}" if shares else ""
            found.append(f"{value}{_place(trainer.strategy, number, len(measured))}{rows}")
    return f"step {step}: the loss is {'; '.join(found)}"


def _place(strategy: Strategy, number: int, of: int) -> str:
    if strategy.world_size > 1:
        return f" on rank {strategy.rank}"
    return f" on replica {number}" if of > 1 else ""


def _rows(trainer: "Trainer", batch_index: int) -> list[list[int]]:
    """The row numbers of a batch of this epoch, share by share; a stream has none."""
    order = trainer.train_loader.order
    if order is None:
        return []
    rows = next(islice(order.epoch(trainer.epoch), batch_index, None))
    shares: list = trainer.strategy.shares(rows)  # type: ignore[arg-type]
    return [(share if len(share) else rows[:1]).tolist() for share in shares]


def _listed(rows: list[int]) -> str:
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return " ".join(map(str, rows[:SHOWN])) + more
