"""Ready batches: each rank iterates a loader of its own."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from dpframe import seeding
from dpframe.data.module import Shares, leaves, mapped
from dpframe.data.reading import Rows, noted
from dpframe.data.stream import Position, Reader
from dpframe.errors import UserError

PASS_ROWS = "pass rows=, e.g. rows=lambda batch: batch.num_graphs"
PARTS = ("dataset", "sampler", "batch_sampler")  # of a loader, which may count epochs
log = logging.getLogger("dpframe")


class Batches(IterableDataset):
    """Around a loader of ready batches: each rank iterates its own, once an epoch.

    `rows` counts the rows of a batch, by which it is weighted; without it they are the first
    dimension of its tensors. Where the loader has `state_dict` and `load_state_dict`, a resumed run
    goes on by them; else it reads again what it skips.
    """

    def __init__(self, loader: Iterable[Any], rows: Callable[[Any], int] | None = None) -> None:
        kind = type(loader).__name__
        if isinstance(loader, Iterator):
            raise UserError(
                f"dpframe.Batches got a {kind}, which ends with the first epoch; pass the loader "
                "that begins again with each iter()"
            )
        if not isinstance(loader, Iterable):
            raise UserError(f"dpframe.Batches got a {kind}; pass an iterable of batches")
        self.loader = loader
        self._count = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Of the loader or, if it has none, of its data set and samplers."""
        parts = [getattr(self.loader, name, None) for name in PARTS]
        parts.append(getattr(parts[-1], "sampler", None))
        for part in [self.loader] if hasattr(self.loader, "set_epoch") else _each_once(parts):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def rows(self, batch: Any) -> int:
        """How many rows a batch has."""
        kind = type(batch).__name__
        if self._count is not None:
            count: Any = self._count(batch)
            try:
                rows = index(count)
            except TypeError:
                rows = -1
            if rows < 0:
                raise UserError(
                    f"rows= of dpframe.Batches returned {str(count)[:40]} for a {kind}; return how "
                    "many rows it has"
                )
            return rows
        sizes = {leaf.shape[0] for leaf in leaves(batch) if getattr(leaf, "shape", ())}
        if len(sizes) == 1:
            return sizes.pop()
        why = f"in which tensors have {' and '.join(map(str, sorted(sizes)))}" if sizes else ""
        raise UserError(
            f"dpframe.Batches can't tell how many rows a {kind} has{', ' * bool(why)}{why}; "
            f"{PASS_ROWS}"
        )

    def described(self) -> str:
        """For the banner."""
        return f"ready batches of a {type(self.loader).__name__}"


def _each_once(parts: Iterable[Any]) -> Iterable[Any]:
    return {id(part): part for part in parts}.values()


class BatchReader(Reader):
    """Gives this process's ready batches, cut into the shares of its replicas.

    The loader draws random numbers by (seed, epoch, rank, batch), whatever the steps draw.
    """

    def __init__(self, rows: Rows, shares: Shares, *, is_divided: bool, rank: int) -> None:
        super().__init__(rows, 1, shares, is_divided=is_divided, rank=rank)
        self.batch_size = 1  # what the loader gives at a time
        self._data: Batches = rows.dataset
        self._loader: Any = self._data.loader
        self.has_state = all(hasattr(self._loader, n) for n in ("state_dict", "load_state_dict"))
        self._has_begun = False
        self._batches: Iterator[Any] | None = None  # until the first one is read
        self._ahead: tuple[Any, int] | None = None
        self._kept: Position | None = None  # until the next batch

    @property
    def spans_epochs(self) -> bool:
        """A state may count epochs, too."""
        return self.has_state and self._has_begun

    def position(self) -> Position:
        """With the state between two batches. Loaded after the last one it may begin another epoch,
        so that it is known whether there are more: one is read."""
        if self._kept is None:
            state = self._loader.state_dict() if self.has_state else None
            if self.has_state and not self._is_over:
                self._ahead = self._next()
                state = state if self._ahead else self._loader.state_dict()
            self._kept = {"rows": self._seen, "is_over": self._is_over, "stream": state}
        return self._kept

    def begin(
        self, seed: int, epoch: int, starts: list[Position], *, is_within: bool = False
    ) -> None:
        super().begin(seed, epoch, starts)
        [start] = starts
        self._has_begun, self._seen, self._is_over, self._skipped = True, 0, False, start["rows"]
        self._batches = self._ahead = self._kept = None
        if start["stream"] is not None:
            self._skipped = 0
            self._load(start, is_within=is_within)

    def _load(self, start: Position, *, is_within: bool) -> None:
        self._loader.load_state_dict(start["stream"])
        if is_within and not start["is_over"]:
            self._seen = start["rows"]
            with seeding.seeded(*self._seed, 0, self._rank):  # an order is drawn as it was
                self._batches = iter(self._loader)
            return
        with seeding.kept():  # what has ended is opened: it draws nothing of the next epoch's
            if start["is_over"]:
                self._loader.state_dict()
            else:  # a limit has ended it
                next(iter(self._loader), None)
        if is_within:
            self._seen, self._is_over, self._kept = start["rows"], True, start

    def batches(self) -> Iterator[tuple[list[tuple[Any, int]], int]]:
        if self._skipped and not self._rank:
            again = (
                f"{type(self._loader).__name__} reads {self._skipped} batches of this epoch again"
            )
            log.info("%s, which are skipped", again)
        try:
            while not self._is_over and (read := self._ahead or self._next()) is not None:
                self._ahead = self._kept = None
                self._seen += 1
                if self._seen > self._skipped:
                    yield self._shared(*read), read[1]
        finally:
            if not self.has_state:  # whose position is asked for; else its workers may end
                self._batches = None

    def _next(self) -> tuple[Any, int] | None:
        """The next batch that has rows, and their number."""
        with (
            seeding.seeded(*self._seed, self._seen, self._rank),
            noted(lambda: f"while reading batch {self._seen} of {type(self._loader).__name__}"),
        ):
            if self._batches is None:
                self._batches = iter(self._loader)
            for batch in self._batches:
                if rows := self._data.rows(batch):
                    return batch, rows
        self._is_over = True
        return None

    def _shared(self, batch: Any, rows: int) -> list[tuple[Any, int]]:
        cut = self._cut if self._is_divided else self._shares
        parts = cut(range(rows))
        if len(parts) == 1:
            return [(batch, rows)]
        return [(part_of(batch, rows, part) if part else None, len(part)) for part in parts]


def part_of(batch: Any, rows: int, places: Sequence[int]) -> Any:
    """These rows of a batch, of which all is tensors with the rows first."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.shape[:1] == (rows,):
            return leaf[places[0] : places[-1] + 1]
        what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else ""
        raise UserError(
            f"a ready batch of {rows} rows has {what or f'a {type(leaf).__name__}'} in it, which "
            "can't be cut for several replicas in one process: leave it out, or use strategy=ddp"
        )

    return mapped(cut, batch)
