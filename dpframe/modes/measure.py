"""Measures a training of some steps on one replica: when they end, and what they hold in memory."""

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpframe.data import DataModule
from dpframe.data.module import tensors_of
from dpframe.data.source import Source
from dpframe.devices.memory import begin_peak, peak
from dpframe.errors import UserError
from dpframe.launch import signals
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer import Trainer
from dpframe.trainer.settings import TrainerSettings

WARM_UPS = 3  # steps that make the optimizer's state and fill the caches


class Probe(Strategy):
    """The simplest strategy, which the loop calls at each part of a step, watches what it costs."""

    kept: dict[int, Any] | None = None  # by their address: what the step keeps for its backward
    peak: int | None = None

    def setup(self) -> None:
        super().setup()
        self.ends: list[float] = []  # of the steps
        self.held: list[int] = []  # bytes that each step kept, at most
        self._most = 0
        if self.device.type != "cpu":
            begin_peak(self.device)

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        if training:
            self.lasting = [*module.parameters(), *module.buffers()]
            module.register_forward_pre_hook(lambda _, inputs: self.begin_forward(inputs[0].batch))
        return module

    def keep(self, tensor: Tensor) -> Tensor:
        if self.kept is not None:
            storage = tensor.untyped_storage()
            self.kept[storage.data_ptr()] = storage  # alive, so that no other takes its address
        return tensor

    def begin_forward(self, batch: Any) -> None:
        if self.kept:
            self._count()
        for tensor in tensors_of(batch) if self.kept is not None else ():
            self.keep(tensor)

    def sync_weights(self, for_reading: bool) -> None:
        """After an update, if nobody is about to read the weights."""
        if for_reading:
            return
        self.ends.append(now(self.device))
        if self.kept is not None:
            self._count()
            self.held.append(self._most)
            self._most = 0
        if self.device.type != "cpu":
            self.peak = peak(self.device)
        signals.raise_if_signaled()

    def _count(self) -> None:
        """What was kept for a backward that is over by now; several optimizers have one each."""
        assert self.kept is not None
        lasting = {tensor.untyped_storage().data_ptr() for tensor in self.lasting}
        here = sum(s.nbytes() for at, s in self.kept.items() if at not in lasting)
        self._most = max(self._most, here)
        self.kept.clear()


class Sampled(DataModule):
    """Rows of another data set, in batches of the sizes to measure.

    There is one batch more than training takes: an epoch that doesn't end calls no schedule, and
    a schedule may refuse more steps than its training has.
    """

    def __init__(self, source: Source, batches: list[Tensor], sizes: list[int]) -> None:
        super().__init__(max(sizes))
        self.dataset = source.dataset
        self.collate = source.collate  # type: ignore[method-assign,assignment]
        longest = cycle(batch.tolist() for batch in batches if len(batch) >= max(sizes))
        self.batches = [next(longest)[:rows] for rows in [*sizes, max(sizes)]]

    def train_dataset(self) -> Dataset:
        return self.dataset

    def train_sampler(self, dataset: Dataset) -> list[list[int]]:
        return self.batches


def short(settings: TrainerSettings, *, steps: int) -> TrainerSettings:
    """Settings of a training of some steps that logs nothing."""
    return replace(
        settings,
        accumulate=1,
        limit_train_batches=None,
        log_every=steps + 1,
        max_epochs=1,
        max_seconds=None,
        max_steps=steps,
        profile=False,
        scheduler_every="epoch",
        share_check="off",
        validate_every_steps=None,
    )


def refuse_by_hand(task: Task, mode: str) -> None:
    if task.optimizes_by_hand:
        name = task.own_class.__name__
        raise UserError(
            f"{mode} times the parts of a step, and {name} steps its optimizers itself; try "
            "mode=compare, which times whole steps"
        )


def devices_of(strategy: Strategy) -> list[str]:
    """The devices of the replicas, without starting a rank."""
    if strategy.launches_ranks:
        return [str(device) for device in strategy.choose_devices(default=None)]
    with strategy:
        return strategy.devices


def now(device: torch.device) -> float:
    """The time; on a GPU (not tried on one) after all work that is queued there."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def lasting_bytes(trainer: Trainer) -> int:
    """The bytes of what lasts between two steps, and of the gradients."""
    parameters = list(trainer.task.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    states = [tensors_of(update.optimizer.state) for update in trainer.updates.values()]
    return bytes_of(chain(parameters, trained, trainer.task.buffers(), *states))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
