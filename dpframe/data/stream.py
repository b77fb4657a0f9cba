"""Streams: rows in an order of their own, which every rank reads whole, or which are divided."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import islice
from typing import Any, Self

from torch.utils.data import IterableDataset, get_worker_info

from dpframe import seeding
from dpframe.data.module import Shares, split
from dpframe.data.reading import Rows, noted, set_epoch
from dpframe.errors import UserError

Position = dict[str, Any]
"""Of a reader: `rows` read, whether it `is_over`, and the `stream`'s own state, if it has one."""
Place = dict[str, Any]
"""Of a process: a position for each of its `workers`, or for itself, and whose `turn` it is."""


class ShardedStream(IterableDataset):
    """A stream of shards, e.g. files: override `shards` and `read`.

    Where it was is part of a checkpoint: a resumed run skips rows of one shard only.
    """

    _parts: tuple[tuple[int, int], ...] = ()
    _start = _at = (0, 0)  # shards before, and rows of the next one

    def shards(self) -> Sequence[Any]:
        """What `read` gets, one by one. Random numbers that it draws are those of the epoch."""
        raise NotImplementedError

    def read(self, shard: Any) -> Iterable[Any]:
        """The rows of a shard, the same ones in each run."""
        raise NotImplementedError

    @property
    def num_shards(self) -> int:
        return len(self._own())

    def shard(self, num_shards: int, index: int) -> Self:
        """One of `num_shards` streams that divide its shards."""
        part = copy(self)
        part._parts = (*self._parts, (num_shards, index))
        return part

    def state_dict(self) -> dict[str, int]:
        return {"shard": self._at[0], "row": self._at[1]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next `iter` goes on there."""
        self._start = state["shard"], state["row"]

    def __iter__(self) -> Iterator[Any]:
        """In a worker, the rows of every n-th shard."""
        worker, shards = get_worker_info(), self._own()
        if worker is not None:
            shards = shards[worker.id :: worker.num_workers]
        self._at, self._start = self._start, (0, 0)
        shard, skipped = self._at
        rows = iter(self.read(shards[shard])) if skipped else None
        for _ in islice(rows or (), skipped):
            pass  # here, so that what is drawn for these rows is not drawn for a batch
        return self._rows(shards, rows)

    def _own(self) -> list[Any]:
        shards = list(self.shards())
        for count, index in self._parts:
            shards = shards[index::count]
        return shards

    def _rows(self, shards: list[Any], rows: Iterable[Any] | None) -> Iterator[Any]:
        """`rows` is the rest of the shard that was begun, if one was."""
        first, row = self._at
        for shard in range(first, len(shards)):
            if rows is None:
                rows, row = self.read(shards[shard]), 0
            for row, value in enumerate(rows, row + 1):  # noqa: B020
                self._at = shard, row
                yield value
            rows = None


class Division:
    """How the shards of a stream are divided over ranks and workers."""

    def __init__(self, dataset: Any, ranks: int, workers: int) -> None:
        name = type(dataset).__name__
        if not (hasattr(dataset, "shard") and hasattr(dataset, "num_shards")):
            raise UserError(
                f"divide_streams=True but {name} has no num_shards and shard(num_shards, index); "
                "make it a dpframe.ShardedStream, or leave divide_streams out"
            )
        with seeding.seeded(0):  # it may draw its shards
            self.shards = int(dataset.num_shards)
        if self.shards < ranks:
            raise UserError(
                f"divide_streams=True but {name} has {self.shards} shards for {ranks} ranks; make "
                "more shards, or leave divide_streams out"
            )
        self.ranks = ranks
        self.workers = min(workers, self.shards // ranks if _knows_workers(dataset) else 1)

    def part(self, dataset: Any, rank: int) -> Any:
        return dataset.shard(num_shards=self.ranks, index=rank)

    def described(self) -> str:
        """For the banner."""
        workers = f" x {self.workers} workers" if self.workers > 1 else ""
        return (
            f"a stream of {self.shards} shards, divided over {self.ranks} "
            f"rank{'s' * (self.ranks > 1)}{workers}: which rows meet in a batch depends on that"
        )


def _knows_workers(dataset: Any) -> bool:
    """Whether it reads a part of its own in each worker; from any other all would read the same."""
    is_hugging_face = type(dataset).__module__.partition(".")[0] == "datasets"
    return is_hugging_face or isinstance(dataset, ShardedStream)


def check(position: Position) -> None:
    """Refuses what no reader would have saved: a file may hold anything."""
    rows, is_over = position["rows"], position["is_over"]
    if type(rows) is not int or rows < 0 or type(is_over) is not bool or "stream" not in position:
        raise ValueError(f"the place in the stream is {str(position)[:200]}")


def has_buffer(dataset: Any) -> bool:
    """Whether Hugging Face shuffles it by a buffer: its state leaves out the rows in there."""
    waiting = [dataset]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list | tuple):
            waiting += part
        elif type(part).__module__ == "datasets.iterable_dataset":
            if type(part).__name__ == "BufferShuffledExamplesIterable":
                return True
            waiting += vars(part).values()
    return False


class Reader:
    """Cuts a stream into batches, of which each process keeps its shares.

    They are global ones where every rank reads the whole stream. Of one that is divided, a rank
    reads its own rows of each.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        shares: Shares,
        *,
        is_divided: bool,
        rank: int,
    ) -> None:
        self._rows = rows
        self._shares = shares
        self._is_divided = is_divided
        self._rank = rank
        self._own = sum(map(len, shares(range(batch_size))))
        self.batch_size = self._own if is_divided else batch_size
        self.nothing = [(None, 0)] * len(shares(range(batch_size))), 0
        self.has_state = hasattr(rows.dataset, "state_dict") and not has_buffer(rows.dataset)
        self._seen, self._is_over = 0, False
        self.name = rows.name
        self._opened: Iterator[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is not forked, to which a strategy with its process group can't be
        sent: it gets the shares of a batch of each size."""
        shares = [self._shares(range(rows)) for rows in range(self.batch_size + 1)]
        return vars(self) | {"_shares": partial(_shares_of, shares)}

    @property
    def spans_epochs(self) -> bool:
        """Whether a position between two epochs says more than their number."""
        return False

    def place(self, batches: int, workers: int) -> Place:
        """After so many batches, as far as their number tells."""
        rows = [self.batch_size * len(range(worker, batches, workers)) for worker in range(workers)]
        starts = [{"rows": each, "is_over": False, "stream": None} for each in rows]
        return {"turn": batches % workers, "workers": starts}

    def begin(
        self, seed: int, epoch: int, starts: list[Position], *, is_within: bool = False
    ) -> None:
        """Before an epoch, or within it; `starts` has a position for each worker."""
        self._seed = seed, epoch
        self._starts = starts
        set_epoch(self._rows.dataset, epoch)

    def answer(self, is_read: bool) -> Any:
        """In a worker, which starts afresh each epoch: its next batch and position, or None."""
        if not is_read:
            return None
        self._opened = self._opened or self.batches()
        batch = next(self._opened, None)
        return batch and (*batch, self.position())

    def position(self) -> Position:
        state = self._rows.dataset.state_dict() if self.has_state else None
        return {"rows": self._seen, "is_over": self._is_over, "stream": state}

    def batches(self) -> Iterator[tuple[list[tuple[Any, int]], int]]:
        """The local shares of each batch, and the rows that were read for it."""
        worker = get_worker_info()
        start = self._starts[worker.id if worker is not None else 0]
        # What the stream draws follows from the batch, so that all its readers read the same;
        # those of a divided one read other rows.
        reader = (self._rank, worker.id if worker is not None else 0) if self._is_divided else ()
        self._seen, self._is_over = start["rows"], start["is_over"]
        if self._is_over:
            return
        with seeding.seeded(*self._seed):
            if start["stream"] is None:
                self._seen = 0  # it is read again up to its place
            else:
                self._rows.dataset.load_state_dict(start["stream"])
            stream = iter(self._rows.dataset)
        while not self._is_over:
            first = self._seen
            with seeding.seeded(*self._seed, first, *reader):
                batch = self._read(stream, first)
                is_wanted = batch and first + len(batch) > start["rows"]
                local = self._local(batch, first, *reader) if is_wanted else []
            self._seen += len(batch)
            self._is_over = len(batch) < self.batch_size
            if is_wanted:
                yield local, len(batch)

    def _read(self, stream: Iterator, first: int) -> list:
        batch: list = []
        with noted(lambda: f"while reading row {first + len(batch)} of {self._rows.name}"):
            batch.extend(islice(stream, self.batch_size))
        return batch

    def _local(self, batch: list, first: int, *reader: int) -> list[tuple[Any, int]]:
        cut = self._cut if self._is_divided else self._shares
        numbers = cut(range(first, first + len(batch)))
        return [
            (self._combined(share, rows, len(batch), reader) if share else None, len(share))
            for share, rows in zip(map(list, cut(batch)), numbers, strict=True)
        ]

    def _combined(self, share: list, rows: Sequence[int], of: int, reader: Sequence[int]) -> Any:
        """A collate goes on with what the rows drew, or draws by the first row of its share."""
        if len(share) < of:
            seeding.reseed(seeding.mix(*self._seed, rows[0], *reader, of))
        return self._rows.combine(share, rows)

    def _cut(self, rows: Sequence) -> list[Sequence]:
        """The rows that this process has read, for its replicas."""
        return split(rows, len(self._shares(rows)))


def _shares_of(numbers: list[list[Sequence]], rows: Sequence) -> list[Sequence]:
    """`numbers` has the places of each share's rows, by the size of the batch."""
    return [[rows[place] for place in share] for share in numbers[len(rows)]]
