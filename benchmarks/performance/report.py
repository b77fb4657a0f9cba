"""A comparison as a line: ratio, spread, target; the lines as a page's tables."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.performance.process import Run, peers_versions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
UNITS = {"seconds": "s", "begin": "s", "megabytes": "MB"}
HEADER = "| beside | dpframe | it | ratio | half of the turns | target | met |\n"
HEADER += "|---|--:|--:|--:|--:|--:|---|"


class Result(NamedTuple):
    """`ours` and `theirs` are medians; half of the ratios are from `low` to `high`."""

    section: str
    name: str
    ours: str
    theirs: str
    ratio: float
    low: float
    high: float
    target: float | None

    @property
    def is_met(self) -> bool | None:
        return None if self.target is None else self.ratio <= self.target

    def __str__(self) -> str:
        target = "" if self.target is None else f"{self.target:.2f}"
        met = {None: "", True: "yes", False: "**no**"}[self.is_met]
        spread = f"{self.low:.2f} to {self.high:.2f}"
        cells = [self.name, self.ours, self.theirs, f"{self.ratio:.2f}", spread, target, met]
        return f"| {' | '.join(cells)} |"


def compared(
    section: str,
    name: str,
    runs: Sequence[Run],
    others: Sequence[Run],
    measure: str,
    target: float | None,
) -> Result:
    """The median of the ratios turn by turn: what slows the machine for a while slows both."""
    ours, theirs = ([getattr(run, measure) for run in its] for its in (runs, others))
    ratios = ratios_of(runs, others, measure)
    medians = amount(ours, measure), amount(theirs, measure)
    return Result(section, name, *medians, statistics.median(ratios), *middle_half(ratios), target)


def ratios_of(runs: Sequence[Run], others: Sequence[Run], measure: str) -> list[float]:
    return [getattr(a, measure) / getattr(b, measure) for a, b in zip(runs, others, strict=True)]


def amount(values: Sequence[float], measure: str) -> str:
    unit = UNITS.get(measure, "us")
    return f"{statistics.median(values):,.{2 if unit == 's' else 0}f} {unit}"


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles; with fewer than four values the extremes."""
    if len(values) < 4:
        return min(values), max(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def tables(results: Sequence[Result]) -> str:
    """One table per section, with when and where it was measured."""
    parts = []
    for section in dict.fromkeys(result.section for result in results):
        rows = [str(result) for result in results if result.section == section]
        title = f"**{section[0].upper()}{section[1:]}**, {machine()}\n"
        parts.append("\n".join([title, HEADER, *rows]))
    return "\n\n".join(parts)


def machine() -> str:
    words = [f"{os.cpu_count()} cores", platform.machine(), f"Python {platform.python_version()}"]
    words += [f"{name} {version}" for name, version in peers_versions().items()]
    return f"{time.strftime('%Y-%m-%d')}, {_commit()}: {', '.join(words)}"


def _commit() -> str:
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    done = subprocess.run(command, cwd=PAGE.parent, capture_output=True, text=True)
    return done.stdout.strip() or "no commit"


def write(name: str, text: str) -> None:
    """Between the markers `name` of docs/performance.md."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, rest = PAGE.read_text().split(begin)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
