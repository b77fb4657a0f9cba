"""A source: a data set and how it is read, by its DataModule or by a ready DataLoader."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from dpframe.data.batches import Batches
from dpframe.data.module import DataModule, Shares
from dpframe.data.reading import TensorTable
from dpframe.data.settings import BY_RANK, DataSettings
from dpframe.data.workers import WorkerCount
from dpframe.errors import UserError

# Methods of a DataLoader by which it does not read.
NOT_READ_BY = {"__init__", "__len__", "__setattr__", "check_worker_number_rationality"}


@dataclass(frozen=True)
class Here:
    """The process that reads, and what it does together with the others of its job."""

    shares: Shares
    rank: int  # by which its workers draw random numbers of their own
    looks_always: bool  # at whether rows draw, not now and then
    agree: Callable[[Any], Any]  # all get the main process's value
    # All get the sums of their numbers, to count the rows of each of a stream's batches.
    tally: Callable[[list[float]], list[float]]
    # Where data that is tensors is kept: they go in, and come out there.
    place: Callable[[TensorTable], TensorTable]
    pins: bool  # batches, for a GPU


@dataclass(frozen=True)
class Source:
    """A data set, and how it is read and divided."""

    dataset: Any
    batch_size: int  # global: rows over all replicas; 0: unknown, of ready batches
    shuffle: bool
    sampler: Any  # an Iterable, or of several sets their Parts
    workers: int | str | WorkerCount
    collate: Callable[[list], Any]
    drop_last: bool = False
    label: str = "train_sampler returned"  # begins the errors about the sampler
    timeout_seconds: float = 0.0  # 0: trainer.data_timeout_seconds
    options: dict[str, Any] = field(default_factory=dict)  # of the DataLoader that has the workers
    is_divided: bool = False  # if it is a stream
    is_by_rank: bool = False  # whether each process may have rows of its own
    pin_memory: bool = True  # where there is a GPU
    may_differ: bool = False  # between processes, though what was looked at is alike
    is_loader: bool = False  # of which batches and order are
    method: str = ""  # that returned it

    @classmethod
    def of(
        cls, given: Any, data: DataModule, method: str, *, kind: str, name: str = ""
    ) -> "Source":
        """Of what the DataModule's `method` returned, in training under a name where there are
        several; only `train` shuffles. A stream to `predict` is not divided, since its rows have an
        order."""
        trains = kind == "train"
        if isinstance(given, DataLoader):
            DataSettings.of(data, "divided", "divide_streams", "drop_last")
            return _of_loader(given, data, method, kind=kind)
        if isinstance(given, Batches):
            return _of_batches(given, data, method, kind=kind)
        if isinstance(given, dict):  # e.g. a DatasetDict of Hugging Face
            names = ", ".join(map(str, given))
            raise UserError(f"{method} returned a {type(given).__name__} of {names}; return one")
        if isinstance(given, list | tuple) and given and isinstance(given[0], Dataset | DataLoader):
            what = f"a {type(given).__name__} of {len(given)} data sets"
            use = "one, e.g. a ConcatDataset" if trains else "a dict of them by their names"
            raise UserError(f"{method} returned {what}; return {use}")
        _refuse_batches(given, method)
        DataSettings.of(data)
        sampler = data.train_sampler(given) if trains else None
        shuffle = trains and data.shuffle
        size = data.batch_size if trains else data.eval_batch_size or data.batch_size
        if isinstance(size, Mapping):
            size = _rows_of(size, name, method) if trains else evaluated_rows(data)
        return cls(
            given,
            size,
            shuffle,
            sampler,
            data.workers,
            data.collate,
            trains and data.drop_last,
            options={
                "persistent_workers": data.persistent_workers,
                "worker_init_fn": data.worker_init,
            },
            is_divided=data.divide_streams and kind != "predict",
            is_by_rank=data.divided == BY_RANK and kind != "predict",
            pin_memory=data.pin_memory,
            method=method,
        )


def evaluated_rows(data: DataModule) -> int:
    """Of a batch of validation, test or prediction: as many as a step has, if nothing is said."""
    size = data.eval_batch_size or data.batch_size
    return sum(size.values()) if isinstance(size, Mapping) else size


def _rows_of(sizes: Mapping[str, int], name: str, method: str) -> int:
    """Of a training set in each batch."""
    if name not in sizes:
        use = f"add one for {name}" if name else "use one number"
        raise UserError(
            f"data.batch_size has numbers for {', '.join(map(str, sizes))}, and none for {method}; "
            f"{use}"
        )
    return int(sizes[name])


def _of_batches(given: Batches, data: DataModule, method: str, *, kind: str) -> Source:
    DataSettings.of(data, "pin_memory")
    if kind == "train" and data.train_sampler(given) is not None:
        raise UserError(f"{method} returned Batches, and train_sampler an order; leave it out")
    return Source(
        given,
        batch_size=0,
        shuffle=False,
        sampler=None,
        workers=0,
        collate=data.collate,
        is_by_rank=True,
        pin_memory=data.pin_memory,
        method=method,
    )


def _of_loader(given: DataLoader, data: DataModule, method: str, *, kind: str) -> Source:
    """Its batch is the global one. Its order is kept, but for a plain shuffle: that is ours, by the
    seed and the epoch, and evaluations read in the order of the data set instead."""
    label = f"{method} returned a DataLoader with"
    trains = kind == "train"
    _check(given, label)
    if trains and data.train_sampler(given.dataset) is not None:
        raise UserError(f"{label} an order of its own, and train_sampler another; keep one of them")
    is_plain = _is_shuffle(given.sampler) or type(given.sampler) is SequentialSampler
    is_plain = (is_plain and given.batch_size is not None) or isinstance(
        given.dataset, IterableDataset
    )
    batch_size: Any = given.batch_size
    if batch_size is None:
        batch_size = getattr(given.batch_sampler, "batch_size", evaluated_rows(data))
    collate = given.collate_fn
    is_dropped = (trains and data.drop_last) or given.drop_last
    if not is_plain and given.drop_last:
        is_dropped = False  # by its batch sampler
    return Source(
        given.dataset,
        batch_size,
        trains and _is_shuffle(given.sampler),
        None if is_plain else given.batch_sampler,
        given.num_workers,
        data.collate if collate is default_collate else collate,
        is_dropped,
        label,
        given.timeout,
        {
            "worker_init_fn": given.worker_init_fn or data.worker_init,
            "prefetch_factor": given.prefetch_factor,
            "persistent_workers": given.persistent_workers,
        },
        data.divide_streams and kind != "predict",
        data.divided == BY_RANK and kind != "predict",
        data.pin_memory,
        is_loader=True,
        method=method,
    )


def _check(given: DataLoader, label: str) -> None:
    """Refuses what can't be kept."""
    kind = type(given)
    if given.batch_sampler is None and given.batch_size is None:
        what = (
            "batch_size=None, so what it gives has no known number of rows; return "
            "dpframe.Batches(loader) if these are ready batches, else give it the global batch_size"
        )
    elif given.multiprocessing_context is not None:
        what = "a multiprocessing_context, which dpframe chooses itself; leave it out"
    elif (name := _own_way(kind)) and not getattr(given, "filter_per_worker", False):
        what = f"a method {name} of its own, {kind.__name__}'s; "
        if hasattr(given, "filter_per_worker"):  # of PyG
            what += "set filter_per_worker=True, which does that in its collate_fn, or "
        what += "return dpframe.Batches(loader), of which each rank iterates its own"
    else:
        return
    raise UserError(f"{label} {what}")


def _own_way(kind: type[DataLoader]) -> str:
    """The method of DataLoader's that the class has written itself, and by which it reads."""
    ways = (name for name, each in vars(DataLoader).items() if callable(each))
    own = (n for n in ways if getattr(kind, n) is not getattr(DataLoader, n))
    return next((name for name in own if name not in NOT_READ_BY), "")


def _refuse_batches(given: Any, method: str) -> None:
    """Loaders that are no DataLoader, by what they can do: their packages are not imported."""
    kind = type(given)
    can_be_read = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    if any(each.__name__ == "WebLoader" for each in kind.__mro__):
        what = (
            "whose batches are ready; return dpframe.Batches(loader), or the WebDataset that it "
            "reads, without batched()"
        )
    elif given is None or can_be_read or isinstance(given, IterableDataset):
        return
    elif hasattr(kind, "__getitem__"):
        raise UserError(
            f"{method} returned a {kind.__name__} without __len__; give it one, or make it an "
            "IterableDataset"
        )
    else:
        what = (
            "which can only be iterated over; return dpframe.Batches(loader) if it gives ready "
            "batches, else make it an IterableDataset of single rows"
        )
    raise UserError(f"{method} returned a {kind.__name__}, {what}")


def _is_shuffle(sampler: Any) -> bool:
    """Whether any permutation of all rows would do as well."""
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.generator is not None:
        return False
    return sampler.num_samples == len(sampler.data_source)  # type: ignore[arg-type]
