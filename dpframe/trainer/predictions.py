"""Predictions: one value for every row, in the order of the data set; written to a file."""

import csv
import logging
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from dpframe import checkpoint
from dpframe.data.columns import Columns
from dpframe.data.module import leaves
from dpframe.errors import Failure, UserError
from dpframe.util import files

CELLS = (int, float, str, bool)
WANTED = "return tensors, or lists, tuples and dicts of them"
ALIKE = "return the same parts for all"
HELD = 32 << 20  # bytes that are kept in memory at a time
LEAF = 64  # bytes of a number or a text
GATHERED = 64  # batches at a time, if they are small
log = logging.getLogger("dpframe")


@dataclass(eq=False, repr=False)
class Predictions:
    """`batches` holds, for each global batch, what each replica returned, in replica order: every
    tensor has a first dimension of rows, every list an entry a row."""

    batches: Sequence[list[Any]]
    name: str = ""  # of the data set, where there are several
    rows: int = 0
    columns: Columns | None = None  # of the data set, which stand before those of the outputs

    def joined(self) -> Any:
        """One value over all rows: a tensor, or a tuple or dict of them; a list with an entry a
        row where the rows' tensors have several shapes."""
        return join(list(chain.from_iterable(self.batches)))

    def save(self, directory: Path) -> Path:
        """`predictions.csv` for numbers in rows and columns, else `predictions.pt`, or the folder
        `predictions` with one such file for each piece of those that memory might not hold; the
        data set's name follows, where there are several."""
        stem = f"predictions-{self.name}" if self.name else "predictions"
        try:
            directory.mkdir(parents=True, exist_ok=True)  # it may have been deleted meanwhile
            try:
                path = directory / f"{stem}.csv"
                with files.atomic_write(path) as part:
                    _write_table(self._pieces(), part, self.columns)
            except NoTable:
                if self.columns is not None:
                    log.warning(
                        "predict.columns stand in predictions.csv alone: the predictions are a "
                        "file of torch, in the order of the data set"
                    )
                is_folder = isinstance(self.batches, Spool) and self.batches.is_on_disk
                path = directory / (stem if is_folder else f"{stem}.pt")
                with files.atomic_write(path) as part:
                    _write_objects(self._pieces(), part, is_folder=is_folder)
        except OSError as error:
            raise Failure(f"{path} can't be written: {error.strerror}") from error
        return path

    def _pieces(self) -> Iterator[Any]:
        """Joined: all at once, or of those that are on disk some at a time."""
        pieces = self.batches.pieces() if isinstance(self.batches, Spool) else [self.batches]
        first = None
        for batches in pieces:
            piece = join(list(chain.from_iterable(batches)))
            first = head(piece) if first is None else first
            join([first, head(piece)])  # refuses other parts than before
            yield piece


class NoTable(Exception):
    """The predictions, or a piece of them, have no columns of numbers or texts."""


def _write_table(pieces: Iterable[Any], part: Path, beside: Columns | None) -> None:
    columns = None
    rows = iter(list, None) if beside is None else beside.rows()
    with part.open("w", newline="", encoding="utf-8") as text:
        writer = csv.writer(text)
        for piece in pieces:
            table = as_table(piece)
            if table is None or columns not in (None, [*table]):
                raise NoTable
            if columns is None:
                columns = [*table]
                names = [] if beside is None else renamed(beside.names, columns)
                writer.writerow([*names, *columns])
            outputs = zip(*table.values(), strict=True)
            writer.writerows([*next(rows), *output] for output in outputs)


def renamed(names: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """Columns of the input beside those of the outputs, each with a name of its own."""
    taken, found = {*names, *outputs}, []
    for name in names:
        own = name
        while name in outputs and own in taken:
            own = f"input_{own}"
        taken.add(own)
        found.append(own)
    return found


def _write_objects(pieces: Iterable[Any], part: Path, *, is_folder: bool) -> None:
    if is_folder:
        part.mkdir()
    for number, piece in enumerate(pieces):
        _refuse_objects(piece)
        with (part / f"{number:05}.pt" if is_folder else part).open("wb") as file:
            checkpoint.dump(piece, file)


def head(value: Any) -> Any:
    """The first row, in the same structure."""
    if isinstance(value, dict):
        return {name: head(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(head, value))
    is_uneven = isinstance(value, list) and isinstance(value[0], Tensor)  # as `join` left them
    return value[0][None] if is_uneven else value[:1]


def by_rows(value: Any, rows: int, label: str) -> Any:
    """A share's output on the CPU. A part without an entry a row is refused: what is joined would
    depend on the number of replicas."""
    if isinstance(value, dict) and value:
        return {name: by_rows(part, rows, _at(label, name)) for name, part in value.items()}
    if isinstance(value, tuple) and value:
        return tuple(by_rows(part, rows, _at(label, at)) for at, part in enumerate(value))
    if isinstance(value, dict | tuple) or value is None:
        what = "None" if value is None else f"an empty {type(value).__name__}"
        raise UserError(f"{label} {what}; {WANTED}")
    value = on_cpu(value)
    of = f"for a batch of {rows} rows"
    if isinstance(value, Tensor):
        if not value.ndim or len(value) != rows:
            shape = tuple(value.shape)
            raise UserError(
                f"{label} a tensor of shape {shape} {of}; make the rows its first dimension"
            )
    elif not isinstance(value, list):
        raise UserError(f"{label} a {type(value).__name__} {of}; return an entry a row")
    elif len(value) != rows:
        raise UserError(
            f"{label} a list of {len(value)} {of}; a list is an entry a row, a tuple several parts"
        )
    return value


def _at(label: str, name: Any) -> str:
    return f"{label.removesuffix(' as')}[{name!r}] as"


def on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.cpu()
        # What a data worker has read is an open file, of which a process may have about 1000.
        is_file = value.layout is torch.strided and value.is_shared()
        return value.clone() if is_file else value
    if isinstance(value, dict):
        return {name: on_cpu(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [on_cpu(part) for part in value]
    if hasattr(value, "__array__"):  # NumPy's: a file of tensors loads without running code
        return torch.as_tensor(value)
    return value


def collected(processes: list[list[list[Any]]]) -> list[list[Any]]:
    """Joins the processes' batches: each batch gets the outputs of all replicas, in their order."""
    return [list(chain.from_iterable(parts)) for parts in zip(*processes, strict=True)]


def join(parts: list[Any]) -> Any:
    """One value over all rows, of what `by_rows` returned for the shares."""
    first = parts[0]
    names = {type(part).__name__ for part in parts}
    if len(names) > 1:
        some, others = sorted(names, key=str.lower)[:2]
        raise UserError(
            f"predict_step returned a {some} for some batches and a {others} for others; {ALIKE}"
        )
    if isinstance(first, Tensor):
        is_even = len({part.shape[1:] for part in parts}) == 1
        return torch.cat(parts) if is_even else [row for part in parts for row in part]
    if isinstance(first, list):
        return list(chain.from_iterable(parts))
    if isinstance(first, dict):
        if odd := set().union(*parts) - set.intersection(*map(set, parts)):
            raise UserError(
                f"predict_step returned different parts for some batches ({_listed(odd)}); {ALIKE}"
            )
        return {name: join([part[name] for part in parts]) for name in first}
    if len({len(part) for part in parts}) > 1:
        raise UserError(f"predict_step returned tuples of several lengths; {ALIKE}")
    return tuple(join(list(column)) for column in zip(*parts, strict=True))


def _listed(names: set[Any]) -> str:
    return ", ".join(sorted(map(str, names)))


def as_table(joined: Any) -> dict[str, list] | None:
    """Columns by name, with an entry a row; None if the outputs are not a table."""
    if isinstance(joined, tuple):
        joined = {f"output_{index}": part for index, part in enumerate(joined)}
    elif not isinstance(joined, dict):
        joined = {"output": joined}
    table: dict[str, list] = {}
    for name, value in joined.items():
        if isinstance(value, Tensor) and value.ndim in (1, 2):
            columns = value.T.tolist() if value.ndim == 2 else [value.tolist()]
        elif isinstance(value, list) and all(isinstance(cell, CELLS) for cell in value):
            columns = [value]
        else:
            return None
        names = [name] if len(columns) == 1 else [f"{name}_{i}" for i in range(len(columns))]
        if twice := table.keys() & set(names):
            log.warning(
                "predictions.csv would have two columns %s; they are written to predictions.pt "
                "instead: rename one for a table",
                sorted(twice)[0],
            )
            return None
        table |= dict(zip(names, columns, strict=True))
    return table if len({len(column) for column in table.values()}) == 1 else None


def _refuse_objects(joined: Any) -> None:
    """Refuses to write what torch.load(weights_only=True) can't load."""
    parts = joined.values() if isinstance(joined, dict) else joined
    if isinstance(joined, (dict, list, tuple)):
        for part in parts:
            _refuse_objects(part)
    elif joined is not None and not isinstance(joined, (Tensor, *CELLS)):
        raise UserError(
            f"predict_step returned a {type(joined).__name__}; return tensors, numbers, text, "
            "or lists and dicts of them"
        )


# ---- batches in memory while they are few, else on disk


def size_of(batches: Any) -> int:
    """About so many bytes in memory."""
    return sum(leaf.nbytes if isinstance(leaf, Tensor) else LEAF for leaf in leaves(batches))


def fitting(batches: int, held: float) -> int:
    """How many batches to gather at a time, given that so many took `held` bytes."""
    return max(1, min(GATHERED, int(batches * HELD / (held + 1))))


class Spool(Sequence[list[Any]]):
    """Its file has no name, so that nothing remains of it, whatever ends the process."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._file: Any = None
        self._held: list[list[Any]] = []
        self._bytes = 0
        self._count = 0

    @property
    def is_on_disk(self) -> bool:
        return self._file is not None

    def extend(self, batches: list[list[Any]]) -> None:
        self._held += batches
        self._count += len(batches)
        self._bytes += size_of(batches)
        if self._bytes <= HELD:
            return
        try:
            if self._file is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._file = TemporaryFile(dir=self._directory)  # noqa: SIM115
            pickle.dump(self._held, self._file, pickle.HIGHEST_PROTOCOL)
            self._file.flush()
        except OSError as error:
            raise Failure(
                f"the predictions can't be written to {self._directory}: {error.strerror}"
            ) from error
        self._held, self._bytes = [], 0

    def pieces(self) -> Iterator[list[list[Any]]]:
        """Some batches at a time."""
        if self._file is not None:
            place, end = 0, self._file.tell()
            while place < end:
                self._file.seek(place)
                batches = pickle.load(self._file)
                place = self._file.tell()
                self._file.seek(end)  # where more would be written
                yield batches
        if self._held:
            yield self._held

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[Any]]:
        return chain.from_iterable(self.pieces())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        at = range(self._count)[index]
        return next(islice(self, at, None))
