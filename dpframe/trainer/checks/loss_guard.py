"""The loss guard: a loss that is NaN or infinite ends the run, or its step is left out."""

import logging
import math
import shlex
from typing import Any, NamedTuple

import torch

from dpframe.checkpoint import seal
from dpframe.errors import Failure, listed
from dpframe.strategies.base import Strategy
from dpframe.trainer import outputs
from dpframe.trainer.outputs import Measured, is_nothing
from dpframe.trainer.progress import Progress

SHOWN = 20  # rows of a bad batch
AT_ONCE = "training stopped before the update, and every checkpoint is as it was"
log = logging.getLogger("dpframe")


class Losses(NamedTuple):
    """What a batch's replicas measured, and which batch it was."""

    measured: list[Measured]
    step: int
    epoch: int
    batch_index: int


class LossGuard:
    """Checks every loss before its backward, so that no rank gets past a bad one.

    On a GPU, losses are read where the run waits for the device anyway: at log steps, and before
    a validation or a checkpoint. With `on_nonfinite=skip` all processes agree batch by batch.
    """

    def __init__(self, strategy: Strategy, on_nonfinite: str, order: Any) -> None:
        """`order` has the rows of each epoch's batches; None for a stream."""
        self._strategy = strategy
        self._skips = on_nonfinite == "skip"
        self._order = order
        self._is_deferred = not (self._skips or strategy.device.type in outputs.READ_AT_ONCE)
        self._unread: list[Losses] = []

    def refuses(self, measured: list[Measured], progress: Progress, batch_index: int) -> bool:
        """Whether to leave out the step; called with what each of its batches measured."""
        losses = Losses(measured, progress.global_step + 1, progress.epoch, batch_index)
        if self._is_deferred:
            self._unread.append(losses)
            return False
        is_bad = False
        for _, output in measured:
            if not math.isfinite(output["loss"].item()) and not is_nothing(output):
                is_bad = True
        if not self._skips:
            if is_bad:
                raise self._failure(losses, AT_ONCE)
            return False
        if is_bad:
            log.warning("%s; this step is left out", self._described(losses))
        return self._strategy.collectives.sum_numbers([float(is_bad)])[0] > 0

    def refuses_norm(self, norm: torch.Tensor, progress: Progress) -> bool:
        """Whether to leave out the step whose gradients have this norm. All processes agree."""
        value = norm.item()
        is_bad = not math.isfinite(value)
        if is_bad and self._strategy.is_main:
            log.warning(
                "step %s: the loss is finite, and the norm of its gradients is %s; this step is "
                "left out",
                *(progress.global_step + 1, value),
            )
        return self._strategy.collectives.sum_numbers([float(is_bad)])[0] > 0

    def read(self, step: int, saved: str | None, directory: str) -> None:
        """Checks the deferred losses, after `step`; waits for the device once. `saved` is this
        process's last checkpoint; another one's is in the run's directory."""
        unread, self._unread = self._unread, []
        losses = [output["loss"] for batch in unread for _, output in batch.measured]
        if not losses:
            return
        device = losses[0].device  # replicas have one each
        if bool(torch.stack([loss.isfinite().to(device) for loss in losses]).all()):
            return
        for batch in unread:
            if not all(math.isfinite(output["loss"].item()) for _, output in batch.measured):
                raise self._failure(batch, _late(step, saved, directory))

    def _failure(self, losses: Losses, how: str) -> Failure:
        return Failure(
            f"{self._described(losses)}; {how}; look at those rows, lower task.optimizer.lr, or "
            "set trainer.on_nonfinite=skip to leave out such steps"
        )

    def _described(self, losses: Losses) -> str:
        shares = self._shares_of(losses)
        bad = []
        for index, (_, output) in enumerate(losses.measured):
            loss = output["loss"].item()
            if not math.isfinite(loss) and not is_nothing(output):
                rows = f", rows {listed(shares[index], SHOWN, ' ')}" if shares else ""
                where = self._where(index, len(losses.measured))
                bad.append(f"{loss}{where}{rows}")
        return f"step {losses.step}: the loss is {'; '.join(bad)}"

    def _where(self, index: int, count: int) -> str:
        if self._strategy.world_size > 1:
            return f" on rank {self._strategy.rank}"
        return f" on replica {index}" if count > 1 else ""

    def _shares_of(self, losses: Losses) -> list[list[int]]:
        """The batch's row numbers, share by share; none for a stream."""
        if self._order is None:
            return []
        rows = next(iter(self._order.epoch(losses.epoch, losses.batch_index)))
        shares: list[Any] = self._strategy.split_rows(rows)
        return [share.tolist() for share in shares]


def _late(step: int, saved: str | None, directory: str) -> str:
    """Updates were made with that loss, but a checkpoint is saved only after this look."""
    line = f"losses are read from the device at times, and training stopped after step {step}; "
    line += "every checkpoint is from before that loss"
    if saved or seal.newest_of_run(directory):
        line += f": go on with resume={shlex.quote(directory)}"
    return line
