"""What was found: a line a comparison, with its target and whether that is met."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.performance.process import Run, pairs

UNITS = {"seconds": "s", "begin": "s", "megabytes": "MB", "calls": "calls", "loss": ""}


class Result(NamedTuple):
    """`ours` and `theirs` are medians, in `unit`; `low` to `high` holds half of the ratios."""

    section: str
    name: str
    ours: float
    theirs: float | None  # None: there is a limit, and nobody to compare with
    unit: str
    ratio: float
    low: float
    high: float
    turns: int
    target: float | None
    beside: float = 0.0  # processors that others kept busy, as a median over all runs

    @property
    def is_met(self) -> bool | None:
        return None if self.target is None else self.ratio <= self.target


def compared(
    section: str,
    name: str,
    runs: Sequence[Run],
    others: Sequence[Run],
    measure: str,
    target: float | None,
    other_measure: str = "",
) -> Result:
    ours = [getattr(run, measure) for run in runs]
    theirs = [getattr(run, other_measure or measure) for run in others]
    ratios = list(pairs(ours, theirs))
    low, high = middle_half(ratios)
    return Result(
        section,
        name,
        statistics.median(ours),
        statistics.median(theirs),
        UNITS.get(measure, "us"),
        statistics.median(ratios),
        low,
        high,
        len(ratios),
        target,
        statistics.median(run.beside for run in [*runs, *others]),
    )


def limited(section: str, name: str, values: Sequence[float], unit: str, limit: float) -> Result:
    """The ratio is the value itself."""
    middle = statistics.median(values)
    low, high = middle_half(values)
    return Result(section, name, middle, None, unit, middle, low, high, len(values), limit)


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles; with fewer than four values the extremes."""
    if len(values) < 4:
        return min(values), max(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
