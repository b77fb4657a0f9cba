"""Data: which rows make which global batch, and each replica's exact share of it."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data._utils.pin_memory import pin_memory

from dpframe import seeding
from dpframe.errors import UserError
from dpframe.order import Agree, order_of
from dpframe.order import permutation as permutation
from dpframe.reading import Refused, Together, described, name_of, read, refused
from dpframe.workers import Chosen, Workers, chosen

Shares = Callable[[Sequence], list[Sequence]]
"""A strategy's `shares`: a global batch's rows in, the shares of this process's replicas out."""
Place = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""Where data that is tensors is kept: they go in, and come out there."""
Choose = Callable[[Any, Together], Chosen]
"""Says how many workers are to read a data set's rows and put them together."""


class DataModule:
    """The data of a recipe. `batch_size` is global: what one micro-step sees over all replicas.

    `workers` is how many processes read, each rank's own; "auto": as many as reading is worth.
    """

    def __init__(self, batch_size: int = 32, workers: int | str = 0, shuffle: bool = True) -> None:
        self.batch_size = batch_size
        self.workers = workers
        self.shuffle = shuffle

    def setup(self) -> None:
        """Reads what the data sets need; once in every process, before any of them is asked for."""

    def train_dataset(self) -> Dataset | None:
        return None

    def val_dataset(self) -> Dataset | None:
        return None

    def test_dataset(self) -> Dataset | None:
        return None

    def predict_dataset(self) -> Dataset | None:
        return self.test_dataset()

    def train_sampler(self, dataset: Dataset) -> Iterable | None:
        """Your own Sampler or batch sampler: its order is kept and split over the replicas."""
        return None

    def collate(self, rows: list) -> Any:
        return default_collate(rows)


class Share(NamedTuple):
    """One replica's part of a global batch; `rows` is 0 for a replica that was lent a row."""

    batch: Any
    rows: int


class Batch(NamedTuple):
    """A global batch: the shares of this process's replicas, and the rows over all replicas."""

    shares: list[Share]
    rows: int


def split(rows: Sequence, replicas: int) -> list[Sequence]:
    """Contiguous shares as torch.chunk makes them (30 on 4: 8 8 8 6); the last may be empty."""
    size = -(-len(rows) // replicas)
    return [rows[start * size : (start + 1) * size] for start in range(replicas)]


class Loader:
    """Yields an epoch's global batches in order, each as this process's shares."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        shares: Shares,
        shuffle: bool = False,
        seed: int = 0,
        sampler: Iterable | None = None,
        workers: int | Choose = 0,
        collate: Callable[[list], Any] = default_collate,
        pin_memory: bool = False,
        rank: int = 0,
        agree: Agree = lambda value: value,
        timeout_seconds: float = 0.0,
        place: Place = lambda tensors: tensors,
    ) -> None:
        """By `rank`, each process's workers draw random numbers of their own; `timeout_seconds` is
        how long to wait for one of them, 0: for ever."""
        self.device = torch.device("cpu")  # where the data is: all of it, if that is a GPU
        self.order = order_of(dataset, batch_size, shuffle, seed, sampler, agree)
        self.seed = seed
        self.rank = rank
        self._shares = shares
        together = Together(collate, is_custom=_is_custom(collate), dataset=dataset)
        tensors = None if together.is_custom else tensors_of(dataset)
        has_rows = tensors is None and self.order is not None
        if callable(workers) and not has_rows:
            workers = 0  # there is nothing to gain by any
        given = workers(dataset, together) if callable(workers) else workers
        self.readers = chosen(given, is_tensors=tensors is not None)
        several = Workers(self.readers.processes, timeout_seconds)
        self._source: _Tensors | _Rows | _ByWorkers | _Stream
        if self.order is None:
            self._source = _Stream(_StreamShares(dataset, batch_size, shares, together), several)
        elif tensors is not None:
            self._source = _Tensors(place(tensors), pin_memory)
            self.device = self._source.device
        elif several.count == 0:
            self._source = _Rows(dataset, together, pin_memory)
        else:
            self._source = _ByWorkers(dataset, together, several, pin_memory)
        # Reading early draws none of this process's random numbers, so nobody can tell.
        self.can_read_ahead = isinstance(self._source, _Tensors) or several.count > 0
        self.how = described(dataset, self.readers, is_tensors=isinstance(self._source, _Tensors))

    @property
    def batches(self) -> int | None:
        """Batches in an epoch, or None for a stream of unknown length."""
        return None if self.order is None else self.order.batches

    def epoch(self, epoch: int = 0, *, skip: int = 0, limit: int | None = None) -> Iterator[Batch]:
        """The batches [skip, limit) of an epoch; skipped rows are not read, but for a stream's."""
        worker_seed = seeding.mix(self.seed, epoch, self.rank)
        if isinstance(self._source, _Stream):
            return islice(self._source.batches(worker_seed, self.seed, epoch), skip, limit)
        assert self.order is not None
        batches = self.order.epoch(epoch)
        if self.device.type != "cpu":
            batches = _copied(batches, self.device)
        plan = _Plan(batches, self._shares, skip, limit)
        return self._source.batches(plan, worker_seed)


class _Plan:
    """An epoch's batches as row numbers, cut into local shares; can be walked more than once."""

    def __init__(
        self, batches: Iterable[Tensor], shares: Shares, skip: int, limit: int | None
    ) -> None:
        self._batches = batches
        self._shares = shares
        self.skip = skip
        self._limit = limit

    def __iter__(self) -> Iterator[tuple[list[tuple[Tensor, int]], int]]:
        for rows in islice(iter(self._batches), self.skip, self._limit):
            # A replica with no row is lent the batch's first, with weight zero, so that all
            # replicas take part in every collective.
            shares: list[Any] = self._shares(rows)  # type: ignore[arg-type]
            local = [(share, n) if (n := share.numel()) else (rows[:1], 0) for share in shares]
            yield local, rows.numel()


def _copied(batches: Iterable[Tensor], device: torch.device) -> Sequence[Tensor]:
    """An epoch's row numbers, at one copy."""
    parts = list(batches)
    return torch.cat(parts).to(device).split([len(part) for part in parts])


class _Tensors:
    """Data that is tensors: a batch is one index_select each, no Python per row."""

    def __init__(self, tensors: tuple[Tensor, ...], pin_memory: bool = False) -> None:
        self._tensors = tensors
        self.device = tensors[0].device
        self._pins = pin_memory and self.device.type == "cpu"

    def batches(self, plan: _Plan, worker_seed: int) -> Iterator[Batch]:
        tensors = self._tensors
        take = _pinned if self._pins else torch.index_select
        for local, total in plan:
            yield Batch([Share([take(t, 0, rows) for t in tensors], n) for rows, n in local], total)


def _pinned(tensor: Tensor, dimension: int, rows: Tensor) -> Tensor:
    """Gathered right into memory that a GPU copies from by itself."""
    out = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, dimension, rows, out=out)


class _Rows:
    """Data read row by row, in this process."""

    def __init__(self, dataset: Dataset, together: Together, pin_memory: bool) -> None:
        self._dataset = dataset
        self._together = together
        self._pin_memory = pin_memory

    def batches(self, plan: _Plan, worker_seed: int) -> Iterator[Batch]:
        for local, total in plan:
            yield Batch([Share(self._read(rows.tolist()), n) for rows, n in local], total)

    def _read(self, rows: list[int]) -> Any:
        batch = self._together(read(self._dataset, rows), rows)
        return pin_memory(batch) if self._pin_memory else batch


class _ByWorkers:
    """Data read row by row, in the processes of torch's DataLoader."""

    def __init__(
        self, dataset: Dataset, together: Together, workers: Workers, pin_memory: bool
    ) -> None:
        self._sampler = _ShareSampler()
        self._generator = torch.Generator()
        self._workers = workers
        self._loader = DataLoader(
            _Seeded(dataset, together),
            batch_sampler=self._sampler,  # type: ignore[arg-type]
            collate_fn=_as_it_is,
            num_workers=workers.count,
            persistent_workers=True,
            pin_memory=pin_memory,
            generator=self._generator,
            worker_init_fn=workers.start,
        )

    def batches(self, plan: _Plan, worker_seed: int) -> Iterator[Batch]:
        self._sampler.plan, self._sampler.seed = plan, worker_seed
        self._generator.manual_seed(worker_seed)
        read = iter(self._loader)
        with self._workers.watched(read) as batches:
            for local, total in plan:
                shares = [Share(next(batches), n) for _, n in local]
                for batch, _ in shares:
                    if type(batch) is Refused:
                        raise batch.kind(batch.line)
                yield Batch(shares, total)


class _ShareSampler:
    """The batch sampler behind a DataLoader: a seed and one list of row numbers a share."""

    plan: _Plan
    seed: int

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for batch, (local, _) in enumerate(self.plan, self.plan.skip):
            for share, (rows, _) in enumerate(local):
                yield seeding.mix(self.seed, batch, share), rows.tolist()


class _Seeded(Dataset):
    """A worker draws by the share, whatever it read before: so a resumed run draws the same."""

    def __init__(self, dataset: Any, together: Together) -> None:
        self._dataset = dataset
        self._together = together

    def __getitems__(self, seed_and_rows: tuple[int, list[int]]) -> Any:
        seed, rows = seed_and_rows
        seeding.reseed(seed)
        try:
            return self._together(read(self._dataset, rows), rows)
        except (UserError, SystemExit) as error:
            return refused(error)


def _as_it_is(batch: Any) -> Any:
    return batch


class _Stream:
    """An IterableDataset: each replica reads the stream and keeps its share of each batch."""

    def __init__(self, shares: "_StreamShares", workers: Workers) -> None:
        self._dataset = shares
        self._generator = torch.Generator()
        self._workers = workers
        self._loader = DataLoader(
            shares,
            batch_size=None,
            num_workers=workers.count,
            generator=self._generator,
            worker_init_fn=workers.start,
        )

    def batches(self, worker_seed: int, seed: int, epoch: int) -> Iterator[Batch]:
        self._generator.manual_seed(worker_seed)
        self._dataset.seed = (seed, epoch)
        if hasattr(self._dataset.stream, "set_epoch"):
            self._dataset.stream.set_epoch(epoch)
        # Without workers a DataLoader would do no more than this, and take longer over it.
        read = iter(self._loader) if self._workers.count else map(default_convert, self._dataset)
        with self._workers.watched(read) as batches:
            for given in batches:
                if type(given) is Refused:
                    raise given.kind(given.line)
                shares, total = given
                yield Batch([Share(*share) for share in shares], total)


class _StreamShares(IterableDataset):
    """Cuts a stream into global batches and yields this process's shares of them.

    Every worker walks the whole stream and collates every n-th batch of it, so the order is the
    same for any number of workers and replicas, and each row goes to exactly one of each.
    """

    def __init__(self, stream: Any, batch_size: int, shares: Shares, together: Together) -> None:
        self.stream = stream
        self.seed = (0, 0)
        self._batch_size = batch_size
        self._shares = shares
        self._together = together

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            yield from self._walk(0, 1)
            return
        # A stream that shards itself by worker would shard twice: let it see one reader.
        torch.utils.data._utils.worker._worker_info = None
        try:
            yield from self._walk(worker.id, worker.num_workers)
        except (UserError, SystemExit) as error:
            yield refused(error)

    def _walk(self, number: int, workers: int) -> Iterator[tuple[list[tuple[Any, int]], int]]:
        drawn = _Randomness(*self.seed)  # the stream's own, so that all its readers read the same
        with drawn:
            rows = iter(self.stream)
        for index in count():
            with drawn:
                batch = self._read(rows, index * self._batch_size)
            if not batch:
                return
            if index % workers == number:
                yield self._local(batch, index * self._batch_size), len(batch)

    def _read(self, rows: Iterator, first: int) -> list:
        batch: list = []
        try:
            batch.extend(islice(rows, self._batch_size))
        except Exception as error:
            error.add_note(f"while reading row {first + len(batch)} of {name_of(self.stream)}")
            raise
        return batch

    def _local(self, batch: list, first: int) -> list[tuple[Any, int]]:
        numbers = self._shares(range(first, first + len(batch)))
        return [
            (self._together(share or batch[:1], rows or [first]), len(share))
            for share, rows in zip(map(list, self._shares(batch)), numbers, strict=True)
        ]


class _Randomness:
    """Random numbers apart from everybody else's: each block goes on where the last one ended."""

    def __init__(self, *seed: int) -> None:
        with seeding.seeded(*seed):
            self._inside = seeding.random_state()

    def __enter__(self) -> None:
        self._outside = seeding.random_state()
        seeding.restore_random_state(self._inside)

    def __exit__(self, *error: object) -> None:
        self._inside = seeding.random_state()
        seeding.restore_random_state(self._outside)


def tensors_of(dataset: Dataset) -> tuple[Tensor, ...] | None:
    """The tensors behind a data set that is nothing but tensors, else None."""
    if type(dataset) is Subset:
        tensors = tensors_of(dataset.dataset)
        rows = torch.as_tensor(dataset.indices)
        return None if tensors is None else tuple(t.index_select(0, rows) for t in tensors)
    if not isinstance(dataset, TensorDataset):
        return None
    kind = type(dataset)
    is_plain = kind.__getitem__ is TensorDataset.__getitem__ and not hasattr(kind, "__getitems__")
    return dataset.tensors if is_plain else None


def _is_custom(collate: Callable) -> bool:
    return inspect.unwrap(getattr(collate, "__func__", collate)) not in (
        default_collate,
        DataModule.collate,
    )


def move(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The same nest of lists, tuples and dicts with its tensors on `device`; floats as `dtype`."""
    if isinstance(value, Tensor):
        wanted = dtype if value.is_floating_point() else None
        return value.to(device, wanted, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(part, device, dtype) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(move(part, device, dtype) for part in value)
    if isinstance(value, dict):
        return {key: move(part, device, dtype) for key, part in value.items()}
    if hasattr(value, "to"):
        return value.to(device)
    return value
