"""The Loader: an epoch's global batches, each as the shares of this process's replicas."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from dpframe import seeding
from dpframe.data.batches import Batches, BatchReader
from dpframe.data.divided import ByRank
from dpframe.data.generators import Draws
from dpframe.data.module import Batch, OfSets, Share, Shares, mapped
from dpframe.data.order import Agree, TogetherOrder, order_of
from dpframe.data.reading import Rows, Table, table_of
from dpframe.data.stream import Division, Place, Reader, check
from dpframe.data.together import Parts
from dpframe.data.workers import Processes, Workers
from dpframe.errors import UserError

Keep = Callable[[Table], Table]
"""Where data that is tensors is kept: they go in, and come out there."""
Tally = Callable[[list[float]], list[float]]
"""A strategy's `Collectives.sum_numbers`: this process's numbers in, their sums over all out."""
Plan = Iterator[tuple[int, list[tuple[Tensor, int]], list[Sequence[int]], int]]
"""Of each batch its number in the epoch, the row numbers of each local share and how many they are,
their places in the batch, and all its rows."""
COPIED = 1024  # batches at a time
KEPT = 4  # places in a stream: a batch is on its way to the GPU while others are used


class Loader:
    """Yields an epoch's global batches in order, each as this process's shares.

    A data set that is tensors is read by index_select; any other row by row, here or by workers;
    a stream in its own order, by at most one worker unless it is divided.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        shares: Shares,
        shuffle: bool = False,
        seed: int = 0,
        sampler: Iterable | Parts | None = None,
        workers: int | Workers = 0,
        collate: Callable[[list], Any] = default_collate,
        piece: int | None = None,
        pin_memory: bool = False,
        rank: int = 0,
        first_share: int | None = None,
        agree: Agree = lambda value: value,
        timeout_seconds: float = 0.0,
        place: Keep = lambda table: table,
        division: Division | ByRank | None = None,
        tally: Tally | None = None,
        look: Callable[[Any], None] | None = None,
        drop_last: bool = False,
        label: str = "train_sampler returned",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """By `rank`, each process's workers begin with random numbers of their own; collates of a
        stream draw by the logical share, of which this process's begin at `first_share`. A collate
        gets `piece` rows at most. `timeout_seconds` is how long to wait for a
        worker, 0: without end. `options` are those of a DataLoader. With a `tally` the processes
        count the rows of each of a stream's batches: together, those of a division; else each has
        to have as many. `look` is called with the first batch of ready ones, or None, in all
        processes."""
        self.rows = rows = Rows(dataset, collate, piece)
        self.order = order_of(
            dataset, batch_size, shuffle, seed, sampler, agree, drop_last=drop_last, label=label
        )
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.device = torch.device("cpu")  # where the data is: all of it, if that is a GPU
        self.how = rows.described()
        self._shares = shares
        self._pins = pin_memory
        if not isinstance(workers, Workers):
            workers = Workers(workers)
        if division is not None:
            self.how = division.described()
            workers = workers._replace(processes=min(workers.processes, division.workers))
        elif rows.is_stream and workers.processes > 1:
            workers = Workers(1, "each would read the whole stream")
        self.workers = Workers() if rows.are_tensors else workers
        self._read: Callable[..., Any] | None = None
        if rows.are_tensors:
            table = place(table_of(dataset))
            tensors, known = table.tensors, table.rows
            self.device = tensors[0].device
            take = _taken_pinned if pin_memory and self.device.type == "cpu" else torch.index_select
            read = lambda rows, *_: [take(t, 0, rows) for t in tensors]  # noqa: E731
            self._read = read if known is None else lambda rows, *_: read(known[rows])
        else:
            self.how += f", {workers.described()}"
        # Where nobody waits for a look, of 0.2 ms, or other bits would follow.
        rows.looks_always = self.workers.processes > 0 or first_share is not None
        # Reading ahead must not draw this process's random numbers.
        self.reads_ahead = rows.are_tensors or workers.processes > 0
        self.division = division
        self._tally = tally
        self._drop_last = drop_last
        self._reader: Reader | None = None
        divided = division is not None
        self._is_apart = divided or isinstance(dataset, Batches)  # each process has its own place
        self._look = look
        if isinstance(dataset, Batches):
            self.how = dataset.described() + (
                f", by each of {division.ranks} ranks its own" if division else ""
            )
            self._reader = BatchReader(rows, shares, is_divided=divided, rank=rank)
        elif rows.is_stream:
            self._reader = Reader(
                rows, batch_size, shares, is_divided=divided, rank=rank, first_share=first_share
            )
        self._places: dict[int, Place] = {}  # in the stream, by the batches before it
        self._sought: Place | None = None
        self._processes: Processes | None = None
        if self.workers.processes:
            starts_afresh = {"persistent_workers": False} if rows.is_stream else {}
            self._processes = Processes(
                self._reader.answer if self._reader else partial(_answer, rows, False),
                self.workers.processes,
                rows=rows,
                timeout_seconds=timeout_seconds,
                pin_memory=pin_memory,
                **dict(options or {}) | starts_afresh,
            )

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
        worker_seed = seeding.mix(self.seed, number, self.rank)
        if self._reader is not None:
            return self._streamed(self._reader, number, skip, limit, worker_seed)
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

    def _places_of(self, places: Sequence[int]) -> list[Sequence[int]]:
        """Of the rows of the local shares, in a batch."""
        try:
            return self._shares(places)
        except TypeError:  # of a strategy that cuts tensors alone
            numbers: Any = torch.tensor(places)
            return [share.tolist() for share in self._shares(numbers)]  # type: ignore[attr-defined]

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
                places = [OfSets(each) for each in self._places_of(several.places(rows))]
            elif total != known:
                known, places = total, self._places_of(range(total))
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

    # ---- streams

    def place(self, batches: int) -> Place | None:
        """Where this process is in its stream after so many batches; None if their number tells.

        Workers have read ahead: of each it is the place after its last batch among these.
        """
        reader = self._reader
        if reader is None or not (reader.has_state or self.division):
            return None
        if not (batches or reader.spans_epochs or self._sought):
            return None
        if self._processes is not None or self._sought is not None:
            return self._sought or self._places.get(batches)
        return {"turn": 0, "workers": [reader.position()]}

    def seek(self, places: list[Any], ranks: int) -> None:
        """The next epoch goes on where all ranks were. A stream that is not divided is at one place
        for all of them, and one that is divided otherwise now is read again."""
        if not places or None in places:
            return
        is_same = len(places) == ranks
        place = places[self.rank if is_same else 0]
        for position in place["workers"]:
            check(position)
        is_same &= 0 <= place["turn"] < len(place["workers"]) == max(1, self.workers.processes)
        if self._reader is not None and (is_same or not self._is_apart):
            self._sought = {"turn": 0, **place} if is_same else {**place, "turn": 0}

    def _streamed(
        self, reader: Reader, epoch: int, skip: int, limit: int | None, seed: int
    ) -> Iterator[Batch]:
        place = self._sought or reader.place(skip, max(1, self.workers.processes))
        self._sought = None
        self._places.clear()
        reader.begin(self.seed, epoch, place["workers"], is_within=skip > 0)
        if self._processes is None:  # a DataLoader would add nothing but time
            answers = reader.batches()
            if self._pins:
                answers = (([(pinned(share), n) for share, n in a], rows) for a, rows in answers)
        else:
            answers = self._answers(self._processes, place, seed)
        for batches in count(skip + 1):
            if limit is not None and batches > limit:
                return
            shares, rows = next(answers, reader.nothing)
            if self._look is not None:
                look, self._look = self._look, None
                look(shares[0][0])
            total = rows if self._tally is None else self._counted(rows, self._tally)
            if not total or (self._drop_last and total < self.batch_size):
                return
            if self._processes is not None:
                self._places.pop(batches - KEPT, None)
                self._places[batches] = {**place, "workers": list(place["workers"])}
            if self.division is not None and self.division.ranks > 1:
                # Its shares are not those of a split: no rank knows the others'.
                yield Batch([Share(batch, n) for batch, n in shares], total)
            else:
                pairs = zip(shares, self._places_of(range(total)), strict=True)
                yield Batch([Share(*share, total, place) for share, place in pairs], total)

    def _counted(self, rows: int, tally: Tally) -> int:
        total, processes = tally([float(rows), 1.0])
        if self.division is None and total != rows * processes:
            raise UserError(
                f"{self.rows.name} gives the same first rows on all ranks, and then more of them "
                "on some: give all rows in each process, or other ones from the first row on"
            )
        return int(total) if self.division else rows

    def _answers(self, processes: Processes, place: Place, seed: int) -> Iterator[Any]:
        """The workers' batches in turn, until all have ended; `place` moves with them."""
        workers, turn = place["workers"], place["turn"]
        requests = chain(repeat((False,), turn), repeat((True,)))
        ended = 0
        for answer in islice(processes.read(requests, seed), turn, None):
            worker = place["turn"]
            place["turn"] = (worker + 1) % len(workers)
            ended = 0 if answer else ended + 1
            if ended == len(workers):
                return
            if answer:
                *batch, workers[worker] = answer
                yield batch


def copied(batches: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Row numbers, in few copies to a device."""
    following = iter(batches)
    while parts := list(islice(following, COPIED)):
        yield from torch.cat(parts).to(device).split([len(part) for part in parts])


def _taken_pinned(tensor: Tensor, dimension: int, rows: Tensor) -> Tensor:
    """Gathered into pinned memory, from which a GPU copies without the host."""
    out = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, dimension, rows, out=out)


def pinned(value: Any) -> Any:
    """A batch in pinned memory, as a DataLoader's pin_memory does, but for tensors that can't be
    there: those on a GPU, and sparse ones."""
    return mapped(_pinned, value)


def _pinned(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        can_be = leaf.device.type == "cpu" and leaf.layout == torch.strided
        return leaf.pin_memory() if can_be else leaf
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


def _answer(
    rows: Rows, pin_memory: bool, epoch: int | None, numbers: list[int], draws: Draws
) -> Any:
    """In this process, or in a worker, which was forked in this epoch or before."""
    if epoch != rows.epoch:
        rows.begin(epoch)
    batch = rows.read(numbers, draws)
    return pinned(batch) if pin_memory else batch
