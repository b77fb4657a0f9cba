"""A recipe trained by several strategies: what an epoch takes on each, and where it comes to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from dpframe import Callback, Trainer
from dpframe.plugin import (
    WARM_UPS,
    Composed,
    data_of,
    memory,
    now,
    ruled,
    seeding,
    signals,
    size,
    strategy_of,
    task_of,
    time,
)
from dpframe.trainer.compute.placement import process_settings_restored

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


def describe(title: str, entries: Sequence[Entry], metric: str) -> str:
    """A table, what failed, and the fastest; of the metric the last value is shown."""
    done = [entry for entry in entries if not entry.failure]
    head = ("strategy", "replicas", "an epoch", "samples/s", "speed-up", "memory by device", metric)
    rows = [_row(entry, metric, over=done[0]) for entry in done]
    lines = [title, ruled([head, *rows])]
    lines += [f"failed: {_name(entry)}: {entry.failure}" for entry in entries if entry.failure]
    if done:
        fastest = max(done, key=lambda entry: entry.rows_per_second)
        pace = f"{fastest.rows_per_second:,.0f} samples/s"
        lines += ["", f"fastest: {_name(fastest)}, {pace}", *_unlike(done, metric)]
    return "\n".join(lines)


def _row(entry: Entry, metric: str, *, over: Entry) -> tuple[str, ...]:
    value = entry.metrics.get(metric)
    return (
        entry.strategy,
        str(entry.replicas),
        "" if entry.seconds is None else time(entry.seconds),
        f"{entry.rows_per_second:,.0f}",
        f"{entry.rows_per_second / over.rows_per_second:.2f}",
        " + ".join(map(size, entry.memory)) if entry.memory else "not counted",
        "" if value is None else f"{value:.6g}",
    )


def _unlike(entries: Sequence[Entry], metric: str) -> Iterator[str]:
    """A line for each that ends with another value of the metric than the first one."""
    measured = [entry for entry in entries if metric in entry.metrics]
    if not measured:
        return
    first = min(measured, key=lambda entry: entry.replicas)
    for entry in measured:
        one, other = first.metrics[metric], entry.metrics[metric]
        if abs(other - one) > UNLIKE * max(abs(one), abs(other)):
            yield (
                f"another {metric}: {other:.6g} by {_name(entry)}, {one:.6g} by {_name(first)}; in "
                "float32 rounding may grow so far, which trainer.precision=64 tells, and "
                "mode=verify tells other reasons"
            )


def train(job: Composed, name: str) -> Entry:
    """In each process of the strategy, which is called so."""
    settings = job.settings
    with (
        signals.watched(settings.trainer.hang_seconds),
        process_settings_restored(),
        strategy_of(job)() as strategy,
        memory.explain(strategy.device, "training", "use a smaller data.batch_size"),
    ):
        for device in strategy.local_devices:
            memory.begin_peak(device)
        seeding.seed_everything(settings.seed)
        pace = Pace()
        trainer = Trainer(
            task_of(job)(),
            data_of(job)(),
            strategy=strategy,
            settings=settings.trainer,
            callbacks=[pace],
            seed=settings.seed,
            interruption=signals.current(),
        )
        trainer.fit()
        rate = median(pace.rates or pace.cold)
        rows = _rows_of_epoch(trainer)
        return Entry(
            name,
            strategy.replicas,
            strategy.devices,
            rate,
            None if rows is None else rows / rate,
            memory.peaks(trainer.strategy),
            dict(trainer.metrics),
        )


def _rows_of_epoch(trainer: Trainer) -> int | None:
    """None: a stream, whose rows are not counted."""
    feed, order = trainer.feed, trainer.feed.train.order
    if order is None or feed.batches_per_epoch is None:
        return None
    return min(feed.batches_per_epoch * feed.source.batch_size, order.rows)


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


def _name(entry: Entry) -> str:
    """What one types for it."""
    count = f" trainer.gpus={entry.replicas}" if entry.replicas > 1 else ""
    return f"strategy={entry.strategy}{count}"
