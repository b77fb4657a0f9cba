"""The simplest logger: it writes nothing. Override what differs."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpframe.errors import UserError
from dpframe.loggers.formats import draw, png, table_text, wav
from dpframe.util import files

Scalar = float | int | str | bool


class Logger:
    """The Trainer calls these on the main process alone, in this order; none may touch the GPU.

    One that raises, e.g. on a full disk, is one warning: the logger is called no more, and training
    goes on.
    """

    needs_directory = False  # True: it is not opened without a `run_dir`

    def reset(self) -> None:
        """Comes before `open` in a fit without `resume`: forget what the run before has logged."""

    def open(
        self, run_dir: str, *, config: str, hparams: dict[str, Scalar], purge_step: int | None
    ) -> None:
        """A run begins: `config` is its resolved YAML, `hparams` its numbers in one flat dict.

        Of a run that has a name, tags or notes they are in `hparams`, too: `tags_of` reads them.
        `purge_step` is None, or the first step that a resumed run writes again.
        """

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        """All that was measured at one step, at once."""

    # What `trainer.log_image(name, value)` and so on hand over, checked and in one form. All but
    # histograms and graphs are files, for a logger that overrides `media_file` alone.

    def image(self, name: str, pixels: Any, *, step: int) -> None:
        """`pixels` is a NumPy array [height, width, channels] of uint8: grey, RGB or RGBA."""
        self.media_file("images", name, "png", lambda: png(pixels), step=step)

    def figure(self, name: str, figure: Any, *, step: int) -> None:
        """A figure of matplotlib's. It is closed once all loggers have had it."""
        self.media_file("figures", name, "png", lambda: draw(figure), step=step)

    def histogram(self, name: str, values: Any, *, step: int) -> None:
        """`values` is a NumPy array of finite numbers, in one row; it may be empty."""

    def text(self, name: str, text: str, *, step: int) -> None:
        """A text, which a dashboard may show as Markdown."""
        self.media_file("texts", name, "txt", text.encode, step=step)

    def audio(self, name: str, samples: Any, sample_rate: int, *, step: int) -> None:
        """`samples` is a NumPy array [samples, channels] of int16: mono or stereo."""
        self.media_file("sounds", name, "wav", lambda: wav(samples, sample_rate), step=step)

    def table(self, name: str, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        """A row is a list with a number, a text or None for each column."""
        self.media_file(
            "tables", name, "csv", lambda: table_text([columns, *rows]).encode(), step=step
        )

    def media_file(
        self, kind: str, name: str, suffix: str, encode: Callable[[], bytes], *, step: int
    ) -> None:
        """`encode()` makes the PNG, WAV, CSV or text file; `kind` is images, figures, texts, sounds
        or tables."""

    def pr_curve(self, name: str, curve: Any, *, step: int) -> None:
        """`curve` is a NumPy array [4, thresholds]: true and false positives, true and false
        negatives at `media.THRESHOLDS`. A logger without such a chart shows a table."""
        from dpframe.loggers import media

        columns = ["threshold", *media.COUNTS, "precision", "recall"]
        parts = media.THRESHOLDS, *curve, *media.precision_recall(curve)
        rows = list(map(list, zip(*(part.tolist() for part in parts), strict=True)))
        self.table(name, columns, rows, step=step)

    def graph(self, module: Any, inputs: tuple[Any, ...]) -> None:
        """A module of torch's, which is called with these tensors to see what it computes."""

    def flush(self) -> None:
        """A few times a second, and before a checkpoint: what was logged survives the process."""

    def dashboard(self, run_dir: str) -> str:
        """The command that shows what was logged, for the banner; '' if there is none."""
        return ""

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        """The run is over, with its final metrics."""


def require(package: str) -> None:
    """Refuses a logger, before a run begins, whose package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"logger={package} needs the package {package}: pip install 'dpframe[{package}]'"
        )


def tags_of(hparams: dict[str, Scalar]) -> list[str]:
    text = str(hparams.get("tags", ""))
    return text.split(",") if text else []


def read_id(path: Path) -> str:
    """The id by which a service knows the run, so that a resumed one goes on under it; or ''."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return text if re.fullmatch(r"[0-9A-Za-z_-]{1,64}", text) else ""


def write_id(path: Path, text: str) -> str:
    files.write_text(path, text)
    return text
