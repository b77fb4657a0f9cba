"""The largest batch that fits in memory, and a learning rate: short trainings on one replica."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dpframe import Callback, DataModule, LRSchedule, Task, Trainer, TrainerSettings, UserError
from dpframe.modes.measure import lasting_bytes
from dpframe.plugin import (
    Failure,
    Probe,
    Sampled,
    TrainingData,
    call_prepare_data,
    memory,
    refuse_by_hand,
    seeding,
    short,
)

STEPS = 3  # of a trial; the first makes the optimizer's state
EXACT = 64  # the search ends when 1/n of the range is still unknown
RECENT, DIVERGED = 5, 4.0  # so many losses of so many times the smallest: the test ends
FLAT = 0.01  # a loss that falls by less than this part is noise
NEAR = 4  # points on each side that a smoothed one is the mean of
PART_OF_MACHINE = 4  # on the CPU, all replicas take at most 1/n of its memory


class Point(NamedTuple):
    """A learning rate that was tried, and the loss after its step."""

    rate: float
    loss: float


class Trial(NamedTuple):
    """What a share of so many rows takes; no bytes where the device ran out of them."""

    rows: int
    bytes: int | None
    rows_per_second: float
    fits: bool


class Rates(NamedTuple):
    """The losses of a training whose learning rate grows, those of a training at a rate of 0 on
    the same batches, and the rate at which the first fall fastest below the second."""

    points: list[Point]
    fresh: list[Point]
    batch_size: int
    best: float | None


class Tuner:
    """`make_task` makes a fresh task for each trial; all begin alike."""

    def __init__(
        self,
        make_task: Callable[[], Task],
        data: DataModule,
        settings: TrainerSettings,
        *,
        accelerator: str,
        replicas: int,
        seed: int,
        limit: float | None = None,
    ) -> None:
        """`limit`: bytes that a replica may take; None: all of a GPU, a part of the machine's."""
        self.make_task, self.settings = make_task, settings
        self.accelerator, self.replicas, self.seed = accelerator, replicas, seed
        probe = Probe(accelerator=accelerator)
        probe.__enter__()
        self.device = probe.device
        if data.has_preparation:
            call_prepare_data(data)
        data.setup()
        feed = TrainingData.of(data, probe, settings, seed=seed)
        if feed.train.order is None:
            raise UserError(
                f"mode=tune: {type(data).__name__}.train_dataset() is a stream, of which no batch "
                "can be drawn twice; tune with a data set that has a length"
            )
        self.source = feed.source
        self.total_steps = feed.total_steps  # of the training that is tuned
        self.schedule: LRSchedule | None = None  # of its learning rate
        self.batches: list[Tensor] = list(feed.train.order.epoch(0))
        self.limit = limit
        if limit is None and self.device.type == "cpu":
            self.limit = memory.machine() / PART_OF_MACHINE / replicas

    def batch_size(self, most: int) -> tuple[int, list[Trial]]:
        """The largest global batch up to `most` that fits, and the trials in their order."""
        if several := getattr(self.source.sampler, "sources", None):
            raise UserError(
                f"mode=tune finds one batch size, and a step has rows of {' and '.join(several)}; "
                "use tune.find=[lr]"
            )
        trials: list[Trial] = []

        def fits(rows: int) -> bool:
            trials.append(self._trial(rows))
            return trials[-1].fits

        most = min(sum(map(len, self.batches)), most)
        share = -(-most // self.replicas)
        found = find_largest(fits, -(-max(map(len, self.batches)) // self.replicas), share)
        return min(found * self.replicas, most), trials

    def learning_rate(self, least: float, most: float, steps: int) -> Rates:
        """Tries rates with the config's global batch and accumulation, on one replica."""
        accumulate = self.settings.accumulate
        growth = (most / least) ** (1 / (steps - 1))
        fresh = Sweep([0.0] * steps)
        sweep = Sweep([least * growth**step for step in range(steps)])
        size = max(map(len, self.batches))
        settings = replace(
            short(self.settings, steps=steps),
            accumulate=accumulate,
            on_nonfinite="skip",
            max_skipped_steps=None,
        )
        sizes = [size] * (steps * accumulate)
        for each in (fresh, sweep):
            probe = Probe(accelerator=self.accelerator)
            if self._fit(probe, self.batches, sizes, settings, each) is None:
                raise Failure(
                    f"mode=tune: a batch of {size} rows does not fit {self.device}, on which "
                    "learning rates are tried; use a smaller data.batch_size and a larger "
                    "trainer.accumulate"
                )
        best = find_steepest(sweep.points, fresh.points)
        return Rates(sweep.points, fresh.points, size * accumulate, best)

    def _trial(self, rows: int) -> Trial:
        probe = Probe(accelerator=self.accelerator)
        settings = short(self.settings, steps=STEPS)
        counts = self.device.type == "cpu"
        probe.kept = {} if counts else None
        everything = [torch.cat(self.batches)]
        with saved_tensors_hooks(probe.keep, lambda tensor: tensor):
            trainer = self._fit(probe, everything, [rows] * STEPS, settings)
        if trainer is None:
            return Trial(rows, None, 0.0, fits=False)
        used = probe.peak or 0
        if counts:
            used = lasting_bytes(trainer) + max(probe.held)
        seconds = min(end - start for start, end in pairwise(probe.ends))
        return Trial(rows, used, rows / seconds, fits=self.limit is None or used <= self.limit)

    def _fit(
        self,
        probe: Probe,
        batches: list[Tensor],
        sizes: list[int],
        settings: TrainerSettings,
        *callbacks: Callback,
    ) -> Trainer | None:
        """None: there was not enough memory."""
        gc.collect()
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()
        probe.__enter__()
        sampled = Sampled(self.source, batches, sizes)
        with seeding.seeded(self.seed):
            seeding.seed_everything(self.seed)
            try:
                task = self.make_task()
                self.schedule, task.lr_schedule = task.lr_schedule, None
                trainer = Trainer(
                    task,
                    sampled,
                    strategy=probe,
                    settings=settings,
                    callbacks=callbacks,
                    seed=self.seed,
                )
                refuse_by_hand(trainer.task, "mode=tune")
                trainer.fit()
                return trainer
            except (RuntimeError, MemoryError) as error:
                if not memory.ran_out(error):
                    raise
        return None


class Sweep(Callback):
    """Trains each step at the next of `rates`, until the loss has grown out of proportion.

    Groups of parameters keep the proportions of their learning rates.
    """

    def __init__(self, rates: list[float]) -> None:
        self.rates = rates
        self.points: list[Point] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        if len(trainer.updates) > 1:
            raise UserError(
                f"mode=tune finds one learning rate, and {type(trainer.task).__name__} has several "
                f"optimizers: {', '.join(trainer.updates)}; use tune.find=[batch_size]"
            )
        groups = trainer.update.optimizer.param_groups
        rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
        self.parts = [rate / rates[0] if rates[0] else 1.0 for rate in rates]
        self._set(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        means = trainer.training.means.window()
        loss = means.get("loss", math.inf)  # there is none if the step was left out
        if math.isfinite(loss):
            self.points.append(Point(self.rates[len(self.points)], loss))
        if not math.isfinite(loss) or self._has_diverged():
            trainer.stop("the loss grows")
        elif len(self.points) < len(self.rates):
            self._set(trainer)

    def _has_diverged(self) -> bool:
        losses = [point.loss for point in self.points]
        least, recent = min(smooth(losses)), min(losses[-RECENT:])
        return self.rates[-1] > 0 and recent > least + (DIVERGED - 1) * abs(least)

    def _set(self, trainer: Trainer) -> None:
        rate = self.rates[len(self.points)]
        for group, part in zip(trainer.update.optimizer.param_groups, self.parts, strict=True):
            group["lr"] = rate * part


def find_largest(fits: Callable[[int], bool], first: int, most: int) -> int:
    """The largest number up to `most` that fits, to one part in 64: by doubling, then bisection."""
    good, bad, size = 0, 0, min(first, most)
    while True:
        if fits(size):
            good = size
        else:
            bad = size
        if good == most or (bad and bad - good <= max(1, good // EXACT)):
            return good
        size = (good + bad) // 2 if bad else min(2 * good, most)


def find_steepest(points: Sequence[Point], fresh: Sequence[Point]) -> float | None:
    """The learning rate at which the loss falls fastest, before its minimum; None: nowhere.

    The loss is told as a part of what `fresh` weights have on the same batches: the batches differ
    by more than what one step learns."""
    changes = compare_losses(points, fresh)
    end = changes.index(min(changes)) if changes else 0
    if not end or changes[end] > -FLAT:
        return None
    falls = [(changes[at + 1] - changes[at - 1], at) for at in range(1, end)]
    return points[min(falls, default=(0.0, end))[1]].rate


def compare_losses(points: Sequence[Point], fresh: Sequence[Point]) -> list[float]:
    """By how much of it the smooth loss differs from that of the `fresh` weights."""
    pairs = list(zip(points, fresh, strict=False))
    changes = smooth([here.loss - first.loss for here, first in pairs])
    sizes = smooth([abs(first.loss) for _, first in pairs])
    return [change / (size or 1.0) for change, size in zip(changes, sizes, strict=True)]


def smooth(values: Sequence[float]) -> list[float]:
    """Means of near values: as many on each side, so that the curve is not shifted."""
    reaches = [min(NEAR, at, len(values) - 1 - at) for at in range(len(values))]
    return [fmean(values[at - n : at + n + 1]) for at, n in enumerate(reaches)]
