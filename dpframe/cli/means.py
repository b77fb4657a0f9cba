"""What runs of a sweep come to together: means over seeds, and differences of runs in pairs."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpframe.cli.outcome import Result
from dpframe.config.overrides import key_of
from dpframe.util.student import t_around_zero

SHARE = 0.95  # of intervals, in which the true difference lies


@dataclass
class PairedDifference:
    """Between runs in pairs that differ by one key alone: this row's less the first row's."""

    mean: float | None  # None: of no pair
    interval: tuple[float, float] | None  # None: of fewer than two
    pairs: list[tuple[int, int]]  # numbers of a run of the first row, and of one of this row
    left_out: list[tuple[int, int]]  # pairs of which a run has no value


@dataclass
class Row:
    """Runs that differ by nothing but what a mean is taken over."""

    overrides: list[str]  # what tells it from other rows
    runs: list[int]
    left_out: list[int]  # those without a value
    mean: float | None
    sd: float | None  # None: of fewer than two
    difference: PairedDifference | None = None  # None: of a first row, or of no pairs at all


def rows_of(
    runs: Sequence[Result], keys: Sequence[str], *, over: Sequence[str], compare: str | None
) -> list[Row]:
    """In the order of their runs. With a key to compare, rows that differ by it alone follow each
    other, and those with the value that the first run has come first."""
    runs = _distinct(runs, keys)
    apart = [key for key in keys if key not in over]
    groups: dict[tuple[str, ...], list[Result]] = {}
    for run in runs:
        groups.setdefault(_values(run, apart), []).append(run)
    if compare not in apart:
        return [_row(group, apart) for group in groups.values()]
    values = list(dict.fromkeys(_values(run, [compare]) for run in runs))
    others = [key for key in apart if key != compare]
    blocks: dict[tuple[str, ...], list[list[Result]]] = {}
    for group in groups.values():
        blocks.setdefault(_values(group[0], others), []).append(group)
    rows = []
    for block in blocks.values():
        block.sort(key=lambda group: values.index(_values(group[0], [compare])))
        first = block[0] if _values(block[0][0], [compare]) == values[0] else []
        for group in block:
            rows.append(_row(group, apart))
            if group is not first:
                rows[-1].difference = _difference(first, group, over)
    return rows


def _distinct(runs: Iterable[Result], keys: Sequence[str]) -> list[Result]:
    """Of runs that are alike, e.g. with seed=0,0,1, one that has a value: the others are not
    independent of it."""
    found: dict[tuple[str, ...], Result] = {}
    for run in runs:
        place = _values(run, keys)
        if place not in found or not found[place].is_measured:
            found[place] = run
    return list(found.values())


def _values(run: Result, keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(run.values.get(key, "") for key in keys)


def _row(group: Sequence[Result], apart: Sequence[str]) -> Row:
    values = [run.value for run in group if run.is_measured and run.value is not None]
    return Row(
        [override for override in group[0].overrides if key_of(override) in apart],
        [run.number for run in group if run.is_measured],
        [run.number for run in group if not run.is_measured],
        statistics.mean(values) if values else None,
        statistics.stdev(values) if len(values) > 1 else None,
    )


def _difference(
    first: Iterable[Result], group: Iterable[Result], over: Sequence[str]
) -> PairedDifference | None:
    there = {_values(run, over): run for run in first}
    both = [(there[place], run) for run in group if (place := _values(run, over)) in there]
    if not both:
        return None
    measured = [pair for pair in both if all(run.is_measured for run in pair)]
    values = [(b.value or 0.0) - (a.value or 0.0) for a, b in measured]
    return PairedDifference(
        statistics.mean(values) if values else None,
        interval_of(values),
        [(a.number, b.number) for a, b in measured],
        [(a.number, b.number) for a, b in both if (a, b) not in measured],
    )


def interval_of(differences: Sequence[float]) -> tuple[float, float] | None:
    """Of Student's t, around the mean of these."""
    count = len(differences)
    if count < 2:
        return None
    mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(count)
    half = t_around_zero(SHARE, count - 1) * error
    return mean - half, mean + half
