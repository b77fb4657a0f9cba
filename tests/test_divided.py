"""Data of which each process has a part already: noticed before a run, and read as such."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from small import SGD, Small, fitted, trainer
from torch import Tensor, distributed
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dpframe import DataModule, ShardedStream, Strategy, UserError
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


class Data(DataModule):
    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__(BATCH, shuffle=False, **options)
        self.make = make

    def train_dataset(self) -> Any:
        return self.make()

    def val_dataset(self) -> Dataset:
        return TensorDataset(*table())


KINDS = {
    "stream": (Stream, "other first rows on rank 1 than on rank 0"),
    "rows": (Part, "8 rows on rank 0, and 7 on rank 1"),
    "of small numbers": (Tiny, "other first rows on rank 1 than on rank 0"),
    "as many rows": (partial(Part, True), "other first rows on rank 1 than on rank 0"),
}


def refused(strategy: Strategy, make: Any) -> str:
    with pytest.raises(UserError) as refusal:
        fitted(Small(), Data(make), strategy=strategy, max_steps=1)
    return str(refusal.value)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_which_each_process_has_a_part_are_refused_in_one_line(kind):
    make, how = KINDS[kind]
    said = on(DDP(3, "cpu"), refused, make)
    assert said.startswith(f"Data.train_dataset() gives {how}, and dpframe divides each batch")
    assert "set data.divided=by_rank where each has its own" in said


def as_they_are(strategy: Strategy) -> list[int]:
    counts = []
    for data in (Data(Noisy), Data(Part, divided="by_rank"), Data(Stream, divided="by_rank")):
        made = fitted(Small(), data, strategy=strategy, max_epochs=1)
        counts.append(made.progress.rows_seen)
    made = trainer(Small(), Data(Stream), strategy=strategy, share_check="off", max_epochs=1)
    made.fit()
    return [*counts, made.progress.rows_seen]


def test_random_rows_are_no_part_and_each_row_of_parts_is_seen_once():
    *seen, lost = on(DDP(3, "cpu"), as_they_are)
    assert seen == [ROWS, ROWS, ROWS] and lost < ROWS


def trained(strategy: Strategy, make: Any) -> Any:
    torch.manual_seed(0)
    data = Data(make, divided="by_rank")
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
    with pytest.raises(UserError, match="data.divided=rank is not known; set by_rank, or null"):
        fitted(Small(), Data(Noisy, divided="rank"))


class Sharded(ShardedStream):
    def shards(self) -> range:
        return range(6)

    def read(self, shard: int) -> Iterator[Any]:
        return zip(*table(), strict=True)


def refusal(strategy: Strategy) -> list[str]:
    said = []
    for data in (Data(Sharded, divide_streams=True), Data(Part, divided="by_rank")):
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
