"""The Loader: an epoch's global batches, each as the shares of this process's replicas."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from dpframe import seeding
from dpframe.data.module import Batch, Share, mapped
from dpframe.data.order import Agree, order_of
from dpframe.data.rows import Rows, noted, tensors_of
from dpframe.data.workers import Processes, Status, Workers

Shares = Callable[[Sequence], list[Sequence]]
"""A strategy's `shares`: a global batch's rows in, the shares of this process's replicas out."""
Place = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""Where data that is tensors is kept: they go in, and come out there."""


class Loader:
    """Yields an epoch's global batches in order, each as this process's shares.

    A data set that is tensors is read by index_select; any other row by row, here or by workers;
    a stream in its own order, by at most one worker.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        shares: Shares,
        shuffle: bool = False,
        seed: int = 0,
        sampler: Iterable | None = None,
        workers: int | Workers = 0,
        collate: Callable[[list], Any] = default_collate,
        pin_memory: bool = False,
        rank: int = 0,
        agree: Agree = lambda value: value,
        timeout_seconds: float = 0.0,
        place: Place = lambda tensors: tensors,
    ) -> None:
        """By `rank`, each process's workers draw random numbers of their own; `timeout_seconds` is
        how long to wait for a worker, 0: without end."""
        rows = Rows(dataset, collate)
        self.order = order_of(dataset, batch_size, shuffle, seed, sampler, agree)
        self.seed = seed
        self.rank = rank
        self.device = torch.device("cpu")  # where the data is: all of it, if that is a GPU
        self.how = rows.described()
        if not isinstance(workers, Workers):
            workers = Workers(workers, draws_apart=workers > 0)
        self.workers = workers
        self._shares = shares
        self._source: _Tensors | _InProcess | _ByWorkers | _Stream
        if rows.are_tensors:
            self.workers = Workers()
            self._source = _Tensors(place(tensors_of(dataset)), pin_memory)
            self.device = self._source.device
            self.reads_ahead = True
            return
        if rows.is_stream and self.workers.processes > 1:
            self.workers = Workers(1, "each would read the whole stream", draws_apart=True)
        self.how += f", {self.workers.described()}"
        # Reading ahead must not draw this process's random numbers.
        self.reads_ahead = self.workers.processes > 0
        if rows.is_stream:
            stream = _StreamShares(rows, batch_size, shares, self.workers.processes)
            self._source = _Stream(stream, timeout_seconds)
        elif self.workers.processes == 0:
            self._source = _InProcess(rows, pin_memory)
        else:
            self._source = _ByWorkers(rows, self.workers.processes, timeout_seconds, pin_memory)

    @property
    def batches(self) -> int | None:
        """Batches in an epoch, or None for a stream of unknown length."""
        return None if self.order is None else self.order.batches

    def epoch(self, epoch: int = 0, *, skip: int = 0, limit: int | None = None) -> Iterator[Batch]:
        """The batches [skip, limit) of an epoch; only a stream reads the rows that it skips."""
        worker_seed = seeding.mix(self.seed, epoch, self.rank)
        if isinstance(self._source, _Stream):
            return islice(self._source.batches(worker_seed, self.seed, epoch), skip, limit)
        assert self.order is not None
        batches = self.order.epoch(epoch)
        if self.device.type != "cpu":
            batches = copied(batches, self.device)
        return self._source.batches(_Plan(batches, self._shares, skip, limit), worker_seed)


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


def copied(batches: Iterable[Tensor], device: torch.device) -> Sequence[Tensor]:
    """An epoch's row numbers, in one copy to a device."""
    parts = list(batches)
    return torch.cat(parts).to(device).split([len(part) for part in parts])


class _Tensors:
    """Data that is tensors: a batch is one index_select each, no Python per row."""

    def __init__(self, tensors: tuple[Tensor, ...], pin_memory: bool) -> None:
        self._tensors = tensors
        self.device = tensors[0].device
        self._pins = pin_memory and self.device.type == "cpu"

    def batches(self, plan: _Plan, worker_seed: int) -> Iterator[Batch]:
        tensors = self._tensors
        take = _taken_pinned if self._pins else torch.index_select
        for local, total in plan:
            yield Batch([Share([take(t, 0, rows) for t in tensors], n) for rows, n in local], total)


def _taken_pinned(tensor: Tensor, dimension: int, rows: Tensor) -> Tensor:
    """Gathered into pinned memory, from which a GPU copies without the host."""
    out = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, dimension, rows, out=out)


class _InProcess:
    """Data read row by row, in this process."""

    def __init__(self, rows: Rows, pin_memory: bool) -> None:
        self._rows = rows
        self._pins = pin_memory

    def batches(self, plan: _Plan, worker_seed: int) -> Iterator[Batch]:
        for local, total in plan:
            yield Batch([Share(self._read(rows.tolist()), n) for rows, n in local], total)

    def _read(self, rows: list[int]) -> Any:
        batch = self._rows.read(rows)
        return mapped(_pinned, batch) if self._pins else batch


def _pinned(value: Any) -> Any:
    return value.pin_memory() if hasattr(value, "pin_memory") else value


class _ByWorkers:
    """Data read row by row, in the processes of torch's DataLoader."""

    def __init__(self, rows: Rows, workers: int, timeout_seconds: float, pin_memory: bool) -> None:
        status = Status(workers)
        self._requests = _Requests()
        self._processes = Processes(
            _Answers(rows, status),
            status,
            sampler=self._requests,
            timeout_seconds=timeout_seconds,
            pin_memory=pin_memory,
        )

    def batches(self, plan: _Plan, worker_seed: int) -> Iterator[Batch]:
        self._requests.plan, self._requests.seed = plan, worker_seed
        shares = self._processes.read(worker_seed)
        for local, total in plan:
            yield Batch([Share(next(shares), n) for _, n in local], total)


class _Requests:
    """What the workers are asked for: a share's number in the epoch, its seed and its rows.

    A worker draws by the share, whatever it read before, so a resumed run draws the same."""

    plan: _Plan
    seed: int

    def __iter__(self) -> Iterator[tuple[int, int, list[int]]]:
        numbers = count()
        for batch, (local, _) in enumerate(self.plan, self.plan.skip):
            for share, (rows, _) in enumerate(local):
                yield next(numbers), seeding.mix(self.seed, batch, share), rows.tolist()


class _Answers(Dataset):
    def __init__(self, rows: Rows, status: Status) -> None:
        self._rows = rows
        self._status = status

    def __getitem__(self, request: tuple[int, int, list[int]]) -> Any:
        number, seed, rows = request
        seeding.reseed(seed)
        return self._status.answer(number, self._rows.read, rows)


class _Stream:
    """An IterableDataset: each process reads the stream and keeps its shares of each batch."""

    def __init__(self, shares: "_StreamShares", timeout_seconds: float) -> None:
        self._shares = shares
        self._processes = (
            Processes(shares, shares.status, timeout_seconds=timeout_seconds)
            if shares.status is not None
            else None
        )

    def batches(self, worker_seed: int, seed: int, epoch: int) -> Iterator[Batch]:
        self._shares.seed = (seed, epoch)
        stream: Any = self._shares.rows.dataset
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        # Without a worker, a DataLoader would add nothing but time.
        read = iter(self._shares) if self._processes is None else self._processes.read(worker_seed)
        for shares, total in read:
            yield Batch([Share(*share) for share in shares], total)


class _StreamShares(IterableDataset):
    """Cuts a stream into global batches and yields this process's shares of them.

    One worker at most: a stream that shards itself by worker then gives all of its rows.
    """

    def __init__(self, rows: Rows, batch_size: int, shares: Shares, workers: int) -> None:
        self.rows = rows
        self.status = Status(workers) if workers else None
        self.seed = (0, 0)
        self._batch_size = batch_size
        self._shares = shares

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches()
        if self.status is None:
            yield from batches
            return
        for number in count():
            batch = self.status.answer(number, next, batches, None)
            if batch is None:
                return
            yield batch

    def _batches(self) -> Iterator[tuple[list[tuple[Any, int]], int]]:
        drawn = _Randomness(*self.seed)  # the stream's own, so that all its readers read the same
        with drawn:
            stream = iter(self.rows.dataset)
        for first in count(step=self._batch_size):
            with drawn:
                batch = self._read(stream, first)
            if not batch:
                return
            yield self._local(batch, first), len(batch)

    def _read(self, stream: Iterator, first: int) -> list:
        batch: list = []
        with noted(lambda: f"while reading row {first + len(batch)} of {self.rows.name}"):
            batch.extend(islice(stream, self._batch_size))
        return batch

    def _local(self, batch: list, first: int) -> list[tuple[Any, int]]:
        numbers = self._shares(range(first, first + len(batch)))
        return [
            (self.rows.combine(share or batch[:1], rows or [first]), len(share))
            for share, rows in zip(map(list, self._shares(batch)), numbers, strict=True)
        ]


class _Randomness:
    """Random numbers of its own: each block goes on where the one before ended."""

    def __init__(self, *seed: int) -> None:
        with seeding.seeded(*seed):
            self._inside = seeding.random_state()

    def __enter__(self) -> None:
        self._outside = seeding.random_state()
        seeding.restore_random_state(self._inside)

    def __exit__(self, *error: object) -> None:
        self._inside = seeding.random_state()
        seeding.restore_random_state(self._outside)
