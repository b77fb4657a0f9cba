"""The Loader: an epoch's global batches, each as the shares of this process's replicas."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from dpframe import seeding
from dpframe.data.module import Batch, Rows, Share, mapped, noted, tensors_of
from dpframe.data.order import Agree, order_of
from dpframe.data.workers import Processes, Workers

Shares = Callable[[Sequence], list[Sequence]]
"""A strategy's `shares`: a global batch's rows in, the shares of this process's replicas out."""
Place = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""Where data that is tensors is kept: they go in, and come out there."""
Plan = Iterator[tuple[list[tuple[Tensor, int]], int]]
"""Of each batch the row numbers of each local share, how many they are, and all its rows."""


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
        drop_last: bool = False,
        told: str = "train_sampler returned",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """By `rank`, each process's workers draw random numbers of their own; `timeout_seconds` is
        how long to wait for a worker, 0: without end. `options` are those of a DataLoader."""
        rows = Rows(dataset, collate)
        self.order = order_of(
            dataset, batch_size, shuffle, seed, sampler, agree, drop_last=drop_last, told=told
        )
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.device = torch.device("cpu")  # where the data is: all of it, if that is a GPU
        self.how = rows.described()
        self._shares = shares
        if not isinstance(workers, Workers):
            workers = Workers(workers, draws_apart=workers > 0)
        if rows.is_stream and workers.processes > 1:
            workers = Workers(1, "each would read the whole stream", draws_apart=True)
        self.workers = Workers() if rows.are_tensors else workers
        if rows.are_tensors:
            tensors = place(tensors_of(dataset))
            self.device = tensors[0].device
            take = _taken_pinned if pin_memory and self.device.type == "cpu" else torch.index_select
            self._read: Callable[[Tensor], Any] = lambda rows: [take(t, 0, rows) for t in tensors]
        else:
            self.how += f", {workers.described()}"
            self._read = partial(_read, rows, pin_memory)
        # Reading ahead must not draw this process's random numbers.
        self.reads_ahead = rows.are_tensors or workers.processes > 0
        self._stream = _Stream(rows, batch_size, shares, drop_last) if rows.is_stream else None
        self._processes: Processes | None = None
        if self.workers.processes:
            starts_afresh = {"persistent_workers": False} if rows.is_stream else {}
            self._processes = Processes(
                self._stream.answer if self._stream else partial(_answer, rows),
                self.workers.processes,
                timeout_seconds=timeout_seconds,
                pin_memory=pin_memory,
                **{"persistent_workers": True} | dict(options or {}) | starts_afresh,
            )

    @property
    def batches(self) -> int | None:
        """Batches in an epoch, or None for a stream of unknown length."""
        return None if self.order is None else self.order.batches

    def epoch(self, epoch: int = 0, *, skip: int = 0, limit: int | None = None) -> Iterator[Batch]:
        """The batches [skip, limit) of an epoch; only a stream reads the rows that it skips."""
        worker_seed = seeding.mix(self.seed, epoch, self.rank)
        if self._stream is not None:
            return islice(self._streamed(self._stream, epoch, worker_seed), skip, limit)
        read = self._read
        if self._processes is not None:
            requests = self._requests(epoch, skip, limit, worker_seed)
            answers = self._processes.read(requests, worker_seed)
            read = lambda rows: next(answers)  # noqa: E731
        return self._batches(self._plan(epoch, skip, limit), read)

    def _batches(self, plan: Plan, read: Callable[[Tensor], Any]) -> Iterator[Batch]:
        for shares, total in plan:
            yield Batch([Share(read(rows) if n else None, n, total) for rows, n in shares], total)

    def _plan(self, epoch: int, skip: int, limit: int | None) -> Plan:
        """An epoch's batches as row numbers, cut into local shares."""
        assert self.order is not None
        batches = iter(self.order.epoch(epoch))
        if self.device.type != "cpu":
            batches = iter(copied(batches, self.device))
        for rows in islice(batches, skip, limit):
            shares: list[Any] = self._shares(rows)  # type: ignore[arg-type]
            yield [(share, share.numel()) for share in shares], rows.numel()

    def _requests(
        self, epoch: int, skip: int, limit: int | None, seed: int
    ) -> Iterator[tuple[int, list[int]]]:
        """What the workers are asked for: a share's rows, and the seed that they draw by.

        It is the share's, whatever a worker read before, so a resumed run draws the same."""
        for batch, (shares, _) in enumerate(self._plan(epoch, skip, limit), skip):
            for share, (rows, n) in enumerate(shares):
                if n:
                    yield seeding.mix(seed, batch, share), rows.tolist()

    def _streamed(self, stream: "_Stream", epoch: int, worker_seed: int) -> Iterator[Batch]:
        stream.begin(self.seed, epoch)
        if self._processes is None:  # a DataLoader would add nothing but time
            answers: Iterator[Any] = stream.batches()
        else:
            answers = iter(partial(next, self._processes.read(repeat(()), worker_seed)), None)
        for shares, total in answers:
            yield Batch([Share(batch, n, total) for batch, n in shares], total)


def copied(batches: Iterable[Tensor], device: torch.device) -> Sequence[Tensor]:
    """An epoch's row numbers, in one copy to a device."""
    parts = list(batches)
    return torch.cat(parts).to(device).split([len(part) for part in parts])


def _taken_pinned(tensor: Tensor, dimension: int, rows: Tensor) -> Tensor:
    """Gathered into pinned memory, from which a GPU copies without the host."""
    out = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, dimension, rows, out=out)


def _read(rows: Rows, pin_memory: bool, numbers: Tensor) -> Any:
    batch = rows.read(numbers.tolist())
    return mapped(_pinned, batch) if pin_memory else batch


def _pinned(value: Any) -> Any:
    return value.pin_memory() if hasattr(value, "pin_memory") else value


def _answer(rows: Rows, seed: int, numbers: list[int]) -> Any:
    """In a worker."""
    seeding.reseed(seed)
    return rows.read(numbers)


class _Stream:
    """Cuts a stream into global batches, of which each process keeps its shares.

    One worker at most: a stream that shards itself by worker then gives all of its rows.
    """

    def __init__(self, rows: Rows, batch_size: int, shares: Shares, drop_last: bool) -> None:
        self._rows = rows
        self._drop_last = drop_last
        self._batch_size = batch_size
        self._shares = shares
        self._seed = (0, 0)
        self._opened: Iterator[Any] | None = None

    def begin(self, seed: int, epoch: int) -> None:
        self._seed = (seed, epoch)
        if hasattr(self._rows.dataset, "set_epoch"):
            self._rows.dataset.set_epoch(epoch)

    def answer(self) -> Any:
        """In a worker, which starts afresh each epoch: the next batch, or None."""
        self._opened = self._opened or self.batches()
        return next(self._opened, None)

    def batches(self) -> Iterator[tuple[list[tuple[Any, int]], int]]:
        # What the stream draws follows from the batch, so that all its readers read the same.
        with seeding.seeded(*self._seed):
            stream = iter(self._rows.dataset)
        for first in count(step=self._batch_size):
            with seeding.seeded(*self._seed, first):
                batch = self._read(stream, first)
            if not batch or (self._drop_last and len(batch) < self._batch_size):
                return
            yield self._local(batch, first), len(batch)

    def _read(self, stream: Iterator, first: int) -> list:
        batch: list = []
        with noted(lambda: f"while reading row {first + len(batch)} of {self._rows.name}"):
            batch.extend(islice(stream, self._batch_size))
        return batch

    def _local(self, batch: list, first: int) -> list[tuple[Any, int]]:
        numbers = self._shares(range(first, first + len(batch)))
        return [
            (self._rows.combine(share, rows) if share else None, len(share))
            for share, rows in zip(map(list, self._shares(batch)), numbers, strict=True)
        ]
