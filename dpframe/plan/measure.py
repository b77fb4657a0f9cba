"""Measures what one replica costs: a training of some steps, with shares of several sizes."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, cycle, islice, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import Dataset

from dpframe import interruption, seeding
from dpframe.data import DataModule
from dpframe.errors import UserError
from dpframe.plan.model import Costs, Gradient, Steps, buckets_of, line_through
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer import Trainer
from dpframe.trainer.feed import Feed
from dpframe.trainer.settings import TrainerSettings

WARM_UPS = 3  # steps that make the optimizer's state and fill the caches
SIZES = 4  # shares measured: the whole batch, a quarter of it, …
LEAST_ROWS = 2  # batch statistics of a single row are refused
TRIES = 5  # backwards of which the quickest says when gradients are ready


class Times(NamedTuple):
    """Seconds of one step, by its parts."""

    read: float
    forward: float
    backward: float
    update: float


class Measured(NamedTuple):
    device: str
    costs: Costs
    steps: Steps
    times: dict[int, Times]  # by the rows of a share: the medians
    error: float  # the largest relative one of the lines that the costs have for these
    spread: float  # the largest relative distance from the median that half of the steps kept


def measure(
    task: Task,
    data: DataModule,
    settings: TrainerSettings,
    *,
    accelerator: str,
    seed: int,
    steps: int,
    copies_gradients: bool = False,
) -> Measured:
    """Trains the task for a while, by the Trainer's own loop on one replica."""
    clock = Stopwatch(accelerator=accelerator)
    memory, arrivals = Memory(accelerator=accelerator), Arrivals(accelerator=accelerator)
    clock.open()
    data.setup()
    feed = Feed.of(data, clock, settings, seed=seed)
    if feed.train.order is None:
        raise UserError(
            f"mode=plan: {type(data).__name__}.train_dataset() is a stream, so the steps of its "
            "epoch are unknown; plan with a data set that has a length"
        )
    batches = list(islice(feed.train.order.epoch(0), settings.limit_train_batches))
    whole = max(map(len, batches))
    least = min(LEAST_ROWS, whole)
    ratio = (least / whole) ** (1 / (SIZES - 1))
    sizes = sorted({round(whole * ratio**power) for power in range(SIZES)}, reverse=True)

    def fitted(strategy: Strategy, rows: list[int]) -> Trainer:
        strategy.open()
        sampled = Sampled(data, feed.dataset, batches, rows)
        kept = _settings(settings, steps=len(rows))
        trainer = Trainer(task, sampled, strategy=strategy, settings=kept, seed=seed)
        trainer.fit()
        return trainer

    with seeding.seeded(seed):
        # The sizes take turns, so that a machine that slows down slows all of them.
        trainer = fitted(clock, sizes * (WARM_UPS + steps))
        with saved_tensors_hooks(memory.keep, lambda tensor: tensor):
            fitted(memory, sizes)
        fitted(arrivals, [whole] * TRIES)
    taken = {rows: clock.times[i :: len(sizes)][WARM_UPS:] for i, rows in enumerate(sizes)}
    times = {
        rows: Times(*(median(part) for part in zip(*each, strict=True)))
        for rows, each in taken.items()
    }
    lines = [line_through({rows: each[part] for rows, each in times.items()}) for part in range(3)]
    costs = Costs(
        read=lines[0],
        forward=lines[1],
        backward=lines[2],
        update=median(each.update for each in times.values()),
        parameters=_bytes(task.parameters()),
        gradients=_bytes(p for p in task.parameters() if p.requires_grad),
        optimizer=_bytes(_tensors(trainer.update.optimizer.state)),
        buffers=_bytes(task.buffers()),
        activations=line_through(dict(zip(sizes, map(float, memory.held), strict=True))),
        buckets=buckets_of(arrivals.gradients()),
        workers=feed.train.workers.processes,
        copies_gradients=copies_gradients,
        small_reduces=bool(trainer.update.is_weighted)
        + (settings.on_nonfinite == "skip") * settings.accumulate,
        peak=clock.peak,
    )
    fits = {rows: sum(line.at(rows) for line in lines) + costs.update for rows in times}
    error = max(abs(fits[rows] / sum(each) - 1) for rows, each in times.items())
    spread = max(_spread([sum(each) for each in one_size]) for one_size in taken.values())
    lengths = map(len, batches)
    updates = Counter(iter(lambda: tuple(islice(lengths, settings.accumulate)), ()))
    return Measured(str(clock.device), costs, updates, times, error, spread)


class Sampled(DataModule):
    """Rows of another DataModule, in batches of the sizes to measure.

    There is one batch more than training takes: an epoch that doesn't end calls no schedule, and
    a schedule may refuse more steps than its training has.
    """

    def __init__(
        self, data: DataModule, dataset: Dataset, batches: list[Tensor], sizes: list[int]
    ) -> None:
        super().__init__(max(sizes))
        self.dataset = dataset
        self.collate = data.collate  # type: ignore[method-assign]
        longest = cycle(batch.tolist() for batch in batches if len(batch) >= max(sizes))
        self.batches = [next(longest)[:rows] for rows in [*sizes, max(sizes)]]

    def train_dataset(self) -> Dataset:
        return self.dataset

    def train_sampler(self, dataset: Dataset) -> list[list[int]]:
        return self.batches


def _settings(settings: TrainerSettings, *, steps: int) -> TrainerSettings:
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
        validate_every_steps=None,
    )


# ---- what measures: the simplest strategy, which the loop calls at each part of a step


class Stopwatch(Strategy):
    """The seconds of each part of each step."""

    def setup(self) -> None:
        super().setup()
        self.times: list[Times] = []
        self.laps = [_now(self.device)]
        self.peak: int | None = None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        if training:
            module.register_forward_pre_hook(lambda *_: self._lap())
            module.register_forward_hook(lambda *_: self._lap())
        return module

    def check_gradients(self) -> None:
        self._lap()

    def weight_sync(self, is_read: bool) -> None:
        """After an update, if nobody is about to read the weights."""
        if is_read:
            return
        self._lap()
        seconds = [end - start for start, end in pairwise(self.laps)]
        if len(seconds) == len(Times._fields):  # a step with a NaN may be left out
            self.times.append(Times(*seconds))
        self.laps = self.laps[-1:]
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated()
        interruption.look()

    def _lap(self) -> None:
        self.laps.append(_now(self.device))


class Memory(Strategy):
    """The bytes that each step keeps for its backward: activations and the batch itself."""

    def setup(self) -> None:
        super().setup()
        self.kept: dict[int, Any] = {}
        self.held: list[int] = []

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.kept[storage.data_ptr()] = storage  # alive, so that no other takes its address
        return tensor

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        if training:
            self.lasting = [*module.parameters(), *module.buffers()]
            module.register_forward_pre_hook(lambda _, inputs: self._keep_batch(inputs[0].batch))
        return module

    def _keep_batch(self, batch: Any) -> None:
        for tensor in _tensors(batch):
            self.keep(tensor)

    def weight_sync(self, is_read: bool) -> None:
        lasting = {tensor.untyped_storage().data_ptr() for tensor in self.lasting}
        if not is_read:
            kept = (storage.nbytes() for at, storage in self.kept.items() if at not in lasting)
            self.held.append(sum(kept))
        self.kept.clear()


class Arrivals(Strategy):
    """When backward has made each gradient."""

    def setup(self) -> None:
        super().setup()
        self.tries: list[tuple[float, dict[Tensor, float]]] = []

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        if training:
            self.trained = [p for p in module.parameters() if p.requires_grad]
            for parameter in self.trained:
                parameter.register_post_accumulate_grad_hook(self._arrived)
            module.register_forward_hook(lambda *_: self._begin())
        return module

    def _begin(self) -> None:
        self.arrived: dict[Tensor, float] = {}
        self.began = _now(self.device)

    def _arrived(self, parameter: Tensor) -> None:
        self.arrived[parameter] = _now(self.device) - self.began

    def check_gradients(self) -> None:
        self.tries.append((_now(self.device) - self.began, self.arrived))

    def gradients(self) -> list[Gradient]:
        """In their order, of the quickest try: it was the least disturbed."""
        seconds, arrived = min(self.tries, key=lambda each: each[0])
        # A gradient that the step leaves out comes last: its bucket is full after the backward.
        when = {parameter: arrived.get(parameter, seconds) / seconds for parameter in self.trained}
        return [
            Gradient(parameter.nbytes, when[parameter], f"{parameter.dtype} {parameter.device}")
            for parameter in sorted(self.trained, key=lambda parameter: when[parameter])
        ]


def _now(device: torch.device) -> float:
    """On a GPU (not tried on one) it waits for all that was asked of the device before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _spread(seconds: list[float]) -> float:
    middle = median(seconds)
    return median(abs(each - middle) for each in seconds) / middle


def _tensors(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, dict):
        yield from chain.from_iterable(map(_tensors, nest.values()))
    elif isinstance(nest, (list, tuple)):
        yield from chain.from_iterable(map(_tensors, nest))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
