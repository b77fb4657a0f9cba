"""What a terminal shows while a run trains: a table of its epochs, and below it a bar."""

import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from dpframe.callbacks.monitor import EpochRow
from dpframe.errors import printable

LEAST_BAR, USUAL_BAR, MOST_BAR = 4, 10, 40  # columns
BESIDE = 60  # columns that the epoch, the pace and two metrics may take
BELOW = 4  # lines of the terminal that are not the table's epochs


class Screen:
    """Redrawn by `draw` alone: no thread."""

    def __init__(self) -> None:
        self.live = Live(console=Console(), auto_refresh=False)
        self.live.start()

    def draw(
        self,
        epochs: Sequence[EpochRow],
        best: EpochRow | None,
        *,
        where: str,
        done: float | None,
        has_bar: bool,
        pace: str,
        metrics: Mapping[str, float],
    ) -> None:
        """`done` is the share of the training that is over, if its length is known. Of the
        metrics, the first ones are shown as far as there is room."""
        console = self.live.console
        rows = list(epochs[-max(1, console.height - BELOW) :])
        if best is not None and rows and all(row.step != best.step for row in rows):
            rows.insert(0, best)
        names = [*rows[-1].metrics] if rows else []
        table = _table(rows, best, names)
        whole = console.options.update(max_width=1 << 16)
        while names and console.measure(table, options=whole).maximum > console.width:
            names.pop()
            table = _table(rows, best, names)
        bar = _bar(where, done, pace, metrics, console.width, has_bar=has_bar)
        self.live.update(Group(table, bar) if rows else bar, refresh=True)

    def stop(self) -> None:
        self.live.stop()


def _table(rows: Sequence[EpochRow], best: EpochRow | None, names: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for name in ("epoch", "step", *names):
        table.add_column(_text(printable(name)), justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for row in rows:
        numbers = [f"{row.metrics[name]:.4g}" if name in row.metrics else "" for name in names]
        is_best = best is not None and row.step == best.step
        cells = (str(row.number), str(row.step), *numbers, "best" if is_best else "")
        table.add_row(*cells, style="green" if is_best else None)
    return table


def _bar(
    where: str,
    done: float | None,
    pace: str,
    metrics: Mapping[str, float],
    width: int,
    *,
    has_bar: bool,
) -> Table:
    words = [f"  {name} {value:.4g}" for name, value in metrics.items()]
    room = width - len(where) - len(pace) - 2
    # As long in each frame, whatever the numbers are.
    columns = min(max(USUAL_BAR, (width - BESIDE) // 2), MOST_BAR)
    columns = min(columns, room) if room >= LEAST_BAR else columns  # else the pace is cut off
    while words and sum(map(len, words)) > room - columns:
        words.pop()
    bar = ProgressBar(1.0, done or 0.0, columns, done is None, animation_time=time.monotonic())
    numbers = _text(printable(pace + "".join(words)))
    parts = (_text(where), bar, numbers) if has_bar else (_text(f"{where} "), numbers)
    line = Table.grid(*(Column(no_wrap=True, overflow="crop") for _ in parts), padding=(0, 1))
    line.add_row(*parts)
    return line


def _text(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="crop")
