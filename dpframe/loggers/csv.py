"""The CSV logger writes a wide table: a row for each step, a column for each name.

A table or a text that is logged gets a file of its own, e.g. tables/val_worst-step200.csv.
"""

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpframe.loggers.base import Logger, Scalar
from dpframe.loggers.formats import file_name, table_text
from dpframe.util import files

KEPT = ("tables", "texts")  # kinds of files


class CSV(Logger):
    """Writes metrics.csv."""

    needs_directory = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._logged: set[str] = set()

    def open(
        self, run_dir: str, *, config: str, hparams: dict[str, Scalar], purge_step: int | None
    ) -> None:
        self._path = Path(run_dir) / "metrics.csv"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = ["step"]
        self._head = 0  # bytes of the header
        self._rows: list[dict[str, Any]] = []
        self._written: tuple[dict[str, Any], int] = ({}, 0)  # the last row, and where it begins
        self._last_step = purge_step or 0
        if purge_step is not None:
            self._drop_files(purge_step)
        if self._path.is_file():
            self._continue_table(purge_step)

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        if not self._rows and self._written[0].get("step") == step:
            self._take_back()
        if self._rows and self._rows[-1]["step"] == step:
            self._rows[-1].update(scalars)  # a log step that also ends its epoch is one row
        else:
            self._rows.append({**scalars, "step": step})
        self._logged.update(scalars)
        self._last_step = step

    def media_file(
        self, kind: str, name: str, suffix: str, encode: Callable[[], bytes], *, step: int
    ) -> None:
        if kind in KEPT:
            path = self._path.parent / kind / file_name(name, step, suffix)
            path.parent.mkdir(exist_ok=True)
            with files.atomic_write(path) as part:
                part.write_bytes(encode())

    def flush(self) -> None:
        if not self._rows:
            return
        names = dict.fromkeys(name for row in self._rows for name in row)
        added = [name for name in names if name not in self._columns]
        if added:
            self._widen(added)
        *rows, last = [table_text([[row.get(n, "") for n in self._columns]]) for row in self._rows]
        text, tail = "".join(rows).encode(), last.encode()
        with open(self._path, "ab") as file:
            file.write(text + tail)
            self._written = self._rows[-1], file.tell() - len(tail)
        self._rows.clear()

    def _take_back(self) -> None:
        """More numbers for a step whose row is on disk already."""
        row, begin = self._written
        os.truncate(self._path, begin)
        self._rows, self._written = [row], ({}, 0)

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        missing = {name: value for name, value in metrics.items() if name not in self._logged}
        if missing and succeeded:  # after an error they may be of a later step
            self.log(missing, step=self._last_step)
        self.flush()

    def _drop_files(self, purge_step: int) -> None:
        """Those that a resumed run writes again; those of its first step may be older than its
        checkpoint, which knows numbers alone."""
        folders = (self._path.parent / name for name in KEPT)
        for path in [path for folder in folders for path in folder.glob("*-step*.*")]:
            step = path.stem.rpartition("-step")[2]
            if step.isdecimal() and int(step) > purge_step:
                path.unlink()

    def _continue_table(self, purge_step: int | None) -> None:
        """Keeps the rows before `purge_step`."""
        header, rows = _read(self._path)
        if header[:1] != ["step"]:
            return  # it is no such table; the first flush replaces it
        self._columns = header
        whole = [row for row in rows if _is_whole(row, len(header))]
        kept = [row for row in whole if purge_step is None or int(row[0]) < purge_step]
        self._replace(table_text(kept).encode())

    def _widen(self, added: list[str]) -> None:
        rows = self._path.read_bytes()[self._head :] if self._head else b""
        self._columns = self._columns + added
        self._replace(rows.replace(b"\n", b"," * len(added) + b"\n"))  # numbers have no newline

    def _replace(self, rows: bytes) -> None:
        """Leaves the new table or the old one, whenever the process dies."""
        head = table_text([self._columns]).encode()
        with files.atomic_write(self._path) as part:
            part.write_bytes(head + rows)
        self._head = len(head)


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows, without the half row that a killed process may leave."""
    whole = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]
    rows = list(csv.reader(whole.splitlines()))
    return (rows[0], rows[1:]) if rows else ([], [])


def _is_whole(row: list[str], width: int) -> bool:
    """A power cut may leave zeros, or anything, in place of what was written last."""
    try:
        numbers = [float(cell) for cell in row[1:] if cell]
    except ValueError:
        return False
    return len(row) == width and row[0].isdecimal() and len(numbers) > 0
