"""What a terminal shows while a run trains: a table of its epochs, and below it a bar."""

import time
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
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
        shown: list[RenderableType] = []
        if epochs:
            epochs = epochs[-max(1, size.height - BELOW) :]
            shown.append(_text("\n".join(_table(epochs, best, size.width))))
        shown.append(_bar(where, done, pace, metrics, size.width))
        self.live.update(Group(*shown), refresh=True)

    def stop(self) -> None:
        self.live.stop()


def _bar(
    where: str, done: float | None, pace: str, metrics: Mapping[str, float], width: int
) -> RenderableType:
    room = width - len(where) - len(pace) - 2
    columns = min(max(USUAL_BAR, (width - BESIDE) // 2), MOST_BAR)
    columns = min(columns, room) if room >= LEAST_BAR else columns  # else the pace is cut off
    room -= columns
    words = as_many_as_fit([f"  {name} {value:.4g}" for name, value in metrics.items()], room)
    bar = ProgressBar(
        total=1.0,
        completed=done or 0.0,
        width=columns,
        pulse=done is None,
        animation_time=time.monotonic(),
    )
    line = Table.grid(padding=(0, 1))
    for _ in range(3):
        line.add_column(no_wrap=True, overflow="crop")
    line.add_row(_text(where), bar, _text(printable(pace + "".join(words))))
    return line


def _table(epochs: Sequence[Epoch], best: Epoch | None, width: int) -> list[str]:
    """The epochs, and the best one before them if it is not one of them."""
    rows = list(epochs)
    if best is not None and all(row.step != best.step for row in rows):
        rows.insert(0, best)
    columns = [
        ["epoch", *(str(row.number) for row in rows)],
        ["step", *(str(row.step) for row in rows)],
    ]
    of_metrics = [
        [printable(name), *(_number(row.metrics.get(name)) for row in rows)]
        for name in epochs[-1].metrics
    ]
    marks = ["", *(BEST if best is not None and row.step == best.step else "" for row in rows)]
    room = width - sum(_width(column) + 2 for column in columns) - len(BEST)
    fitting = as_many_as_fit([" " * (_width(column) + 2) for column in of_metrics], room)
    columns += of_metrics[: len(fitting)]
    widths = [_width(column) for column in columns]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for cells in zip(*columns, strict=True)
    ]
    return [f"{line}  {mark}".rstrip() for line, mark in zip(lines, marks, strict=True)]


def as_many_as_fit(words: Iterable[str], room: int) -> list[str]:
    """The first ones that fit into so many columns."""
    fitting: list[str] = []
    for word in words:
        room -= len(word)
        if room < 0:
            break
        fitting.append(word)
    return fitting


def _width(column: Iterable[str]) -> int:
    return max(map(len, column))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _text(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="crop")
