"""A tuning as text: the trials, the curve of the losses, and the overrides to type."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dpframe import LRSchedule
from dpframe.plugin import ruled, size
from dpframe.plugins.lab.tuner import FLAT, Point, Rates, Trial, smooth

COLUMNS, LINES = 64, 10  # of the curve
BARS = "▁▂▃▄▅▆▇█"


class Tuning(NamedTuple):
    """What a tuning has found."""

    title: str
    limit: float | None  # bytes a replica
    max_batch_size: int
    batch: tuple[int, list[Trial]] | None  # the largest that fits, and how it was found
    rates: Rates | None
    takes_size: bool  # as data.batch_size
    rate_key: str  # where the learning rate is set
    scheduler: str = ""  # the class of task.scheduler
    schedule: LRSchedule | None = None
    steps: int = 0  # of the training that is tuned

    def __str__(self) -> str:
        lines = [self.title]
        if self.batch is not None:
            lines += self._trials(*self.batch)
        if self.rates is not None:
            lines += self._rates(self.rates)
        return "\n".join(lines)

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.batch is not None:
            size, trials = self.batch
            found |= {"batch_size": size, "trials": [trial._asdict() for trial in trials]}
        if self.rates is not None:
            best, points = self.rates.best, [list(point) for point in self.rates.points]
            fresh = [point.loss for point in self.rates.fresh]
            found |= {"lr": best and _round(best), "losses": points, "fresh_losses": fresh}
        return found

    def _scheduled(self, rate: float) -> list[tuple[float, float]]:
        """The learning rate at some steps of the training, if there is a schedule."""
        if self.schedule is None or (self.schedule.needs_length and not self.steps):
            return []
        last, drawn = max(1, self.steps - 1), min(COLUMNS, self.steps)
        steps = [round(last * place / max(1, drawn - 1)) for place in range(drawn)]
        return [(step, rate * self.schedule.factor(step, self.steps)) for step in steps]

    def _trials(self, found: int, trials: list[Trial]) -> list[str]:
        bound = "" if self.limit is None else f" {size(self.limit)} (tune.memory)"
        cells = [("rows a replica", "memory", "rows a second", "fits")]
        for trial in trials:
            used = "out of memory" if trial.bytes is None else size(trial.bytes)
            speed = f"{trial.rows_per_second:,.0f}" if trial.rows_per_second else ""
            fits = "yes" if trial.fits else f"more than{bound}"
            cells.append((str(trial.rows), used, speed, fits))
        if not found:
            return [ruled(cells), "not even one row fits"]
        why = "the largest batch that fits"
        if found == self.max_batch_size:
            why = "fits; tune.max_batch_size is the largest that is tried"
        elif all(trial.fits for trial in trials):
            why = "fits: all rows to train on"
        key = "data.batch_size=" if self.takes_size else "batch size "
        lines = [ruled(cells), f"{key}{found}    {why}"]
        if not all(trial.fits for trial in trials):
            rows = max(trial.rows for trial in trials if trial.fits)
            lines += [f"trainer.micro_batch={rows}    a batch of any size in pieces that fit"]
        return lines

    def _rates(self, rates: Rates) -> list[str]:
        if rates.best is None:
            return [
                "",
                "no learning rate from tune.min_lr to tune.max_lr makes the loss fall by "
                f"{FLAT:.0%}; raise tune.steps or tune.max_lr",
            ]
        key = f"{self.rate_key}=" if self.rate_key else "learning rate "
        last = rates.points[-1].rate
        where = f"where the loss falls fastest, of {rates.points[0].rate:.3g} to {last:.3g}"
        return [
            "",
            *chart(rates.points, rates.best),
            f"{key}{_round(rates.best):g}    {where}, {rates.batch_size} rows a step",
            *self._schedule(_round(rates.best)),
        ]

    def _schedule(self, rate: float) -> list[str]:
        """What a schedule makes of the rate, which it has left alone here."""
        if self.rate_key.endswith(".max_lr"):
            return [f"{self.scheduler} overwrites task.optimizer.lr: its max_lr is what to set"]
        if self.scheduler:
            return [f"{self.scheduler} changes it from there"]
        if not (curve := self._scheduled(rate)):
            return []
        bars = "".join(BARS[round(at / rate * (len(BARS) - 1))] for _, at in curve)
        return [f"the peak of {self.schedule}, over {self.steps:,} steps:", f"{'':9} {bars}"]


def chart(points: Sequence[Point], marked: float | None) -> list[str]:
    """Lines of text; `marked` is a learning rate."""
    means = smooth([point.loss for point in points])
    low, high = _range(means)
    first, last = points[0].rate, points[-1].rate
    span = math.log(last / first)

    def column(rate: float) -> int:
        return round(math.log(rate / first) / span * (COLUMNS - 1)) if span else 0

    grid = [[" "] * COLUMNS for _ in range(LINES)]
    for point, mean in zip(points, means, strict=True):
        height = (min(mean, high) - low) / (high - low)
        grid[round((1 - height) * (LINES - 1))][column(point.rate)] = "*"
    if marked is not None:
        for line in grid:
            line[column(marked)] = "|" if line[column(marked)] == " " else line[column(marked)]
    labels = {0: f"{high:.4g}", LINES - 1: f"{low:.4g}"}
    lines = [f"{labels.get(n, ''):>9} {''.join(line)}".rstrip() for n, line in enumerate(grid)]
    start, end = f"{first:.3g}", f"{last:.3g}"
    return [f"{'loss':>9}", *lines, f"{'':10}{start}{end:>{COLUMNS - len(start)}}"]


def _range(losses: Sequence[float]) -> tuple[float, float]:
    """The range that is drawn: a loss far above the first one is cut off."""
    low, first = min(losses), losses[0]
    high = min(max(losses), first + (first - low) / 2) if first > low else max(losses)
    return low, high if high > low else low + 1


def _round(rate: float) -> float:
    return float(f"{rate:.2g}")
