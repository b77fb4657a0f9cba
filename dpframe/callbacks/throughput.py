"""What training makes of its devices: tokens and operations a second, and memory."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from dpframe.callbacks.monitor import count_in
from dpframe.data import Batch
from dpframe.devices import memory
from dpframe.devices.peaks import peak_flops
from dpframe.trainer.callback import Callback
from dpframe.values import refuse_below

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

NOT_COUNTED = "callbacks.throughput was counting operations; count_flops=false leaves that out"
log = logging.getLogger("dpframe")


class Throughput(Callback):
    """Beside `step/samples_per_second`, at each step that is logged: `step/tokens_per_second` by
    the steps' `weight`, `step/tflops_per_device`, `step/mfu` and `step/memory_gib`.

    Operations are those of the first step, of products, convolutions and attention, forward and
    backward. They and the memory are those of the main process.
    """

    def __init__(self, count_flops: bool = True, peak_tflops: float | None = None) -> None:
        """`peak_tflops` is of a device whose name does not tell it."""
        refuse_below("callbacks.throughput.peak_tflops", peak_tflops, least=0.0)
        self.count_flops = count_flops
        self.peak_tflops = peak_tflops
        self.flops_per_row = 0.0  # 0: not counted
        self.is_to_count = False
        self._flops = 0.0  # of the step at hand
        self._counter: FlopCounterMode | None = None
        # Of the newest steps' means, among all rows that were seen; None: a resumed run had none.
        self._first_row: int | None = None

    def reset(self) -> None:
        self._first_row = 0

    def on_fit_start(self, trainer: "Trainer") -> None:
        strategy = trainer.strategy
        self.is_to_count = self.count_flops and not self.flops_per_row
        has_threads = strategy.replicas > strategy.world_size or strategy.has_fixed_shares
        if self.is_to_count and has_threads:  # of which torch's counter sees one
            self.is_to_count = False
            log.info("callbacks.throughput needs a process for each replica to count operations")
        name_of = getattr(torch.get_device_module(strategy.device), "get_device_name", None)
        peak = None if name_of is None else peak_flops(name_of(strategy.device))
        self._peak = 1e12 * self.peak_tflops if self.peak_tflops else peak
        # What a backward computes again is use of the hardware, not of the model.
        self._utilization = "step/hfu" if trainer.settings.checkpoint_activations else "step/mfu"

    def on_epoch_start(self, trainer: "Trainer") -> None:
        if trainer.progress.batches_done == 0:  # here the means begin again
            self._first_row = trainer.progress.rows_seen

    def on_batch_start(self, trainer: "Trainer", batch: Batch) -> None:
        if self.is_to_count and self._counter is None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_before_step(self, trainer: "Trainer") -> None:
        if self._counter is not None:
            self._flops += self._counted(self._counter)

    def on_step_end(self, trainer: "Trainer") -> None:
        if self.is_to_count:
            self._end_count(trainer)
        step, numbers = trainer.recorder.last
        if step == trainer.global_step and "step/samples_per_second" in numbers:
            rate = numbers["step/samples_per_second"]
            trainer.recorder.log(self._numbers(trainer, rate), step=step)

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None:
        if self._counter is not None:
            self._counted(self._counter)
            error.add_note(NOT_COUNTED)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._first_row is None else {"first_row": self._first_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._first_row = count_in(state, "first_row", "callbacks.throughput")

    def _counted(self, counter: FlopCounterMode) -> float:
        self._counter = None
        counter.__exit__(None, None, None)
        return model_flops(counter.get_flop_counts().get("Global", {}))

    def _end_count(self, trainer: "Trainer") -> None:
        rows = sum(share.rows for batch in trainer.batches for share in batch.shares)
        if self._counter is not None:  # the step was left out before its gradients were whole
            self._counted(self._counter)
        elif rows:
            self.flops_per_row, self.is_to_count = self._flops / rows, False
        self._flops = 0.0

    def _numbers(self, trainer: "Trainer", rows_per_second: float) -> dict[str, float]:
        numbers = {}
        before, self._first_row = self._first_row, trainer.progress.rows_seen
        rows = 0 if before is None else self._first_row - before
        weight = trainer.training.means.weights.get("loss", rows)
        if rows and weight != rows:
            numbers["step/tokens_per_second"] = rows_per_second * weight / rows
        if self.flops_per_row:
            flops = self.flops_per_row * rows_per_second / trainer.strategy.replicas
            numbers["step/tflops_per_device"] = flops / 1e12
            if self._peak:
                numbers[self._utilization] = flops / self._peak
        if taken := max(memory.peak(each) or 0 for each in trainer.strategy.local_devices):
            numbers["step/memory_gib"] = taken / 2**30
        return numbers


def model_flops(counts: Mapping[Any, int]) -> float:
    """Those of the model: of five products in the backward of attention, one computes the scores
    again."""
    again = [
        n for name, n in counts.items() if {"attention", "backward"} <= {*str(name).split("_")}
    ]
    return sum(counts.values()) - sum(again) / 5
