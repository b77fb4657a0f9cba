"""What of a data set's rows stands beside their predictions: their places and their own columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import count
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from dpframe.data.batches import Batches
from dpframe.data.input import Images, Table
from dpframe.errors import UserError, suggestion
from dpframe.values import unfit

ID = "id"  # a row's place in its data set, where no column has this name
CELLS = (int, float, str)


class Columns:
    """Those that are `asked` for, by names or patterns. The rows are read again, in their order. A
    cell is empty where the first row has the column and a later one has not."""

    def __init__(self, dataset: Any, asked: Sequence[str], set_name: str = "") -> None:
        self._dataset = dataset
        self._read: list[list[Any]] | None = None  # once they are sent to another process
        is_table = isinstance(dataset, Table)
        is_stream = not is_table and isinstance(dataset, IterableDataset | Batches)
        if is_stream and list(asked) != [ID]:
            raise UserError(
                "predict.columns: a stream's rows are read once; use predict.columns=[id]"
            )
        there = [] if is_stream else [name for name in next(self._rows(), {}) if name]
        names: dict[str, None] = {}
        for pattern in asked:
            found = [name for name in there if name == pattern or fnmatchcase(name, pattern)]
            if not found and pattern != ID:
                of, near = f" of {set_name}" * bool(set_name), suggestion(pattern, [ID, *there])
                raise UserError(
                    f"predict.columns=[{pattern}]: a row{of} has no such column; {near}"
                )
            names |= dict.fromkeys(found or [ID])
        self.names = list(names)
        self._counts = ID in names and ID not in there

    def rows(self) -> Iterator[list[Any]]:
        """The cells of each row; places alone have no end."""
        if self._read is not None:
            yield from self._read
            return
        if self._counts and len(self.names) == 1:
            yield from ([place] for place in count())
        for place, row in enumerate(self._rows()):
            cells = {ID: place, **row} if self._counts else row
            yield [cells.get(name) for name in self.names]

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        dataset = self._dataset
        if isinstance(dataset, Table):
            return dataset.texts()
        if isinstance(dataset, Images):
            return ({"file": path.name} for path in dataset.paths)
        return (_cells(dataset[place]) for place in range(len(dataset)))

    def __getstate__(self) -> dict[str, Any]:
        has_end = not self._counts or len(self.names) > 1
        read = [*self.rows()] if has_end else None
        return {"names": self.names, "_counts": self._counts, "_read": read}


def asked_for(columns: Iterable[str]) -> list[str]:
    """A text alone is refused: its letters are no names."""
    if isinstance(columns, Iterable) and not isinstance(columns, str):
        names = [*columns]
        if all(isinstance(name, str) for name in names):
            return names
    raise unfit("predict.columns", columns, list[str])


def _cells(row: Any) -> dict[str, Any]:
    """A row's numbers and texts by their names; each number of a tensor with one dimension."""
    parts: Any = {"input": row}
    if isinstance(row, Mapping):
        parts = row
    elif isinstance(row, tuple | list):
        names = getattr(row, "_fields", None) or [f"input_{at}" for at in range(len(row))]
        parts = dict(zip(names, row, strict=True))
    cells: dict[str, Any] = {}
    for name, part in parts.items():
        if isinstance(part, CELLS):
            cells[str(name)] = part
        elif isinstance(part, Tensor) or hasattr(part, "__array__"):
            cells |= _numbers(str(name), part)
    return cells


def _numbers(name: str, part: Any) -> dict[str, Any]:
    if part.ndim == 1 and len(part) > 1:
        return {f"{name}_{at}": number for at, number in enumerate(part.tolist())}
    is_one = part.ndim == 0 or (part.ndim == 1 and len(part) == 1)
    return {name: part.item()} if is_one else {}
