"""A few rows of a data set, which stays as it is."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from dpframe.data.batches import Batches
from dpframe.data.copies import Copies
from dpframe.data.divided import first_of
from dpframe.errors import first_line
from dpframe.trainer.checks.draws import NotCompared


def picked(
    dataset: Any,
    count: int,
    *,
    only_spread: bool = False,
    refuse_late: Callable[[], None] = lambda: None,
) -> Iterator[list[Any]]:
    """The first rows of a data set, and as many from all over it, if not these alone; the first
    ones of a stream."""
    if isinstance(dataset, Batches):
        raise NotCompared("ready batches are read in training alone")
    if isinstance(dataset, IterableDataset):
        rows = _first(dataset, 2 * count)
        yield from (rows[at : at + count] for at in range(0, len(rows) - count + 1, count))
        return
    dataset = Copies().of(dataset)  # it may draw, or open what it reads
    if len(dataset) < count:
        raise NotCompared(f"there are fewer than {count} rows")
    spread = [place * (len(dataset) - 1) // (count - 1) for place in range(count)]
    chosen = [list(range(count)), spread][: 1 if len(dataset) < 2 * count else 2]
    for rows in chosen[-1:] if only_spread else chosen:
        samples: Any = []
        try:
            if getitems := getattr(dataset, "__getitems__", None):
                samples = getitems(rows)
            for row in () if getitems else rows:
                samples.append(dataset[row])
                refuse_late()
        except NotCompared:
            raise
        except Exception as error:  # the run will say so, with its place
            raise NotCompared(f"a row that is read says: {first_line(error)}") from None
        if not isinstance(samples, list):
            raise NotCompared("rows are not read one by one")
        yield samples


def _first(stream: Any, count: int) -> list[Any]:
    try:
        rows = first_of(stream, count)
    except Exception as error:
        raise NotCompared(f"a copy of the stream says: {first_line(error)}") from None
    if len(rows) < count // 2:
        raise NotCompared(f"there are fewer than {count // 2} rows")
    return rows
