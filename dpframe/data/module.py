"""The data of a recipe: its data sets and their rows, and what a batch, a share and a split are."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache, partial
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from dpframe.data.contents import OF_COLLATE, Contents, contents_of
from dpframe.data.generators import Draws, Generators
from dpframe.data.input import numbers_of
from dpframe.errors import UserError, listed

SHOWN = 10  # row numbers in an error
HOW = "make all rows alike, or combine them in your DataModule's collate"
Shares = Callable[[Sequence], list[Sequence]]
"""A strategy's `split_rows`: a batch's rows in, the shares of this process's replicas out."""


class DataModule:
    """The data of a recipe: `prepare_data` is called once on each machine, then `setup` in each
    process, and then those methods that return the data sets which a mode reads.

    `batch_size` is global: what one micro-step sees over all replicas.

    `workers` is the number of processes that read for each rank; "auto" measures how many pay off.
    `divide_streams` has each rank and worker read shards of its own, so the batches depend on them.
    `divided="by_rank"` is for data of which each process has a part of its own already.
    `persistent_workers` says whether the processes that read stay from one epoch to the next: true,
    false, or "auto", as long as the data set stays as it is.
    `pin_memory=False` has batches copied to a GPU from memory that is not pinned.
    `drop_last` leaves out the last batch of an epoch of training where it has fewer rows.
    Validation, test and prediction have `eval_batch_size`, or `batch_size` where that is None.
    `input` names a file or a folder to predict on, in place of `predict_dataset`.
    """

    drop_last = False  # where a class of its own does not call __init__
    eval_batch_size: int | None = None
    input: str | None = None
    divided: str | None = None
    persistent_workers: bool | str = "auto"
    pin_memory: bool = True
    own_class: type | None = None  # where the user's code is, if not in this class
    has_preparation = False  # a `prepare_data` of its own

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.has_preparation = cls.has_own("prepare_data")

    @classmethod
    def has_own(cls, method: str) -> bool:
        """Whether this kind of data has written the method itself."""
        return getattr(cls, method) is not getattr(DataModule, method)

    def __init__(
        self,
        batch_size: int = 32,
        workers: int | str = 0,
        shuffle: bool = True,
        divide_streams: bool = False,
        divided: str | None = None,
        drop_last: bool = False,
        eval_batch_size: int | None = None,
        input: str | None = None,
        persistent_workers: bool | str = "auto",
        pin_memory: bool = True,
    ) -> None:
        self.batch_size = batch_size
        self.workers = workers
        self.shuffle = shuffle
        self.divide_streams = divide_streams
        self.divided = divided
        self.drop_last = drop_last
        self.eval_batch_size = eval_batch_size
        self.input = input
        self.persistent_workers = persistent_workers
        self.pin_memory = pin_memory

    def prepare_data(self) -> None:
        """Downloads and converts files: called once on each machine, before any of its processes
        reads. It sets nothing of `self`, which the other processes would not have."""

    def setup(self) -> None:
        """Reads what the data sets need; runs once in every process, before they are asked for."""

    def train_dataset(self) -> Dataset | DataLoader | None:
        """A ready DataLoader's batch is the global one."""
        return None

    def val_dataset(self) -> Dataset | DataLoader | dict[str, Any] | None:
        """One data set, or several by name; test_dataset and predict_dataset likewise."""
        return None

    def test_dataset(self) -> Dataset | DataLoader | dict[str, Any] | None:
        """What mode=test measures on."""
        return None

    def predict_dataset(self) -> Dataset | DataLoader | dict[str, Any] | None:
        """What mode=predict predicts on; without one of its own, the test set."""
        return self.test_dataset()

    def input_row(self, row: Any) -> Any:
        """What `predict_dataset` would give, of a row of `input`: of a table a dict of numbers and
        texts by column, of images a tensor [channels, height, width] from 0 to 1."""
        return numbers_of(row)

    def worker_init(self, worker: int) -> None:
        """Called in each process that `workers` starts, before it reads its first row."""

    def train_sampler(self, dataset: Dataset) -> Iterable | None:
        """A Sampler or batch sampler of your own: its order is kept and split over the replicas."""
        return None

    def collate(self, rows: list) -> Any:
        """A batch of these rows; without one of its own, as torch's `default_collate` makes it."""
        return default_collate(rows)


def sets_of(returned: Any) -> dict[str, Any]:
    """What a DataModule's method returned, by the data sets' names; one alone has the name ""."""
    return returned if isinstance(returned, dict) else {"": returned}


class Share(NamedTuple):
    """One replica's part of a global batch of `total` rows. A replica that gets none of them has
    Share(None, 0, total): nothing is read for it, and no step of a task is called."""

    batch: Any
    rows: int
    total: int = 0
    places: Sequence[int] | None = None  # of its rows in the global batch


class Batch(NamedTuple):
    """A global batch: the shares of this process's replicas, and the rows over all replicas."""

    shares: list[Share]
    rows: int
    name: str = ""  # of the data set, where there are several


def placed(batch: Batch, moved: Any) -> Batch:
    """The batch with the shares that a strategy's `to_device` returned, one or a list of them, but
    for those without rows."""
    shares = [moved] if isinstance(moved, Share) else moved
    return batch._replace(shares=[share for share in shares if share.rows])


def split(rows: Sequence, replicas: int) -> list[Sequence]:
    """Contiguous shares as torch.chunk makes them (30 on 4: 8 8 8 6); the last may be empty."""
    size = -(-len(rows) // replicas)
    return [rows[start * size : (start + 1) * size] for start in range(replicas)]


class Pieces(list):
    """The batches of a share's pieces, which were collated one by one."""


def cuts(rows: int, most: int) -> list[Sequence[int]]:
    """The rows of each piece of a share, of which none has more than `most`."""
    return [cut for cut in split(range(rows), -(-rows // most)) if cut] if rows else []


def move(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The same nest of lists, tuples, Mappings and dataclasses with its tensors on `device`; floats
    as `dtype`. Other objects move themselves by their `to`; those that have `apply` are cast."""

    waits_not = device.type != "mps"  # which may read the host's memory after it is freed

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            of_type = dtype if leaf.is_floating_point() else None
            return leaf.to(device, of_type, non_blocking=waits_not)
        if not hasattr(leaf, "to"):
            return leaf
        is_cast = dtype is not None and _applies(leaf)
        if is_cast:
            leaf = copy(leaf)  # it may change itself, and be a row of the data set
        kind: Any = type(leaf)
        if waits_not and _copies_unblocked(kind):
            leaf = leaf.to(device, non_blocking=True)
        else:
            leaf = leaf.to(device)
        return leaf.apply(cast) if is_cast else leaf

    def cast(part: Any) -> Any:
        is_float = isinstance(part, Tensor) and part.is_floating_point()
        return part.to(dtype) if is_float else part

    return mapped(moved, value)


@cache
def _copies_unblocked(kind: Any) -> bool:
    """Whether a type's `to` has `non_blocking`, or takes whatever a tensor's takes."""
    parameters = inspect.signature(kind.to).parameters
    takes = {parameter.kind for parameter in parameters.values()}
    takes_all = takes >= {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
    return takes_all or "non_blocking" in parameters


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nest of lists, tuples, Mappings and dataclasses, with `function` applied to what is
    in it."""
    if type(value) is dict:
        return {key: mapped(function, part) for key, part in value.items()}
    if _is_sequence(value):
        parts = [mapped(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    items = _items(value)
    if items is None:
        return function(value)
    return _with(value, {key: mapped(function, part) for key, part in items.items()})


def leaves(value: Any) -> Iterator[Any]:
    """What is in a nest, as `mapped` sees it."""
    items = _items(value)
    if items is not None:
        for part in items.values():
            yield from leaves(part)
    elif _is_sequence(value):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "to")  # e.g. a PackedSequence


def _items(value: Any) -> Mapping[Any, Any] | None:
    """What is in a Mapping or in the fields of a dataclass; None of anything else."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Tensor) or _applies(value):
        return None
    if isinstance(value, Mapping):  # e.g. a tokenizer's BatchEncoding
        return value
    if not is_dataclass(value) or isinstance(value, type) or hasattr(value, "to"):
        return None
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _applies(value: Any) -> bool:
    """Whether it does by itself what is done to all in it, e.g. PyG's Data, or a TensorDict."""
    return hasattr(value, "to") and hasattr(value, "apply") and not isinstance(value, nn.Module)


def _with(value: Any, parts: dict[Any, Any]) -> Any:
    """A copy with these parts, which keeps what else is in its attributes."""
    kind: Any = type(value)
    if not isinstance(value, Mapping):
        set_part: Callable[..., None] = object.__setattr__  # also where it is frozen
    elif getattr(value, "__dict__", None) is value or not hasattr(kind, "__setitem__"):
        return kind(parts)  # its attributes are its items, or nothing can be set
    else:
        set_part = kind.__setitem__
    changed = copy(value)
    for name, part in parts.items():
        set_part(changed, name, part)
    return changed


def tensors_in(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


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
        self.is_stream = isinstance(dataset, IterableDataset)
        self.epoch: int | None = None  # that the data set was told
        self._generators: Generators | None = None  # None: not looked for
        # Whether a batch is one index_select per tensor.
        self.are_tensors = not self.has_own_collate and is_tensors(dataset)

    def begin(self, epoch: int | None) -> None:
        """In each process that reads, before an epoch of training; None: of an evaluation, whose
        data set may be training's, too."""
        self.epoch = epoch
        self._generators = None
        if epoch is not None:
            set_epoch(self.dataset, epoch)

    @property
    def generators(self) -> Generators:
        """Of their own, as they are in this process in this epoch."""
        if self._generators is None:
            collate = self.collate if self.has_own_collate else None
            self._generators = Generators(self.dataset, collate)
        return self._generators

    def read(self, rows: list[int], draws: Draws | None = None) -> Any:
        """The batch of these rows. What the data set raises keeps its traceback, with a note."""
        if draws is None or not self.generators:
            return self._read(rows)
        with self.generators.kept():
            return self._read(rows, partial(self.generators.seed, draws.seed), draws.places)

    def _read(
        self,
        rows: list[int],
        seed: Callable[[int], None] | None = None,
        places: Sequence[int] = (),
    ) -> Any:
        getitems = getattr(self.dataset, "__getitems__", None)
        if seed is not None and type(self.dataset) is Subset:
            getitems = None  # torch's, which reads row by row if its data set does
        if getitems:
            if seed is not None:
                seed(places[0])
            with noted(lambda: f"while reading rows {listed(rows, SHOWN, ' ')} of {self.name}"):
                together = getitems(rows)
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
        return contents_of(self.dataset, self.name) | (
            contents_of(self.collate, "collate", deepest=OF_COLLATE) if self.has_own_collate else {}
        )

    def described(self) -> str:
        """For the banner, e.g. `404 rows as tensors, index_select`."""
        if self.is_stream:
            return "a stream"
        if self.are_tensors:
            return f"{len(self.dataset):,} rows as tensors, index_select"
        by = "__getitems__" if getattr(self.dataset, "__getitems__", None) else "__getitem__"
        return f"{len(self.dataset):,} rows by {by}"


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


def tensors_of(dataset: Any) -> tuple[Tensor, ...]:
    """The tensors behind a data set that is nothing but tensors."""
    if type(dataset) is Subset:
        tensors, rows = tensors_of(dataset.dataset), torch.as_tensor(dataset.indices)
        rows = torch.where(rows < 0, rows + len(tensors[0]), rows)  # from the end, as in torch
        return tuple(tensor.index_select(0, rows) for tensor in tensors)
    return dataset.tensors


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
