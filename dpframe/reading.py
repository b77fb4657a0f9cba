"""Reads rows and puts them together; what goes wrong names the rows that it went wrong with."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from dpframe.errors import Failure, UserError, exited
from dpframe.workers import Chosen

SHOWN = 10
HOW = "make all rows alike, or put them together in your DataModule's collate"


@dataclass(frozen=True)
class Refused:
    """A UserError's line on its way out of a data worker, where it would become a traceback."""

    line: str
    kind: type[UserError]


def refused(error: UserError | SystemExit) -> Refused:
    """In a data worker."""
    if isinstance(error, UserError):
        return Refused(str(error), type(error))
    worker = get_worker_info()
    who = f"data worker {worker.id}: " if worker is not None else ""
    return Refused(str(exited(error, who=who)), Failure)


@dataclass(frozen=True)
class Together:
    """The user's collate, or torch's, which says little about the rows that it can't stack."""

    collate: Callable[[list], Any]
    is_custom: bool
    dataset: Any

    def __call__(self, made: Any, rows: Sequence[int]) -> Any:
        """`rows` are the numbers of what is in `made`."""
        try:
            return self.collate(made)
        except UserError:
            raise
        except Exception as error:
            name = name_of(self.dataset)
            is_told = not self.is_custom and isinstance(made, list)
            if is_told and (said := difference(made, rows)):
                raise UserError(f"{said[0]} of {name}: {said[1]}; {HOW}") from None
            error.add_note(f"while putting together rows {listed(rows)} of {name}")
            raise


def read(dataset: Any, rows: list[int]) -> list:
    """What the data set raises keeps its traceback, with a note of the row."""
    several = getattr(dataset, "__getitems__", None)
    if several:
        return _noted(several, rows, f"while reading rows {listed(rows)} of {name_of(dataset)}")
    made = []
    try:
        for row in rows:
            made.append(dataset[row])
    except Exception as error:
        error.add_note(f"while reading row {rows[len(made)]} of {name_of(dataset)}")
        raise
    return made


def described(dataset: Any, readers: Chosen, *, is_tensors: bool) -> str:
    """How the rows are read, as `404 rows as tensors, index_select`."""
    if is_tensors:
        return f"{len(dataset):,} rows as tensors, index_select"
    where = f"{readers.processes} workers" if readers.processes != 1 else "1 worker"
    where = where if readers.processes else "in this process"
    why = f": {readers.why}" if readers.why else ""
    if isinstance(dataset, IterableDataset):
        return f"a stream, {where}{why}"
    by = "__getitems__" if getattr(dataset, "__getitems__", None) else "__getitem__"
    return f"{len(dataset):,} rows by {by}, {where}{why}"


def difference(made: Sequence, rows: Sequence[int]) -> tuple[str, str] | None:
    """The first two rows that differ, and how."""
    for row, value in zip(rows[1:], made[1:], strict=False):
        how = _differ(made[0], value)
        if how:
            return f"rows {rows[0]} and {row}", how
    how = _unfit(made[0])
    return (f"row {rows[0]}", how) if how else None


def name_of(dataset: Dataset) -> str:
    name = type(dataset).__name__
    return f"{name} of {name_of(dataset.dataset)}" if type(dataset) is Subset else name


def listed(rows: Sequence[int]) -> str:
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return " ".join(map(str, rows[:SHOWN])) + more


def _noted(call: Callable, given: Any, note: str) -> Any:
    try:
        return call(given)
    except Exception as error:
        error.add_note(note)
        raise


def _differ(one: Any, other: Any) -> str:
    """How two rows differ in what torch needs to be alike; '' where they do not."""
    shapes = [tuple(value.shape) for value in (one, other) if hasattr(value, "shape")]
    if len(shapes) == 2:
        return f"shapes {shapes[0]} and {shapes[1]}" if shapes[0] != shapes[1] else ""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            only = sorted(map(str, one.keys() ^ other.keys()))
            return f"keys {', '.join(only)} in one of them alone"
        return _first((f"'{key}': ", one[key], other[key]) for key in one)
    if _is_several(one) and _is_several(other):
        if len(one) != len(other):
            return f"{len(one)} and {len(other)} parts"
        return _first((f"part {i}: ", *pair) for i, pair in enumerate(zip(one, other, strict=True)))
    kinds = [type(value).__name__ for value in (one, other)]
    numbers = all(isinstance(value, int | float) for value in (one, other))
    return "" if kinds[0] == kinds[1] or numbers else f"a {kinds[0]} and a {kinds[1]}"


def _first(parts: Iterable[tuple[str, Any, Any]]) -> str:
    for where, one, other in parts:
        if how := _differ(one, other):
            return where + how
    return ""


def _unfit(value: Any) -> str:
    """A part of a row that torch can't stack at all."""
    if isinstance(value, Mapping):
        return next((f"'{k}': {how}" for k, v in value.items() if (how := _unfit(v))), "")
    if _is_several(value):
        return next((f"part {i}: {how}" for i, v in enumerate(value) if (how := _unfit(v))), "")
    if isinstance(value, Tensor | int | float | str | bytes) or hasattr(value, "__array__"):
        return ""
    return f"a {type(value).__name__}, which torch can't put together"


def _is_several(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
