"""Data: which rows make which global batch, and each replica's exact share of it."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from dpframe import interruption, seeding
from dpframe.errors import UserError

Shares = Callable[[Sequence], list[Sequence]]
"""A strategy's `shares`: a global batch's rows in, the shares of this process's replicas out."""
Agree = Callable[[Any], Any]
"""A strategy's `share`: the main process's value, in every process."""


class DataModule:
    """The data of a recipe. `batch_size` is global: what one micro-step sees over all replicas."""

    def __init__(self, batch_size: int = 32, workers: int = 0, shuffle: bool = True) -> None:
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


def permutation(rows: int, *, seed: int, epoch: int) -> Tensor:
    """The order of a shuffled epoch: a fact of (seed, epoch), on every strategy alike."""
    generator = torch.Generator().manual_seed(seeding.mix(seed, epoch))
    return torch.randperm(rows, generator=generator)


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
        workers: int = 0,
        collate: Callable[[list], Any] = default_collate,
        pin_memory: bool = False,
        rank: int = 0,
        agree: Agree = lambda value: value,
    ) -> None:
        """By `rank`, each process's workers draw random numbers of their own."""
        self.order = _order(dataset, batch_size, shuffle, seed, sampler, agree)
        self.seed = seed
        self.rank = rank
        self._shares = shares
        tensors = None if _is_custom(collate) else tensors_of(dataset)
        self._source: _Tensors | _Rows | _Stream
        if self.order is None:
            stream = _StreamShares(dataset, batch_size, shares, collate)  # type: ignore[arg-type]
            self._source = _Stream(stream, workers)
        elif tensors is not None:
            self._source = _Tensors(tensors)
        else:
            self._source = _Rows(dataset, collate, workers, pin_memory)

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
        plan = _Plan(self.order.epoch(epoch), self._shares, skip, limit)
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
            local = [(share, len(share)) if len(share) else (rows[:1], 0) for share in shares]
            yield local, len(rows)


class _Tensors:
    """Data that is tensors: a batch is one index_select each, no Python per row."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors

    def batches(self, plan: _Plan, worker_seed: int) -> Iterator[Batch]:
        tensors = self._tensors
        for local, total in plan:
            yield Batch(
                [Share([t.index_select(0, rows) for t in tensors], n) for rows, n in local], total
            )


class _Rows:
    """Data read row by row, through torch's DataLoader."""

    def __init__(self, dataset: Dataset, collate: Callable, workers: int, pin_memory: bool) -> None:
        self._sampler = _ShareSampler()
        self._generator = torch.Generator()
        self._loader = DataLoader(
            _Seeded(dataset),
            batch_sampler=self._sampler,  # type: ignore[arg-type]
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            generator=self._generator,
            worker_init_fn=_start_worker,
        )

    def batches(self, plan: _Plan, worker_seed: int) -> Iterator[Batch]:
        self._sampler.plan, self._sampler.seed = plan, worker_seed
        self._generator.manual_seed(worker_seed)
        read = iter(self._loader)
        for local, total in plan:
            yield Batch([Share(next(read), n) for _, n in local], total)


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

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, seed_and_rows: tuple[int, list[int]]) -> Any:
        seed, rows = seed_and_rows
        if get_worker_info() is not None:
            seeding.seed_everything(seed)
        read = getattr(self._dataset, "__getitems__", None)
        return read(rows) if read else [self._dataset[row] for row in rows]


class _Stream:
    """An IterableDataset: each replica reads the stream and keeps its share of each batch."""

    def __init__(self, shares: "_StreamShares", workers: int) -> None:
        self._dataset = shares
        self._generator = torch.Generator()
        self._loader = DataLoader(
            shares,
            batch_size=None,
            num_workers=workers,
            generator=self._generator,
            worker_init_fn=_start_worker,
        )

    def batches(self, worker_seed: int, seed: int, epoch: int) -> Iterator[Batch]:
        self._generator.manual_seed(worker_seed)
        self._dataset.seed = (seed, epoch)
        if hasattr(self._dataset.stream, "set_epoch"):
            self._dataset.stream.set_epoch(epoch)
        for shares, total in self._loader:
            yield Batch([Share(*share) for share in shares], total)


class _StreamShares(IterableDataset):
    """Cuts a stream into global batches and yields this process's shares of them.

    Every worker walks the whole stream and collates every n-th batch of it, so the order is the
    same for any number of workers and replicas, and each row goes to exactly one of each.
    """

    def __init__(
        self, stream: IterableDataset, batch_size: int, shares: Shares, collate: Callable
    ) -> None:
        self.stream = stream
        self.seed = (0, 0)
        self._batch_size = batch_size
        self._shares = shares
        self._collate = collate

    def __iter__(self) -> Iterator[tuple[list[tuple[Any, int]], int]]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if worker:
            # A stream that shards itself by worker would shard twice: let it see one reader.
            torch.utils.data._utils.worker._worker_info = None
        drawn = _Randomness(*self.seed)  # the stream's own, so that all its readers read the same
        with drawn:
            rows = iter(self.stream)
        for index in count():
            with drawn:
                batch = list(islice(rows, self._batch_size))
            if not batch:
                return
            if index % workers == number:
                yield self._local(batch), len(batch)

    def _local(self, batch: list) -> list[tuple[Any, int]]:
        return [
            (self._collate(share or batch[:1]), len(share))
            for share in map(list, self._shares(batch))
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


def _start_worker(number: int) -> None:
    interruption.leave_to_parent()


class _Order:
    """The global batches of each epoch, as row numbers."""

    def __init__(self, rows: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle

    @property
    def batches(self) -> int:
        return -(-self._rows // self._batch_size)

    def epoch(self, epoch: int) -> Iterable[Tensor]:
        if self._shuffle:
            rows = permutation(self._rows, seed=self._seed, epoch=epoch)
        else:
            rows = torch.arange(self._rows)
        return _Slices(rows, self._batch_size)


class _Slices:
    def __init__(self, rows: Tensor, size: int) -> None:
        self._rows = rows
        self._size = size

    def __iter__(self) -> Iterator[Tensor]:
        for start in range(0, len(self._rows), self._size):
            yield self._rows[start : start + self._size]


class _SamplerOrder:
    """A user's own sampler (rows) or batch sampler (lists of rows), in its own order."""

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        rows: int,
        seed: int,
        agree: Agree = lambda value: value,
    ) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._rows = rows
        self._seed = seed
        self._agree = agree
        self._kept: tuple[int, list[Tensor]] = (-1, [])
        self._length = _length_of(sampler)

    @cached_property
    def batches(self) -> int:
        return len(self.epoch(0))

    def epoch(self, epoch: int) -> list[Tensor]:
        """Drawn once: a second look must not move a generator that the sampler may have."""
        if self._kept[0] != epoch:
            self._kept = epoch, [self._checked(batch) for batch in self._drawn(epoch)]
        return self._kept[1]

    def _drawn(self, epoch: int) -> list[Tensor]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        # The draws of torch, NumPy and Python are the same in every process, and for what a
        # sampler may draw besides, the main one's count.
        with seeding.seeded(self._seed, epoch):
            drawn = self._agree(list(islice(self._sampler, self._length + 1)))
        if len(drawn) > self._length:
            raise UserError(
                f"train_sampler returned a {type(self._sampler).__name__} that goes on after its "
                f"__len__ of {self._length}: an endless order can't be split; let it end there"
            )
        if drawn and (isinstance(drawn[0], (list, tuple)) or getattr(drawn[0], "ndim", 0) > 0):
            return [torch.as_tensor(batch).long() for batch in drawn if len(batch)]
        rows = torch.tensor([int(row) for row in drawn], dtype=torch.int64)
        return list(_Slices(rows, self._batch_size))

    def _checked(self, batch: Tensor) -> Tensor:
        for row in (int(batch.min()), int(batch.max())):
            if not -self._rows <= row < self._rows:
                raise UserError(f"train_sampler drew row {row} of a data set of {self._rows} rows")
        return batch % self._rows


def _length_of(sampler: Any) -> int:
    if isinstance(sampler, DistributedSampler) or isinstance(
        getattr(sampler, "sampler", None), DistributedSampler
    ):
        raise UserError(
            "train_sampler returned a DistributedSampler, which pads and splits by itself; "
            "return the plain sampler: the strategy splits each global batch exactly"
        )
    try:
        return len(sampler)
    except TypeError:
        raise UserError(
            f"train_sampler returned a {type(sampler).__name__} without __len__: an endless "
            "order can't be split exactly; give it a length"
        ) from None


def _order(
    dataset: Any, batch_size: int, shuffle: bool, seed: int, sampler: Iterable | None, agree: Agree
) -> _Order | _SamplerOrder | None:
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise UserError("an IterableDataset has its own order; return None from train_sampler")
        return None
    if sampler is not None:
        return _SamplerOrder(sampler, batch_size, len(dataset), seed, agree)
    return _Order(len(dataset), batch_size, shuffle=shuffle, seed=seed)


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
