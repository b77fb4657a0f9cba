"""The data of a recipe: its data sets and their rows, and what a batch, a share and a split are."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    default_collate,
)

from dpframe.data.input import numbers_of

Shares = Callable[[Sequence], list[Sequence]]
"""A strategy's `split_rows`: a batch's rows in, the shares of this process's replicas out."""


class DataModule:
    """The data of a recipe: `prepare_data` is called once on each machine, then `setup` in each
    process, and then those methods that return the data sets which a mode reads.

    `batch_size` is global: what one micro-step sees over all replicas. Where there are several
    training sets it is that of each, or a dict of numbers by their names, and `length` says whose
    batches make an epoch: those of the `longest` set, of the `shortest`, or of the one of a name.

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

    length: Any = "longest"  # a class of its own may have something else of that name
    own_class: type  # where the user's code is: this class, or that of what it is around
    has_preparation = False  # a `prepare_data` of its own

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.own_class = cls
        cls.has_preparation = cls.has_own("prepare_data")

    @classmethod
    def has_own(cls, method: str) -> bool:
        """Whether this kind of data has written the method itself."""
        return getattr(cls, method) is not getattr(DataModule, method)

    def __init__(
        self,
        batch_size: int | Mapping[str, int] = 32,
        workers: int | str = 0,
        shuffle: bool = True,
        divide_streams: bool = False,
        divided: str | None = None,
        drop_last: bool = False,
        eval_batch_size: int | None = None,
        input: str | None = None,
        persistent_workers: bool | str = "auto",
        pin_memory: bool = True,
        length: str | None = None,
    ) -> None:
        self.batch_size: Any = batch_size
        self.workers = workers
        self.shuffle = shuffle
        self.divide_streams = divide_streams
        self.divided = divided
        self.drop_last = drop_last
        self.eval_batch_size = eval_batch_size
        self.input = input
        self.persistent_workers = persistent_workers
        self.pin_memory = pin_memory
        if length is not None:
            self.length = length

    def prepare_data(self) -> None:
        """Downloads and converts files: called once on each machine, before any of its processes
        reads. It sets nothing of `self`, which the other processes would not have."""

    def setup(self) -> None:
        """Reads what the data sets need; runs once in every process, before they are asked for."""

    def train_dataset(self) -> Dataset | DataLoader | dict[str, Any] | None:
        """A ready DataLoader's batch is the global one. Of several sets by name, a step gets a dict
        of batches."""
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


DataModule.own_class = DataModule


class DataSets(DataModule):
    """Data sets that are there already, or that the `setup` of a class below this one makes.

    Each is a Dataset, a DataLoader, a stream, or several by name in a dict. Without one to
    `predict` on it is the one to `test`.
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        **options: Any,
    ) -> None:
        """`options` are the arguments of DataModule, e.g. `batch_size`."""
        super().__init__(**options)
        self.train, self.val, self.test, self.predict = train, val, test, predict

    def train_dataset(self) -> Any:
        return self.train

    def val_dataset(self) -> Any:
        return self.val

    def test_dataset(self) -> Any:
        return self.test

    def predict_dataset(self) -> Any:
        return self.test if self.predict is None else self.predict


class Share(NamedTuple):
    """One replica's part of a global batch of `total` rows. A replica that gets none of them has
    Share(None, 0, total): nothing is read for it, and no step of a task is called."""

    batch: Any
    rows: int
    total: int = 0
    places: Sequence[int] | None = None  # of its rows in the global batch


class OfSets(tuple):
    """The places of a share's rows of several sets, as they are read. A step has them sorted: the
    collate puts the rows of a set together."""


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


def pinned(value: Any) -> Any:
    """A batch in pinned memory, as a DataLoader's pin_memory does, but for tensors that can't be
    there: those on a GPU, and sparse ones."""
    return mapped(_pinned, value)


def _pinned(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        can_be = leaf.device.type == "cpu" and leaf.layout == torch.strided
        return leaf.pin_memory() if can_be else leaf
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


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


def tensors_of(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))
