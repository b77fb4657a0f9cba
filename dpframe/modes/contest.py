"""A recipe trained by several strategies: what an epoch takes on each, and where it comes to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

from dpframe import memory, seeding
from dpframe.data import DataModule
from dpframe.launch import signals
from dpframe.modes.measure import WARM_UPS, now
from dpframe.modes.report import size, time
from dpframe.modes.step_times import StepTimes
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer import Trainer
from dpframe.trainer.callback import Callback
from dpframe.trainer.placement import process_settings_restored
from dpframe.trainer.settings import TrainerSettings

UNLIKE = 1e-4  # relative; rounding in float32 may grow so far in a training


@dataclass
class Entry:
    """What a strategy came to; `failure` is the reason where it came to nothing."""

    strategy: str
    replicas: int
    devices: list[str] = field(default_factory=list)
    rows_per_second: float = 0.0  # of training, warmed up
    seconds: float | None = None  # of an epoch's training, at that rate
    memory: list[int] | None = None  # by device; None where nobody counts
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    step_seconds: list[float] | None = None  # of computing, by replica; None where not measured


@dataclass
class Contest:
    title: str
    entries: list[Entry]
    metric: str = ""  # of which the last value is shown

    @property
    def fastest(self) -> Entry | None:
        done = [entry for entry in self.entries if not entry.failure]
        return max(done, key=lambda entry: entry.rows_per_second, default=None)

    def speed_up(self, entry: Entry) -> float:
        """Over the first one that has finished."""
        first = next(each for each in self.entries if not each.failure)
        return entry.rows_per_second / first.rows_per_second

    def __str__(self) -> str:
        head = ["strategy", "replicas", "an epoch", "samples/s", "speed-up", "memory by device"]
        head += ["a step by device"]
        rows = [[*head, self.metric] if self.metric else head]
        for entry in self.entries:
            cells = [entry.strategy, str(entry.replicas)]
            if entry.failure:
                rows.append([*cells, entry.failure])
                continue
            cells += ["" if entry.seconds is None else time(entry.seconds)]
            cells += [f"{entry.rows_per_second:,.0f}", f"{self.speed_up(entry):.2f}"]
            cells += [" + ".join(map(size, entry.memory)) if entry.memory else "not counted"]
            cells += [" + ".join(map(time, entry.step_seconds or ())) or "not measured"]
            value = entry.metrics.get(self.metric)
            rows.append([*cells, f"{value:.6g}" if value is not None else ""][: len(rows[0])])
        whole = [row for row in rows if len(row) == len(rows[0])]
        widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if self.fastest is not None:
            lines += ["", f"fastest: {_named(self.fastest)}", *self._unlike()]
        return "\n".join([self.title, *lines])

    def _unlike(self) -> Iterator[str]:
        """A line for each that ends with another value of the metric than the first one."""
        done = [e for e in self.entries if not e.failure and self.metric in e.metrics]
        if not done:
            return
        first = min(done, key=lambda entry: entry.replicas)
        for entry in done:
            one, other = first.metrics[self.metric], entry.metrics[self.metric]
            if abs(other - one) > UNLIKE * max(abs(one), abs(other)):
                yield (
                    f"another {self.metric}: {other:.6g} by strategy={entry.strategy} on "
                    f"{entry.replicas}, {one:.6g} by strategy={first.strategy} on "
                    f"{first.replicas}; in float32 rounding may grow so far, which "
                    "trainer.precision=64 tells, and mode=verify tells other reasons"
                )


def train(
    make_strategy: Callable[[], Strategy],
    make_task: Callable[[], Task],
    make_data: Callable[[], DataModule],
    settings: TrainerSettings,
    seed: int,
    name: str,
) -> Entry:
    """In each process of the strategy."""
    with (
        signals.watched(settings.hang_seconds),
        process_settings_restored(),
        make_strategy() as strategy,
        memory.explain(strategy.device, "training", "use a smaller data.batch_size"),
    ):
        for device in strategy.local_devices:
            memory.begin_peak(device)
        seeding.seed_everything(seed)
        pace, steps = Pace(), StepTimes()
        trainer = Trainer(
            make_task(),
            make_data(),
            strategy=strategy,
            settings=settings,
            callbacks=[pace, steps],
            seed=seed,
            interruption=signals.current(),
        )
        trainer.fit()
        rate = median(pace.rates or pace.cold)
        everywhere = strategy.collectives.gather(steps.seconds())
        rows = _rows_of_epoch(trainer)
        return Entry(
            name,
            strategy.replicas,
            strategy.devices,
            rate,
            None if rows is None else rows / rate,
            trainer.peak_memory(),
            dict(trainer.metrics),
            step_seconds=None if None in everywhere else list(chain.from_iterable(everywhere)),
        )


def _rows_of_epoch(trainer: Trainer) -> int | None:
    """None: a stream, of which nobody has counted the rows."""
    source, batches = trainer.feed.source, trainer.feed.batches_per_epoch
    return None if batches is None else min(batches * source.batch_size, len(source.dataset))


class Pace(Callback):
    """Rows a second of each epoch's training, without the first steps and without validation."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.cold: list[float] = []  # of the first steps, for a training that has no others
        self.began: tuple[float, int] | None = None

    def on_epoch_start(self, trainer: Trainer) -> None:
        self.began = self._here(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.global_step == WARM_UPS and not self.rates:
            self.on_epoch_end(trainer)
            self.cold, self.rates = self.rates, []
            self.began = self._here(trainer)

    def on_validation_start(self, trainer: Trainer) -> None:
        self.on_epoch_end(trainer)

    def on_epoch_end(self, trainer: Trainer) -> None:
        if self.began is None:
            return
        (began, rows), (ended, more) = self.began, self._here(trainer)
        self.began = None
        if more > rows:
            self.rates.append((more - rows) / (ended - began))

    def _here(self, trainer: Trainer) -> tuple[float, int]:
        return now(trainer.strategy.device), trainer.progress.rows_seen


def _named(entry: Entry) -> str:
    count = f" trainer.gpus={entry.replicas}" if entry.replicas > 1 else ""
    return f"strategy={entry.strategy}{count}, {entry.rows_per_second:,.0f} samples/s"
