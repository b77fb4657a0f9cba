"""The Loader: an epoch's global batches, each as the shares of this process's replicas."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dpframe import seeding
from dpframe.data.batches import Batches
from dpframe.data.divided import ByRank
from dpframe.data.generators import Draws
from dpframe.data.module import Batch, OfSets, Share, pinned
from dpframe.data.order import TogetherOrder, order_of
from dpframe.data.reading import Rows, TensorTable, table_of
from dpframe.data.source import Here, Source
from dpframe.data.stream import Division, Place
from dpframe.data.streamed import Streamed, reader_of
from dpframe.data.workers import DataWorkers, WorkerCount

Plan = Iterator[tuple[int, list[tuple[Tensor, int]], list[Sequence[int]], int]]
"""Of each batch its number in the epoch, the row numbers of each local share and how many they are,
their places in the batch, and all its rows."""
COPIED = 1024  # batches at a time


class Loader:
    """Yields an epoch's global batches in order, each as this process's shares.

    A data set that is tensors is read by index_select; any other row by row, here or by workers;
    a stream in its own order, by at most one worker unless it is divided.
    """

    def __init__(
        self,
        source: Source,
        here: Here,
        *,
        seed: int,
        piece: int | None,
        division: Division | ByRank | None,
        look: Callable[[Any], None] | None,
    ) -> None:
        """A collate gets `piece` rows at most. `look` is for ready batches: it is called once, with
        the first one or None, in all processes together. Tensors may move to the GPU here."""
        dataset = source.dataset if division is None else division.part(source.dataset, here.rank)
        self.rows = rows = Rows(dataset, source.collate, piece)
        self.order = order_of(dataset, source, seed, here.agree)
        self.batch_size = source.batch_size
        self.seed = seed
        self.division = division
        self.device = torch.device("cpu")  # where the data is: all of it, if that is a GPU
        self.workers = WorkerCount()
        self._rank = here.rank
        self._shares = here.shares
        self._pins = source.pin_memory and here.pins
        self._processes: DataWorkers | None = None
        # One of three ways to a batch: of tensors at once, of a stream, or neither: row by row.
        self._read: Callable[..., Any] | None = None
        self._stream: Streamed | None = None
        if rows.are_tensors:
            self.how = rows.described()
            table = here.place(table_of(dataset))
            self.device = table.tensors[0].device
            self._read = _reads(table, is_pinned=self._pins and self.device.type == "cpu")
        else:
            self.workers = _workers(rows, source, division)
            self.how = _described(rows, division, self.workers)
            reader = None
            if rows.is_stream:
                reader = reader_of(rows, source, here, is_divided=division is not None)
            if self.workers.processes:
                answer = reader.answer if reader else partial(_answer, rows, False)
                self._processes = _processes(answer, rows, source, self.workers, self._pins)
            if reader is not None:
                self._stream = Streamed(
                    reader, source, here, division, self._processes, seed=seed, look=look
                )
        # Nobody waits for a worker's look, of 0.2 ms.
        rows.looks_always = here.looks_always or self.workers.processes > 0
        # Reading ahead must not draw this process's random numbers.
        self.reads_ahead = rows.are_tensors or self.workers.processes > 0

    @property
    def batches(self) -> int | None:
        """Batches in an epoch, or None for a stream of unknown length."""
        return None if self.order is None else self.order.batches

    def epoch(
        self, epoch: int | None = None, *, skip: int = 0, limit: int | None = None
    ) -> Iterator[Batch]:
        """The batches [skip, limit) of an epoch of training, which the data set is told; None: of
        an evaluation. Only a stream reads the rows that it skips."""
        number = epoch or 0
        if self._read is not None:
            return self._batches(number, skip, limit, self._read)
        worker_seed = seeding.mix(self.seed, number, self._rank)
        if self._stream is not None:
            return self._stream.epoch(number, skip, limit, worker_seed)
        return self._batches(number, skip, limit, self._reading(epoch, skip, limit, worker_seed))

    def _reading(
        self, epoch: int | None, skip: int, limit: int | None, seed: int
    ) -> Callable[..., Any]:
        """Gives the batch of a share: by workers the next one, in the order of requests."""
        if self._processes is not None:
            self._processes.end_if_changed()
        self.rows.begin(epoch)
        if self._processes is None:
            return lambda *share: _answer(self.rows, self._pins, *self._request(epoch, *share))
        answers = self._processes.read(self._requests(epoch, skip, limit), seed)
        return lambda *share: next(answers)

    def _batches(
        self, epoch: int, skip: int, limit: int | None, read: Callable[..., Any]
    ) -> Iterator[Batch]:
        for batch, shares, places, total in self._placed(epoch, skip, limit):
            parts = [
                Share(read(rows, batch, place) if n else None, n, total, place)
                for (rows, n), place in zip(shares, places, strict=True)
            ]
            yield Batch(parts, total)
        if self._processes is not None:
            self._processes.warn_if_changed()

    def _placed(self, epoch: int, skip: int, limit: int | None) -> Plan:
        """An epoch's batches as row numbers, cut into local shares."""
        known, places = -1, list[Sequence[int]]()
        assert self.order is not None
        several = self.order if isinstance(self.order, TogetherOrder) else None
        stop = None if limit is None else max(0, limit - skip)
        batches: Iterator[Tensor] = islice(self.order.epoch(epoch, skip), stop)
        if self.device.type != "cpu":
            batches = copied(batches, self.device)
        for batch, rows in enumerate(batches, skip):
            shares: list[Any] = self._shares(rows)  # type: ignore[arg-type]
            total = rows.numel()
            if several is not None:
                places = [OfSets(each) for each in self._shares(several.places(rows))]
            elif total != known:
                known, places = total, self._shares(range(total))
            yield batch, [(share, share.numel()) for share in shares], places, total

    def _requests(self, epoch: int | None, skip: int, limit: int | None) -> Iterator[tuple]:
        """What the workers are asked for."""
        for batch, shares, places, _ in self._placed(epoch or 0, skip, limit):
            for (rows, n), place in zip(shares, places, strict=True):
                if n:
                    yield self._request(epoch, rows, batch, place)

    def _request(
        self, epoch: int | None, rows: Tensor, batch: int, places: Sequence[int]
    ) -> tuple[int | None, list[int], Draws]:
        """A share's rows, the epoch, and what their draws are seeded by, whatever was read before:
        so a resumed run draws the same."""
        seed = seeding.mix(self.seed, epoch or 0, batch)
        return epoch, rows.tolist(), Draws(seed, places)

    # ---- of a stream; any other order tells by the number of batches

    def place(self, batches: int) -> Place | None:
        """Where this process is after so many batches; None if their number tells."""
        return None if self._stream is None else self._stream.place(batches)

    def seek(self, places: list[Any], ranks: int) -> None:
        """The next epoch goes on where all ranks were."""
        if self._stream is not None:
            self._stream.seek(places, ranks)


def _reads(table: TensorTable, *, is_pinned: bool) -> Callable[..., Any]:
    take = _taken_pinned if is_pinned else torch.index_select
    tensors, known = table.tensors, table.rows
    if known is None:
        return lambda rows, *_: [take(tensor, 0, rows) for tensor in tensors]
    return lambda rows, *_: [take(tensor, 0, known[rows]) for tensor in tensors]


def _workers(rows: Rows, source: Source, division: Division | ByRank | None) -> WorkerCount:
    workers = source.workers
    if not isinstance(workers, WorkerCount):
        workers = WorkerCount(int(workers))
    if division is not None:
        return workers._replace(processes=min(workers.processes, division.workers))
    if rows.is_stream and workers.processes > 1:
        return WorkerCount(1, "each would read the whole stream")
    return workers


def _described(rows: Rows, division: Division | ByRank | None, workers: WorkerCount) -> str:
    """For the banner."""
    if isinstance(rows.dataset, Batches):
        by = f", by each of {division.ranks} ranks its own" if division else ""
        return rows.dataset.described() + by
    how = rows.described() if division is None else division.described()
    return f"{how}, {workers.described()}"


def _processes(
    answer: Callable[..., Any], rows: Rows, source: Source, workers: WorkerCount, pin_memory: bool
) -> DataWorkers:
    starts_afresh = {"persistent_workers": False} if rows.is_stream else {}
    return DataWorkers(
        answer,
        workers.processes,
        rows=rows,
        timeout_seconds=source.timeout_seconds,
        pin_memory=pin_memory,
        **source.options | starts_afresh,
    )


def copied(batches: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Row numbers, in few copies to a device."""
    following = iter(batches)
    while parts := list(islice(following, COPIED)):
        yield from torch.cat(parts).to(device).split([len(part) for part in parts])


def _taken_pinned(tensor: Tensor, dimension: int, rows: Tensor) -> Tensor:
    """Gathered into pinned memory, from which a GPU copies without the host."""
    out = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, dimension, rows, out=out)


def _answer(
    rows: Rows, pin_memory: bool, epoch: int | None, numbers: list[int], draws: Draws
) -> Any:
    """In this process, or in a worker, which was forked in this epoch or before."""
    if epoch != rows.epoch:
        rows.begin(epoch)
    batch = rows.read(numbers, draws)
    return pinned(batch) if pin_memory else batch
