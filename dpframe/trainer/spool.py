"""A spool: batches of predictions in order, in memory while they are few, else on disk."""

import pickle
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from torch import Tensor

from dpframe.data.module import leaves
from dpframe.errors import Failure

HELD = 32 << 20  # bytes that are kept in memory at a time
LEAF = 64  # bytes of a number or a text
GATHERED = 64  # batches at a time, if they are small


def size_of(batches: Any) -> int:
    """About so many bytes in memory."""
    return sum(leaf.nbytes if isinstance(leaf, Tensor) else LEAF for leaf in leaves(batches))


def fitting(batches: int, held: float) -> int:
    """How many batches to gather at a time, given that so many took `held` bytes."""
    return max(1, min(GATHERED, int(batches * HELD / (held + 1))))


class Spool(Sequence[list[Any]]):
    """Its file has no name, so that nothing remains of it, whatever ends the process."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._file: Any = None
        self._held: list[list[Any]] = []
        self._bytes = 0
        self._count = 0

    @property
    def is_on_disk(self) -> bool:
        return self._file is not None

    def extend(self, batches: list[list[Any]]) -> None:
        self._held += batches
        self._count += len(batches)
        self._bytes += size_of(batches)
        if self._bytes <= HELD:
            return
        try:
            if self._file is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._file = TemporaryFile(dir=self._directory)  # noqa: SIM115
            pickle.dump(self._held, self._file, pickle.HIGHEST_PROTOCOL)
            self._file.flush()
        except OSError as error:
            raise Failure(
                f"the predictions can't be written to {self._directory}: {error.strerror}"
            ) from error
        self._held, self._bytes = [], 0

    def pieces(self) -> Iterator[list[list[Any]]]:
        """Some batches at a time."""
        if self._file is not None:
            place, end = 0, self._file.tell()
            while place < end:
                self._file.seek(place)
                batches = pickle.load(self._file)
                place = self._file.tell()
                self._file.seek(end)  # where more would be written
                yield batches
        if self._held:
            yield self._held

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[Any]]:
        return chain.from_iterable(self.pieces())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        at = range(self._count)[index]
        return next(islice(self, at, None))
