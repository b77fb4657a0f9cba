"""A comparison as a line: ratio, spread, target; the lines as a page's tables and a picture."""

import os
import platform
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.performance.process import Run, peers_versions

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "performance.md", DOCS / "performance.svg"
UNITS = {"seconds": "s", "begin": "s", "megabytes": "MB"}
HEADER = "| beside | dpframe | it | ratio | half of the turns | target | met |\n"
HEADER += "|---|--:|--:|--:|--:|--:|---|"
ROW, WIDTH, LEFT, RIGHT = 22, 860, 400, 130  # pixels of the picture
FONT = "font-family='sans-serif' font-size='13'"
OURS, MISSED, THEIRS = "#2a6fb0", "#b0542a", "#d8d8d8"


class Result(NamedTuple):
    """`ours` and `theirs` are medians, in `unit`; half of the ratios are from `low` to `high`."""

    section: str
    name: str
    ours: float
    theirs: float | None  # None: there is a limit, and nothing to compare with
    unit: str
    ratio: float
    low: float
    high: float
    target: float | None

    @property
    def is_met(self) -> bool | None:
        return None if self.target is None else self.ratio <= self.target

    def __str__(self) -> str:
        spread = f"{self.low:.2f} to {self.high:.2f}"
        if self.theirs is None:
            limit = f"{self.target:g} {self.unit}"
            cells = [_amount(self.ours, self.unit), "", "", f"{spread} {self.unit}", limit]
        else:
            cells = [_amount(value, self.unit) for value in (self.ours, self.theirs)]
            target = "" if self.target is None else f"{self.target:.2f}"
            cells += [f"{self.ratio:.2f}", spread, target]
        met = {None: "", True: "yes", False: "**no**"}[self.is_met]
        return f"| {' | '.join([self.name, *cells, met])} |"


def compared(
    section: str,
    name: str,
    runs: Sequence[Run],
    others: Sequence[Run],
    measure: str,
    target: float | None,
    other_measure: str = "",
) -> Result:
    """The median of the ratios turn by turn: what slows the machine for a while slows both."""
    ours = [getattr(run, measure) for run in runs]
    theirs = [getattr(run, other_measure or measure) for run in others]
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    medians = statistics.median(ours), statistics.median(theirs)
    middle = statistics.median(ratios), *middle_half(ratios)
    return Result(section, name, *medians, UNITS.get(measure, "us"), *middle, target)


def limited(section: str, name: str, values: Sequence[float], unit: str, limit: float) -> Result:
    """The ratio is the value itself."""
    middle = statistics.median(values)
    return Result(section, name, middle, None, unit, middle, *middle_half(values), limit)


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
    return f"{time.strftime('%Y-%m-%d')}: {', '.join(words)}"


def write(name: str, text: str) -> None:
    """Between the markers `name` of docs/performance.md; then the picture is drawn again."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, rest = PAGE.read_text().split(begin)
    page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    PAGE.write_text(page)
    PICTURE.write_text(picture(page))


def _amount(value: float, unit: str) -> str:
    return f"{value:,.2f} {unit}" if unit == "s" else f"{value:,.0f} {unit}"


# The picture


def picture(page: str) -> str:
    """A bar for each ratio of the page's tables, with a mark at its target."""
    bars = [bar for row, cells in enumerate(_rows(page), 1) for bar in _bar(cells, row * ROW)]
    height = ROW * (sum("fill='" + THEIRS in bar for bar in bars) + 2)
    begin = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' {FONT}>"
    title = "dpframe / the other: shorter is better; grey is the other, the mark is the target"
    head = [begin, "<rect width='100%' height='100%' fill='white'/>"]
    head.append(f"<text x='8' y='{ROW - 6}' font-weight='bold'>{title}</text>")
    return "\n".join([*head, *bars, "</svg>"]) + "\n"


def _rows(page: str) -> Iterator[list[str]]:
    kind = ""
    for line in page.splitlines():
        if line.startswith("**"):
            kind = line.removeprefix("**").partition("**")[0].partition(",")[0].lower()
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and re.fullmatch(r"\d+\.\d+", cells[3]):
            yield [f"{kind}: {cells[0]}", *cells[1:]]


def _bar(cells: list[str], top: int) -> Iterator[str]:
    name, ratio, target, met = cells[0], float(cells[3]), cells[5], cells[6]
    width = (WIDTH - LEFT - RIGHT) / 1.2  # of a ratio of 1; longer bars are cut off
    length = min(ratio, 1.2) * width
    colour = MISSED if "no" in met else OURS
    label = name.replace("&", "&amp;").replace("<", "&lt;")[:62]
    yield f"<text x='8' y='{top + 15}'>{label}</text>"
    yield f"<rect x='{LEFT}' y='{top + 3}' width='{width:.0f}' height='16' fill='{THEIRS}'/>"
    yield f"<rect x='{LEFT}' y='{top + 6}' width='{length:.0f}' height='10' fill='{colour}'/>"
    if target:
        at = LEFT + min(float(target), 1.2) * width
        yield f"<rect x='{at:.0f}' y='{top + 1}' width='2' height='20' fill='black'/>"
    yield f"<text x='{WIDTH - RIGHT + 10}' y='{top + 15}'>{ratio:.2f} x</text>"
