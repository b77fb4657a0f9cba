"""Data: which rows make which global batch, and each replica's exact share of it."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
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

from dpframe import seeding
from dpframe.errors import UserError

Shares = Callable[[Sequence], list[Sequence]]
"""A strategy's `shares`: a global batch's rows in, the shares of this process's replicas out."""


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
    ) -> None:
        self.order = _order(dataset, batch_size, shuffle=shuffle, seed=seed, sampler=sampler)
        self.seed = seed
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
        if isinstance(self._source, _Stream):
            return islice(self._source.batches(self.seed, epoch), skip, limit)
        assert self.order is not None
        plan = _Plan(self.order.epoch(epoch), self._shares, skip, limit)
        return self._source.batches(plan, self.seed, epoch)


class _Plan:
    """An epoch's batches as row numbers, cut into local shares; can be walked more than once."""

    def __init__(
        self, batches: Iterable[Tensor], shares: Shares, skip: int, limit: int | None
    ) -> None:
        self._batches = batches
        self._shares = shares
        self._range = (skip, limit)

    def __iter__(self) -> Iterator[tuple[list[tuple[Tensor, int]], int]]:
        for rows in islice(iter(self._batches), *self._range):
            # A replica with no row is lent the batch's first, with weight zero, so that all
            # replicas take part in every collective.
            shares: list[Any] = self._shares(rows)  # type: ignore[arg-type]
            local = [(share, len(share)) if len(share) else (rows[:1], 0) for share in shares]
            yield local, len(rows)


class _Tensors:
    """Data that is tensors: a batch is one index_select each, no Python per row."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors

    def batches(self, plan: _Plan, seed: int, epoch: int) -> Iterator[Batch]:
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
            dataset,
            batch_sampler=self._sampler,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            generator=self._generator,
        )

    def batches(self, plan: _Plan, seed: int, epoch: int) -> Iterator[Batch]:
        self._sampler.plan = plan
        self._generator.manual_seed(seeding.mix(seed, epoch))  # seeds the workers
        read = iter(self._loader)
        for local, total in plan:
            yield Batch([Share(next(read), n) for _, n in local], total)


class _ShareSampler:
    """The batch sampler behind a DataLoader: one list of row numbers a share."""

    plan: _Plan

    def __iter__(self) -> Iterator[list[int]]:
        for local, _ in self.plan:
            for rows, _ in local:
                yield rows.tolist()


class _Stream:
    """An IterableDataset: each replica reads the stream and keeps its share of each batch."""

    def __init__(self, shares: "_StreamShares", workers: int) -> None:
        self._dataset = shares
        self._generator = torch.Generator()
        self._loader = DataLoader(
            shares, batch_size=None, num_workers=workers, generator=self._generator
        )

    def batches(self, seed: int, epoch: int) -> Iterator[Batch]:
        self._generator.manual_seed(seeding.mix(seed, epoch))
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
            seeding.seed_everything(seeding.mix(*self.seed))
        rows = iter(self.stream)
        index = 0
        while batch := list(islice(rows, self._batch_size)):
            if index % workers == number:
                yield self._local(batch), len(batch)
            index += 1

    def _local(self, batch: list) -> list[tuple[Any, int]]:
        return [
            (self._collate(share or batch[:1]), len(share))
            for share in map(list, self._shares(batch))
        ]


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

    def __init__(self, sampler: Any, batch_size: int, rows: int, seed: int) -> None:
        if isinstance(sampler, DistributedSampler):
            raise UserError(
                "train_sampler returned a DistributedSampler, which pads and splits by itself; "
                "return the plain sampler: the strategy splits each global batch exactly"
            )
        if not hasattr(sampler, "__len__"):
            raise UserError(
                f"train_sampler returned a {type(sampler).__name__} without __len__: an endless "
                "order can't be split exactly; give it a length"
            )
        self._sampler = sampler
        self._batch_size = batch_size
        self._rows = rows
        self._seed = seed

    @property
    def batches(self) -> int:
        by_batch = self._yields_batches()
        return len(self._sampler) if by_batch else -(-len(self._sampler) // self._batch_size)

    def _yields_batches(self) -> bool:
        with seeding.seeded(self._seed):
            first = next(iter(self._sampler), None)
        return isinstance(first, (list, tuple)) or (isinstance(first, Tensor) and first.ndim > 0)

    def epoch(self, epoch: int) -> list[Tensor]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        # Drawn under a seed of its own, so that every replica draws the same order.
        with seeding.seeded(self._seed, epoch):
            drawn = list(self._sampler)
        if drawn and (isinstance(drawn[0], (list, tuple)) or getattr(drawn[0], "ndim", 0) > 0):
            batches = [torch.as_tensor(batch) for batch in drawn]
        else:
            rows = torch.tensor([int(row) for row in drawn], dtype=torch.int64)
            batches = list(_Slices(rows, self._batch_size))
        return [self._checked(batch) for batch in batches if len(batch)]

    def _checked(self, batch: Tensor) -> Tensor:
        if int(batch.min()) < -self._rows or int(batch.max()) >= self._rows:
            raise UserError(
                f"train_sampler drew row {int(batch.max())} of a data set of {self._rows} rows"
            )
        return batch % self._rows


def _order(
    dataset: Dataset, batch_size: int, *, shuffle: bool, seed: int, sampler: Iterable | None
) -> "_Order | _SamplerOrder | None":
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise UserError("an IterableDataset has its own order; return None from train_sampler")
        return None
    rows = len(dataset)  # type: ignore[arg-type]
    if sampler is not None:
        return _SamplerOrder(sampler, batch_size, rows, seed)
    return _Order(rows, batch_size, shuffle=shuffle, seed=seed)


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
