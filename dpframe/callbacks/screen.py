"""What a terminal shows while a run trains: a table of its epochs, and below it a bar."""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from dpframe.callbacks.monitor import Epoch
from dpframe.errors import printable

LEAST_BAR, USUAL_BAR, MOST_BAR = 4, 10, 40  # columns
BESIDE = 60  # columns that the epoch, the pace and two metrics may take
BELOW = 4  # lines of the terminal that are not the table's epochs
BEST = "best"


class Screen:
    """Redrawn by `draw` alone: no thread."""

    def __init__(self) -> None:
        self.live = Live(console=Console(), auto_refresh=False)
        self.live.start()

    def draw(
        self,
        epochs: Sequence[Epoch],
        best: Epoch | None,
        *,
        where: str,
        done: float | None,
        pace: str,
        metrics: Mapping[str, float],
    ) -> None:
        """`done` is the share of the training that is over, if its length is known. Of the
        metrics, the first ones are shown as far as there is room."""
        size = self.live.console.size
        table = _table(epochs[-max(1, size.height - BELOW) :], best, size.width)
        bar = _bar(where, done, pace, metrics, size.width)
        self.live.update(Group(*map(_text, table), bar), refresh=True)

    def stop(self) -> None:
        self.live.stop()


def _bar(
    where: str, done: float | None, pace: str, metrics: Mapping[str, float], width: int
) -> Table:
    room = width - len(where) - len(pace) - 2
    columns = min(max(USUAL_BAR, (width - BESIDE) // 2), MOST_BAR)
    columns = min(columns, room) if room >= LEAST_BAR else columns  # else the pace is cut off
    words = [f"  {name} {value:.4g}" for name, value in metrics.items()]
    words = words[: _fitting(map(len, words), room - columns)]
    bar = ProgressBar(1.0, done or 0.0, columns, done is None, animation_time=time.monotonic())
    line = Table.grid(*(Column(no_wrap=True, overflow="crop") for _ in range(3)), padding=(0, 1))
    line.add_row(_text(where), bar, _text(printable(pace + "".join(words))))
    return line


def _table(epochs: Sequence[Epoch], best: Epoch | None, width: int) -> list[str]:
    """The epochs, and the best one before them if it is not one of them."""
    rows = list(epochs)
    if not rows:
        return []
    if best is not None and all(row.step != best.step for row in rows):
        rows.insert(0, best)
    columns = [
        ["epoch", *(str(row.number) for row in rows)],
        ["step", *(str(row.step) for row in rows)],
    ]
    columns += [
        [printable(name), *(_number(row.metrics.get(name)) for row in rows)]
        for name in rows[-1].metrics
    ]
    widths = [max(map(len, column)) for column in columns]
    shown = _fitting((width + 2 for width in widths), width - len(BEST))
    marks = ["", *(BEST if best is not None and row.step == best.step else "" for row in rows)]
    lines = [
        [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)][:shown]
        for cells in zip(*columns, strict=True)
    ]
    return ["  ".join([*line, mark]).rstrip() for line, mark in zip(lines, marks, strict=True)]


def _fitting(widths: Iterable[int], room: int) -> int:
    """How many of them, from the first on, fit into so many columns."""
    return sum(total <= room for total in accumulate(widths))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _text(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="crop")
