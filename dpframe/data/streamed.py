"""A stream as an epoch's batches: read in this process or by workers, from where a run has been."""

from collections.abc import Callable, Iterator
from itertools import chain, count, islice, repeat
from typing import Any

from dpframe.data.batches import Batches, BatchReader
from dpframe.data.divided import ByRank
from dpframe.data.module import Batch, Share, pinned
from dpframe.data.reading import Rows
from dpframe.data.source import Here, Source
from dpframe.data.stream import Division, Place, Reader, check
from dpframe.data.workers import DataWorkers
from dpframe.errors import UserError

KEPT = 4  # places in a stream: a batch is on its way to the GPU while others are used


def reader_of(rows: Rows, source: Source, here: Here, *, is_divided: bool) -> Reader:
    """What reads the stream, in this process or in each worker."""
    if isinstance(rows.dataset, Batches):
        return BatchReader(rows, here.shares, is_divided=is_divided, rank=here.rank)
    return Reader(
        rows,
        source.batch_size,
        here.shares,
        is_divided=is_divided,
        rank=here.rank,
    )


class Streamed:
    """Gives an epoch's batches of a stream, as this process's shares, and knows where it is.

    Where it is divided, each rank reads other rows. The processes count those of a batch together
    where they can't know them: they have a `tally` then. By `look` they compare the first batch."""

    def __init__(
        self,
        reader: Reader,
        source: Source,
        here: Here,
        division: Division | ByRank | None,
        processes: DataWorkers | None,
        *,
        seed: int,
        look: Callable[[Any], None] | None,
    ) -> None:
        self._reader = reader
        self._source = source
        self._here = here
        self._division = division
        self._processes = processes
        self._seed = seed
        self._workers = 1 if processes is None else processes.count
        self._look = look
        self._pins = source.pin_memory and here.pins
        self._tally = here.tally if division is not None or source.may_differ else None
        # Whether each process has a place of its own.
        self._is_apart = division is not None or isinstance(source.dataset, Batches)
        self._places: dict[int, Place] = {}  # in the stream, by the batches before it
        self._sought: Place | None = None

    def place(self, batches: int) -> Place | None:
        """Where this process is in its stream after so many batches; None if their number tells.

        Workers have read ahead: of each it is the place after its last batch among these.
        """
        reader = self._reader
        if not (reader.has_state or self._division):
            return None
        if not (batches or reader.spans_epochs or self._sought):
            return None
        if self._processes is not None or self._sought is not None:
            return self._sought or self._places.get(batches)
        return {"turn": 0, "workers": [reader.position()]}

    def seek(self, places: list[Any], ranks: int) -> None:
        """The next epoch goes on where all ranks were. A stream that is not divided is at one place
        for all of them, and one that is divided differently now is read again."""
        if not places or None in places:
            return
        is_same = len(places) == ranks
        place = places[self._here.rank if is_same else 0]
        for position in place["workers"]:
            check(position)
        is_same &= 0 <= place["turn"] < len(place["workers"]) == self._workers
        if is_same or not self._is_apart:
            self._sought = {"turn": 0, **place} if is_same else {**place, "turn": 0}

    def epoch(self, epoch: int, skip: int, limit: int | None, worker_seed: int) -> Iterator[Batch]:
        """The batches [skip, limit) of an epoch; it reads the rows that it skips."""
        place = self._sought or self._reader.place(skip, self._workers)
        self._sought = None
        self._places.clear()
        self._reader.begin(self._seed, epoch, place["workers"], is_within=skip > 0)
        answers = self._answers(place, worker_seed)
        for batches in count(skip + 1):
            if limit is not None and batches > limit:
                return
            shares, rows = next(answers, self._reader.nothing)
            if self._look is not None:
                look, self._look = self._look, None
                look(shares[0][0])
            total = rows if self._tally is None else self._counted(rows, self._tally)
            if not total or (self._source.drop_last and total < self._source.batch_size):
                return
            if self._processes is not None:
                self._places.pop(batches - KEPT, None)
                self._places[batches] = {**place, "workers": list(place["workers"])}
            yield self._batch(shares, total)

    def _batch(self, shares: list[tuple[Any, int]], total: int) -> Batch:
        if self._division is not None and self._division.ranks > 1:
            # Its shares are not those of a split: no rank knows the others'.
            return Batch([Share(batch, n) for batch, n in shares], total)
        pairs = zip(shares, self._here.shares(range(total)), strict=True)
        return Batch([Share(*share, total, place) for share, place in pairs], total)

    def _counted(self, rows: int, tally: Callable[[list[float]], list[float]]) -> int:
        total, processes = tally([float(rows), 1.0])
        if self._division is None and total != rows * processes:
            raise UserError(
                f"{self._reader.name} gives the same first rows on all ranks, but more rows on "
                "some: give all rows in each process, or different ones from the first row on"
            )
        return int(total) if self._division else rows

    def _answers(self, place: Place, worker_seed: int) -> Iterator[Any]:
        """The local shares of each batch, and how many rows were read for it."""
        if self._processes is not None:
            return self._by_workers(self._processes, place, worker_seed)
        answers = self._reader.batches()  # a DataLoader would add nothing but time
        if not self._pins:
            return answers
        return (([(pinned(share), n) for share, n in a], rows) for a, rows in answers)

    def _by_workers(self, processes: DataWorkers, place: Place, seed: int) -> Iterator[Any]:
        """Their batches in turn, until all have ended; `place` moves with them."""
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
