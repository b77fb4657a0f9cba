"""Several training sets in a step: one data set of their rows, whose collate makes a dict."""

from bisect import bisect_right
from typing import NamedTuple

from torch.utils.data import IterableDataset

from dpframe.data.mix import Several, spread
from dpframe.data.module import DataModule
from dpframe.data.reading import ByName, Row, Rows
from dpframe.data.source import Source
from dpframe.errors import UserError, not_one_of

LENGTHS = ("longest", "shortest")


class Together(Several):
    """The rows of all sets, those of the first one first."""

    def __init__(self, sources: dict[str, Source], length: str) -> None:
        super().__init__([source.dataset for source in sources.values()])
        self.names = [*sources]
        parts = [f"{s.batch_size} of {len(s.dataset):,} rows of {n}" for n, s in sources.items()]
        self.text = f"{' and '.join(parts)} a step, an epoch of the {length}"

    def __getitem__(self, row: int) -> Row:
        place = bisect_right(self.cumulative_sizes, row)
        number = row - (self.cumulative_sizes[place - 1] if place else 0)
        return Row(self.names[place], number, self.datasets[place][number])

    def described(self) -> str:
        return self.text

    def few(self, count: int) -> list[list[int]]:
        """So many rows in all, in which each set comes evenly: the first ones, and some from all
        over each set."""
        of = len(self.names)
        counts = tuple(count // of + (place < count % of) for place in range(of))
        sizes = [len(each) for each in self.datasets]  # type: ignore[arg-type]
        starts = [end - size for end, size in zip(self.cumulative_sizes, sizes, strict=True)]
        first, wide = list[int](), list[int]()
        for start, size, some in zip(starts, sizes, counts, strict=True):
            first += [start + row % size for row in range(some)]
            wide += [start + row * (size - 1) // max(1, some - 1) for row in range(some)]
        return [[rows[place] for place in spread(counts).tolist()] for rows in (first, wide)]


class Parts(NamedTuple):
    """What the order of a step's sets follows from."""

    sources: dict[str, Source]
    length: str  # of an epoch: `longest`, `shortest` or the name of a set


def together(sources: dict[str, Source], data: DataModule) -> Source:
    """One source of the sets that a step has together. Those that read are the processes of the one
    that has the most."""
    for source in sources.values():
        if isinstance(source.dataset, IterableDataset):
            raise UserError(
                f"{source.method} is a {type(source.dataset).__name__}, and with several sets in "
                "a step each needs __len__ and __getitem__; return a stream by itself"
            )
    if data.length not in (*LENGTHS, *sources):
        raise not_one_of("data.length", data.length, (*LENGTHS, *sources))
    each = [*sources.values()]
    most = max(each, key=lambda source: (source.workers == "auto", source.workers))
    return Source(
        Together(sources, data.length),
        batch_size=sum(source.batch_size for source in each),
        shuffle=any(source.shuffle for source in each),
        sampler=Parts(sources, data.length),
        workers=most.workers,
        collate=ByName({name: Rows(s.dataset, s.collate) for name, s in sources.items()}),
        drop_last=any(source.drop_last for source in each),
        timeout_seconds=most.timeout_seconds,
        options=most.options,
        is_by_rank=each[0].is_by_rank,
        pin_memory=data.pin_memory,
        method=f"{type(data).__name__}.train_dataset()",
    )
