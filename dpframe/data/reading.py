"""How the rows of a data set are read, one by one or together, and made a batch."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from dpframe.data.contents import OF_COLLATE, Contents, contents_of
from dpframe.data.generators import Draws, Generators, OfProcess
from dpframe.data.mix import Several
from dpframe.data.module import DataModule, Pieces, cuts, leaves
from dpframe.errors import UserError, listed

SHOWN = 10  # row numbers in an error
HOW = "make all rows alike, or combine them in your DataModule's collate"


class Rows:
    """A data set and the collate that makes a batch of its rows, or one of `piece` rows each."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list], Any] = default_collate,
        piece: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.piece = piece
        plain = default_collate, DataModule.collate
        self.has_own_collate = inspect.unwrap(getattr(collate, "__func__", collate)) not in plain
        parts = collate.rows.values() if isinstance(collate, ByName) else [self]
        self._collates = [each.collate for each in parts if each.has_own_collate]
        self.is_stream = isinstance(dataset, IterableDataset)
        self.epoch: int | None = None  # that the data set was told
        self.draw = False  # random numbers, as was seen in this process
        self.looks_always = False  # whether they do, at each batch
        self._batches = 0  # that were read without seeds
        self._is_first = True  # of a pass
        self._generators: Generators | None = None  # None: not looked for
        # Whether a batch is one index_select per tensor.
        self.are_tensors = not self.has_own_collate and is_tensors(dataset)

    def begin(self, epoch: int | None) -> None:
        """In each process that reads, before an epoch of training; None: of an evaluation, whose
        data set may be training's, too."""
        self.epoch = epoch
        self._is_first = True
        self._generators = None
        if epoch is not None:
            set_epoch(self.dataset, epoch)

    @property
    def generators(self) -> Generators:
        """Of their own, as they are in this process in this epoch, and the process's."""
        if self._generators is None:
            self._generators = Generators(self.dataset, self._collates, OfProcess())
        return self._generators

    def read(self, rows: list[int], draws: Draws | None = None) -> Any:
        """The batch of these rows. What the data set raises keeps its traceback, with a note.

        Rows that have drawn random numbers are read again, and from then on, each with a seed."""
        if draws is None or not (self.draw or self._is_looked_at()):
            return self._read(rows)
        generators = self.generators
        before = generators.states()
        try:
            if not self.draw:
                batch = self._read(rows)
                self.draw = generators.have_drawn(before)
                if not self.draw:
                    return batch
            return self._read(rows, partial(generators.seed, draws.seed), draws.places)
        finally:
            if self.draw:
                generators.restore(before)

    def _is_looked_at(self) -> bool:
        """Unless always, at the first batch of a pass, and the 2nd, 4th, 8th … of the run."""
        self._batches += 1
        is_first, self._is_first = self._is_first, False
        is_power_of_two = self._batches & (self._batches - 1) == 0
        return self.looks_always or is_first or is_power_of_two or self.generators.are_own

    def _read(
        self,
        rows: list[int],
        seed: Callable[[int], None] | None = None,
        places: Sequence[int] = (),
    ) -> Any:
        if getitems := getattr(self.dataset, "__getitems__", None):
            with noted(lambda: f"while reading rows {listed(rows, SHOWN, ' ')} of {self.name}"):
                together = getitems(rows) if seed is None else _each(getitems, rows, seed, places)
            return self.combine(together, rows)
        samples: list = []
        with noted(lambda: f"while reading row {rows[len(samples)]} of {self.name}"):
            for number, row in enumerate(rows):
                if seed is not None:
                    seed(places[number])
                samples.append(self.dataset[row])
        return self.combine(samples, rows)

    def combine(self, samples: Any, rows: Sequence[int]) -> Any:
        """The batch that the collate makes, or its pieces."""
        if self.piece is None or len(rows) <= self.piece:
            return self._combined(samples, rows)
        parts = [slice(cut[0], cut[-1] + 1) for cut in cuts(len(rows), self.piece)]
        return Pieces(self._combined(samples[part], rows[part]) for part in parts)

    def _combined(self, samples: Any, rows: Sequence[int]) -> Any:
        """Torch's own collate does not say which rows it can't stack."""
        try:
            return self.collate(samples)
        except UserError:
            raise
        except Exception as error:
            if not self.has_own_collate and isinstance(samples, list):
                which, why = _difference(samples, rows)
                raise UserError(f"{which} of {self.name} can't be stacked: {why}; {HOW}") from None
            error.add_note(f"while collating rows {listed(rows, SHOWN, ' ')} of {self.name}")
            raise

    @property
    def name(self) -> str:
        return _name_of(self.dataset)

    def contents(self) -> Contents:
        """What is in the data set, and in the attributes of what has the collate."""
        contents = contents_of(self.dataset, self.name)
        for number, collate in enumerate(self._collates):
            name = "collate" + f" {number}" * (number > 0)
            contents |= contents_of(collate, name, deepest=OF_COLLATE)
        return contents

    def described(self) -> str:
        """For the banner, e.g. `404 rows as tensors, index_select`."""
        if self.is_stream:
            return "a stream"
        if self.are_tensors:
            return f"{len(self.dataset):,} rows as tensors, index_select"
        by = "__getitems__" if getattr(self.dataset, "__getitems__", None) else "__getitem__"
        if isinstance(self.dataset, Several):
            return f"{self.dataset.described()} by {by}"
        return f"{len(self.dataset):,} rows by {by}"


class Row(NamedTuple):
    """A row of one of the sets, by its number there."""

    name: str
    number: int
    row: Any


class ByName:
    """The collate: a dict of the batches of those sets of which there are rows."""

    def __init__(self, rows: dict[str, Rows]) -> None:
        self.rows = rows

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        batches = {}
        for name, of in self.rows.items():
            if here := [row for row in rows if row.name == name]:
                numbers = [row.number for row in here]
                batches[name] = of.combine([row.row for row in here], numbers)
        return batches

    def places(self, rows: Sequence[Row]) -> list[int]:
        """Of each row in the dict: the rows of the first set come first."""
        names = [*self.rows]
        order = sorted(range(len(rows)), key=lambda place: names.index(rows[place].name))
        return sorted(range(len(rows)), key=order.__getitem__)


def _each(
    getitems: Callable[[list[int]], Any],
    rows: list[int],
    seed: Callable[[int], None],
    places: Sequence[int],
) -> Any:
    """Rows that draw, one by one. What is no list of them can't be put together: it has the seed of
    its first row."""
    samples: list = []
    for row, place in zip(rows, places, strict=True):
        seed(place)
        one = getitems([row])
        if not isinstance(one, list):
            seed(places[0])
            return getitems(rows)
        samples += one
    return samples


def set_epoch(dataset: Any, epoch: int) -> None:
    """Of a data set that has it, or of those that one of torch's is made of."""
    parts: Any = []
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    elif isinstance(dataset, Subset):
        parts = [dataset.dataset]
    elif isinstance(dataset, ConcatDataset | ChainDataset | StackDataset):
        parts = dataset.datasets
    for part in parts.values() if isinstance(parts, dict) else parts:
        set_epoch(part, epoch)


def is_tensors(dataset: Any) -> bool:
    """Whether a data set is nothing but tensors: its rows are not computed by a method."""
    if type(dataset) is Subset:
        return is_tensors(dataset.dataset)
    kind = type(dataset)
    return (
        isinstance(dataset, TensorDataset)
        and kind.__getitem__ is TensorDataset.__getitem__
        and not hasattr(kind, "__getitems__")
        and not hasattr(kind, "set_epoch")
    )


@dataclass(frozen=True)
class TensorTable:
    """Tensors, and which of their rows are those of a data set; None: all of them."""

    tensors: tuple[Tensor, ...]
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tensors[0] if self.rows is None else self.rows)

    def whole(self) -> tuple[Tensor, ...]:
        """The rows by themselves, which takes a copy of those of a Subset."""
        if self.rows is None:
            return self.tensors
        return tuple(tensor.index_select(0, self.rows) for tensor in self.tensors)


def table_of(dataset: Any) -> TensorTable:
    """Of a data set that is nothing but tensors. Those of a Subset are not copied."""
    if type(dataset) is not Subset:
        return TensorTable(dataset.tensors)
    of = table_of(dataset.dataset)
    rows = _numbers_of(dataset.indices)
    if (rows < 0).any():  # from the end, as in torch
        rows = torch.where(rows < 0, rows + len(of), rows)
    return TensorTable(of.tensors, rows if of.rows is None else of.rows[rows])


def _numbers_of(rows: Sequence[int]) -> Tensor:
    """Of a range torch would make a list first, of 36 bytes a row."""
    if isinstance(rows, range):
        return torch.arange(len(rows)).mul_(rows.step).add_(rows.start)
    return torch.as_tensor(rows, dtype=torch.int64)


@contextmanager
def noted(note: Callable[[], str]) -> Iterator[None]:
    """Adds a note to an error from inside."""
    try:
        yield
    except Exception as error:
        error.add_note(note())
        raise


def _name_of(dataset: Dataset) -> str:
    name = type(dataset).__name__
    return f"{name} of {_name_of(dataset.dataset)}" if type(dataset) is Subset else name


def _difference(samples: list, rows: Sequence[int]) -> tuple[str, str]:
    """The first two rows that torch can't stack, and why."""
    for row, sample in zip(rows, samples, strict=False):
        if why := _why_not([samples[0], sample]):
            return f"rows {rows[0]} and {row}" if row != rows[0] else f"row {row}", why
    return f"rows {listed(rows, SHOWN, ' ')}", "each of them can be stacked on the first"


def _why_not(samples: list) -> str:
    for a, b in zip(*map(leaves, samples), strict=False):
        if hasattr(a, "shape") and hasattr(b, "shape") and a.shape != b.shape:
            return f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    try:
        default_collate(samples)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
