"""Data of which each process has a part already: noticed before a run, and read as such."""

import logging
import random
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from forked import on
from small import SGD, Given, Small, fitted, trainer
from torch import Tensor, distributed
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dpframe import DataModule, ShardedStream, Strategy, UserError
from dpframe.data.divided import look
from dpframe.strategies.ddp import DDP

ROWS, BATCH = 22, 8


def table() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7))
    return x, x.sum(dim=1)


def here() -> tuple[int, int]:
    return distributed.get_rank(), distributed.get_world_size()


class Stream(IterableDataset):
    """Divides itself, as webdataset's and litdata's do."""

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = here()
        return ((x, y) for x, y in list(zip(*table(), strict=True))[rank::ranks])


class Part(Dataset):
    def __init__(self, drop: bool = False) -> None:
        rank, ranks = here()
        end = ROWS // ranks * ranks if drop else ROWS
        self.rows = list(zip(*table(), strict=True))[rank:end:ranks]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


class Tiny(Part):
    def __init__(self) -> None:
        super().__init__(True)
        self.rows = [(1e-4 * x, 1e-4 * y) for x, y in self.rows]


class Noisy(Part):
    """All rows, each read with noise that no seed of a run decides."""

    def __init__(self) -> None:
        self.rows = list(zip(*table(), strict=True))
        self.draw = torch.Generator()
        self.draw.seed()

    def __getitem__(self, row: int) -> Any:
        x, y = self.rows[row]
        return x + torch.rand(3, generator=self.draw), y


class Whole(IterableDataset):
    """All rows; the main process has some more."""

    def __init__(self, more: int) -> None:
        self.more = more * (here()[0] == 0)

    def __iter__(self) -> Iterator[Any]:
        rows = list(zip(*table(), strict=True))
        return iter(rows + rows[: self.more])


class Augmented(Part):
    """With noise of a generator that begins alike in each process, but not at each reading."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = random.Random(0)

    def __getitem__(self, row: int) -> Any:
        x, y = self.rows[row]
        return x + self.draw.random(), y


class Headed(Stream):
    """Its first rows are the same in each process."""

    def __iter__(self) -> Iterator[Any]:
        return chain([(torch.zeros(3), torch.tensor(0.0))] * 3, super().__iter__())


class Middle(Part):
    """Only the rows from the middle on are other ones in each process."""

    def __init__(self) -> None:
        super().__init__(True)
        half = len(self.rows) // 2
        self.rows[:half] = list(zip(*table(), strict=True))[:half]


def given(make: Any, evaluated: Any = None, **options: Any) -> DataModule:
    evaluated = evaluated or partial(TensorDataset, *table())
    return Given(make, evaluated, BATCH, shuffle=False, **options)


KINDS = {
    "stream": (Stream, "other rows on rank 1 than on rank 0"),
    "rows": (Part, "8 rows on rank 0, and 7 on rank 1"),
    "of small numbers": (Tiny, "other rows on rank 1 than on rank 0"),
    "as many rows": (partial(Part, True), "other rows on rank 1 than on rank 0"),
    "that begin alike": (Middle, "other rows on rank 1 than on rank 0"),
}


def test_a_number_of_a_column_is_looked_at_as_any_other():
    number = torch.arange(9).view(3, 3)[:1, 0]  # its stride is 3
    assert look([number]) == look([torch.tensor([0])]) != look([torch.tensor([1])])


def refused(strategy: Strategy, make: Any) -> str:
    with pytest.raises(UserError) as refusal:
        fitted(Small(), given(make), strategy=strategy, max_steps=1)
    return str(refusal.value)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_which_each_process_has_a_part_are_refused_in_one_line(kind):
    make, how = KINDS[kind]
    said = on(DDP(3, "cpu"), refused, make)
    assert said.startswith(f"Given.train_dataset() gives {how}, and dpframe divides each batch")
    assert "set data.divided=by_rank where each has its own" in said


def as_they_are(strategy: Strategy) -> list[int]:
    counts = []
    for data in (given(Noisy), given(Part, divided="by_rank"), given(Stream, divided="by_rank")):
        made = fitted(Small(), data, strategy=strategy, max_epochs=1)
        counts.append(made.progress.rows_seen)
    made = trainer(Small(), given(Stream), strategy=strategy, share_check="off", max_epochs=1)
    made.fit()
    return [*counts, made.progress.rows_seen]


def test_random_rows_are_no_part_and_each_row_of_parts_is_seen_once():
    *seen, lost = on(DDP(3, "cpu"), as_they_are)
    assert seen == [ROWS, ROWS, ROWS] and lost < ROWS


def seen_by_all(strategy: Strategy) -> tuple[list[int], list[str]]:
    """How many rows each kind of data has trained on, and what the runs have warned of."""
    lines, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dpframe").addHandler(handler)
    counts = []
    for make in (Augmented, Headed, partial(TensorDataset, *table())):
        data = given(make, divided="by_rank")
        counts.append(fitted(Small(), data, strategy=strategy, max_epochs=1).progress.rows_seen)
    return counts, lines


def test_training_data_that_are_said_to_be_divided_are_read_so_however_they_begin():
    seen, lines = on(DDP(3, "cpu"), seen_by_all)
    assert seen == [ROWS, ROWS + 9, 3 * ROWS]
    said = [line for line in lines if "by_rank" in line]
    assert said == [
        f"data.divided=by_rank, and the rows of {name} that were looked at are the same on all "
        "ranks: leave it out if each process has all rows, which are read once for each rank now"
        for name in ("Given.train_dataset()", "Given.train_dataset()")
    ]


def evaluated(strategy: Strategy) -> list[Any]:
    """What is measured on data to validate on, of which each process has a part, or all."""
    measured: list[Any] = []
    for make in (Augmented, Stream, Middle, partial(Whole, 0)):
        torch.manual_seed(0)
        data = given(Part, make, divided="by_rank")
        made = trainer(Small(), data, strategy=strategy, precision="64")
        measured.append(made.validate()["val/loss"])
    with pytest.raises(UserError) as refusal:
        data = given(Part, partial(Whole, 5), divided="by_rank")
        trainer(Small(), data, strategy=strategy).validate()
    return [*measured, str(refusal.value)]


def test_data_to_validate_on_are_by_rank_unless_they_are_alike_in_all_processes():
    """A stream that is alike in its first rows alone is refused where ranks would leave step."""
    *measured, line = on(DDP(2, "cpu"), evaluated)
    torch.manual_seed(0)
    task = Small().double()
    x, y = (each.double() for each in table())
    mean = task.training_step([x, y])["loss"].item()
    is_of_all_rows = [value == pytest.approx(mean) for value in measured]
    assert is_of_all_rows == [False, True, False, True]  # noise, and rows that some have twice
    assert line == (
        "Whole gives the same first rows on all ranks, but more rows on some: "
        "give all rows in each process, or different ones from the first row on"
    )


def trained(strategy: Strategy, make: Any) -> Any:
    torch.manual_seed(0)
    data = given(make, divided="by_rank")
    made = fitted(Small(), data, strategy=strategy, max_epochs=1, precision="64")
    return made.task.state_dict(), made.metrics, made.feed.train.how


@pytest.mark.parametrize("make", [Stream, Part])
def test_parts_train_as_a_loop_by_hand_over_what_meets_in_a_batch(make):
    state, metrics, how = on(DDP(2, "cpu"), trained, make)
    torch.manual_seed(0)
    task = Small().double()
    optimizer, losses = SGD(task.parameters()), []
    x, y = (each.double() for each in table())
    for first in range(0, ROWS, BATCH):  # of rank 0 the even ones, and of rank 1 the odd ones
        loss = task.training_step([x[first : first + BATCH], y[first : first + BATCH]])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() * len(x[first : first + BATCH]))
    for name, weight in task.state_dict().items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-12)
    assert metrics["train/loss"] == pytest.approx(sum(losses) / ROWS)
    task.eval()
    assert metrics["val/loss"] == pytest.approx(task.training_step([x, y])["loss"].item())
    assert "what each of 2 ranks has: which rows meet in a batch depends on that" in how


def test_another_value_is_one_line():
    with pytest.raises(UserError, match="data.divided=rank is text; use by_rank or null"):
        fitted(Small(), given(Noisy, divided="rank"))


class Sharded(ShardedStream):
    def shards(self) -> range:
        return range(6)

    def read(self, shard: int) -> Iterator[Any]:
        return zip(*table(), strict=True)


def refusal(strategy: Strategy) -> list[str]:
    said = []
    for data in (given(Sharded, divide_streams=True), given(Part, divided="by_rank")):
        data.batch_size = 4
        with pytest.raises(UserError) as caught:
            trainer(data=data, strategy=strategy, share_check="off").fit()
        said.append(str(caught.value))
    return said


def test_a_batch_that_leaves_a_rank_without_a_row_of_its_own_is_refused_in_one_line():
    """4 rows are 2, 2 and 0: the third rank would never come to the end of its rows."""
    line = (
        "a batch of 4 rows leaves one of 3 ranks without a row, and each reads rows of its own; "
        "use data.batch_size=6"
    )
    assert on(DDP(3, "cpu", timeout_seconds=15), refusal) == [line, line]
