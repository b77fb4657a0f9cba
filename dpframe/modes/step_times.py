"""How long each replica computes in a step: its share's forward and backward, and the update."""

import threading
import time
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from dpframe.modes.measure import WARM_UPS
from dpframe.trainer import Trainer
from dpframe.trainer.callback import Callback
from dpframe.trainer.step import TrainStep

TIMED = 20  # steps, after the warm-up; the others cost nothing


class StepTimes(Callback):
    """The replicas of this process, by hooks on the module that computes their losses.

    On the CPU: the processor time of the thread that computes a replica, so waiting does not count.
    On a GPU: from a share's first kernel to its last one, with all waiting in between. The update
    is the first replica's.
    """

    def __init__(self) -> None:
        self._steps: list[list[tuple[int, Any, Any]]] = []  # replica, start, stop
        self._spans: list[tuple[int, Any, Any]] = []  # of this step
        self._open: dict[int, Any] = {}  # when a replica's span has started
        self._calls = 0  # of this batch
        self._within: dict[int, int] = {}  # by thread, the replica whose forward it computes
        self._handles: list[Any] = []
        self._places: list[torch.device] = []
        self._is_on_gpus = False

    def seconds(self) -> list[float] | None:
        """Of a step, by replica; None: not measured."""
        for place in self._places if self._is_on_gpus else ():
            torch.accelerator.synchronize(place)
        sums = [[0.0] * len(self._places) for _ in self._steps]
        for numbers, spans in zip(sums, self._steps, strict=True):
            for replica, start, stop in spans:
                took = start.elapsed_time(stop) / 1000 if self._is_on_gpus else stop - start
                numbers[replica] += took
        return [median(column) for column in zip(*sums, strict=True)] or None

    def on_fit_start(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        is_one = strategy.world_size > 1 or strategy.replicas == 1
        devices = [strategy.device] if is_one else strategy.devices
        self._places = [torch.device(device) for device in devices]
        self._is_on_gpus = strategy.device.type != "cpu"

    def on_step_end(self, trainer: Trainer) -> None:
        if self._handles:
            self._stop(0)
            self._steps.append(self._spans)
            self._spans = []
        if trainer.global_step == WARM_UPS and _can_be_timed(trainer):
            for module in trainer.update.module.modules():
                if isinstance(module, TrainStep):
                    self._handles.append(module.register_forward_pre_hook(self._begin))
                    self._handles.append(module.register_forward_hook(self._end))
        elif len(self._steps) == TIMED:
            self.on_fit_end(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def on_batch_start(self, trainer: Trainer, batch: Any) -> None:
        self._calls = 0
        if self._handles and self._is_on_gpus:
            self._start(0)

    def on_batch_end(self, trainer: Trainer, batch: Any, outputs: Any) -> None:
        if self._handles:
            for replica in list(self._open):
                if replica or not self._is_on_gpus:  # a GPU's first span ends with the step
                    self._stop(replica)

    def on_before_step(self, trainer: Trainer) -> None:
        if self._handles:
            self._start(0)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        replica = self._within[threading.get_ident()] = self._replica()
        self._calls += 1
        self._start(replica)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        replica, loss = self._within.pop(threading.get_ident()), output[0]
        if not self._is_on_gpus:
            self._stop(replica)
            if loss.requires_grad:
                loss.register_hook(partial(self._enter_backward, replica))

    def _enter_backward(self, replica: int, gradient: Any) -> None:
        """On the CPU one thread computes the replicas' backwards, one after the other."""
        for other in list(self._open):
            self._stop(other)
        self._start(replica)

    def _replica(self) -> int:
        if len(self._places) == 1:
            return 0
        if not self._is_on_gpus:
            return self._calls  # they take turns
        return [place.index for place in self._places].index(
            torch.accelerator.current_device_index()
        )

    def _start(self, replica: int) -> None:
        if replica not in self._open:
            self._open[replica] = self._mark(replica)

    def _stop(self, replica: int) -> None:
        if replica in self._open:
            start = self._open.pop(replica)
            self._spans.append((replica, start, self._mark(replica)))

    def _mark(self, replica: int) -> Any:
        if not self._is_on_gpus:
            return time.thread_time()
        place = self._places[replica]
        event = torch.Event(place, enable_timing=True)
        event.record(torch.accelerator.current_stream(place))
        return event


def _can_be_timed(trainer: Trainer) -> bool:
    """A graph would break at each hook, and a logical share is no replica's whole one."""
    is_compiled = trainer.settings.compile_mode is not None
    is_usual = len(trainer.updates) == 1 and not trainer.task.optimizes_by_hand
    return is_usual and not is_compiled and not trainer.strategy.logical_shares
