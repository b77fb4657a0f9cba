"""A few rows of a data set, which stays as it is."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import ConcatDataset, IterableDataset

from dpframe.data import Rows
from dpframe.data.batches import Batches
from dpframe.data.copies import Copies
from dpframe.data.divided import LOOKED_AT, first_of, is_alike, told
from dpframe.data.generators import Draws
from dpframe.data.module import leaves
from dpframe.data.together import Together
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
    if isinstance(dataset, Together):
        chosen = dataset.few(count)
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


def drawn_apart(rows: Rows) -> str:
    """How rows draw that are not the same wherever they are read, in words; empty if they are."""
    if rows.is_stream or rows.are_tensors:
        return ""
    rows = Rows(Copies().of(rows.dataset), lambda samples: samples)
    starts = rows.dataset.cumulative_sizes[:-1] if isinstance(rows.dataset, ConcatDataset) else []
    numbers = [*range(min(LOOKED_AT, len(rows.dataset))), *starts]
    try:
        looks = [rows.read(numbers, Draws(0, numbers)) for _ in range(2)]
    except Exception:  # the run will say so, with its place
        return ""
    if rows.draw and not isinstance(looks[0], list):
        return "their __getitems__ draws for all of them"
    first, second = ([told(leaf) for leaf in leaves(look)] for look in looks)
    return "" if is_alike(first, second) else "they draw from a generator that dpframe can't seed"


def _first(stream: Any, count: int) -> list[Any]:
    try:
        rows = first_of(stream, count)
    except Exception as error:
        raise NotCompared(f"a copy of the stream says: {first_line(error)}") from None
    if len(rows) < count // 2:
        raise NotCompared(f"there are fewer than {count // 2} rows")
    return rows
