"""A batch in pieces that fit: the same update, however many rows are computed at once."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from small import SGD, Hooks, Listed, Rows, Small, Stream, fitted, is_same, trainer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dpframe import DataModule, ShardedStream, Strategy, Task, UserError, dropout_rows
from dpframe.strategies import CPU, DDP, FSDP, DataParallel

EXACT = 1e-12
SETTINGS: dict[str, Any] = {"precision": "64", "max_epochs": 2, "share_check": "strict"}
LONGEST = 5
ROWS, SIZE = 23, 7  # the last batch has two rows, of which a third replica has none


class ByTokens(Task):
    """A mean over the tokens of rows that have different numbers of them, with noise by row."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.3)), SGD)
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, mask = batch["x"], batch["mask"]
        noise = self.randn_rows(len(x), LONGEST, 2)[:, : x.shape[1]]
        hidden = dropout_rows(self.net(x + 0.1 * noise), 0.2)
        error = (self.head(hidden)[..., 0] - x.sum(-1)).square()
        tokens = mask.sum()
        return {"loss": (error * mask).sum() / tokens, "weight": tokens}

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.training_step(batch)["loss"]}


class Ragged(DataModule):
    """Rows of one to five tokens, which no cut of a batch would find again."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(SIZE, **settings)
        draw = torch.Generator().manual_seed(3)
        self.rows = [torch.randn(1 + row % LONGEST, 2, generator=draw) for row in range(ROWS)]

    def train_dataset(self) -> Any:
        return Listed(self.rows)

    def collate(self, rows: list[Tensor]) -> Any:
        mask = pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
        x = pad_sequence(rows, batch_first=True)
        return {"x": x, "mask": mask, "of": [str(len(row)) for row in rows]}


class Dropping(Small):
    def __init__(self) -> None:
        super().__init__(partial(torch.optim.AdamW, lr=0.01), dropout=0.4)


class Streaming(Rows):
    def train_dataset(self) -> Any:
        return Stream(self.train)


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "tensors": (Small, partial(Rows, ROWS, SIZE), {}),
    "dropout": (Dropping, partial(Rows, ROWS, SIZE), {"dropout": "row", "clip_norm": 0.5}),
    "ragged": (ByTokens, Ragged, {"dropout": "row"}),
    "workers": (ByTokens, partial(Ragged, workers=1), {"dropout": "row"}),
    "accumulated": (ByTokens, Ragged, {"dropout": "row", "accumulate": 3}),
    "a stream": (Small, partial(Streaming, ROWS, SIZE), {}),
}
PLACES = {
    "cpu": CPU(),
    "data_parallel-3": DataParallel(3, "cpu"),
    "ddp-2": DDP(2, "cpu"),
    "ddp-3": DDP(3, "cpu"),
    "fsdp-2": FSDP(2, "cpu"),
}


def trained(strategy: Strategy, name: str, **settings: Any) -> Any:
    task, data, own = KINDS[name]
    torch.manual_seed(0)
    made = fitted(task(), data(), strategy=strategy, **SETTINGS | own | settings)
    state = made.whole_state_dict(made.task)
    return deepcopy(state), made.metrics


def all_kinds(strategy: Strategy) -> Any:
    names = [name for name in KINDS if name != "workers" or strategy.world_size < 3]
    return {name: trained(strategy, name, micro_batch=2) for name in names}


@pytest.mark.parametrize("place", PLACES)
def test_a_batch_in_pieces_trains_as_one(place):
    for name, (state, metrics) in on(PLACES[place], all_kinds).items():
        wanted, numbers = trained(CPU(), name)
        for key, value in wanted.items():
            assert torch.allclose(state[key], value, rtol=0, atol=EXACT), (name, key)
        assert metrics == pytest.approx(numbers, rel=EXACT), name


class Sizes(Small):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any) -> Any:
        if self.training:
            self.seen.append(len(batch[0]))
        return super().training_step(batch)


def test_a_step_has_so_many_rows_at_most_and_hooks_of_a_batch_run_once():
    hooks = Hooks()
    given: dict[str, Any] = {"micro_batch": 3, "max_epochs": 1, "share_check": "off"}
    task = fitted(Sizes(), Rows(ROWS, SIZE), callbacks=[hooks], **given).task
    assert task.seen == [3, 3, 1] * 3 + [2]
    assert [name for name, _ in hooks.seen].count("on_batch_end") == 4


def test_a_batch_that_fits_is_computed_as_a_whole():
    task = fitted(Sizes(), Rows(ROWS, SIZE), micro_batch=SIZE, max_epochs=1, share_check="off").task
    assert task.seen == [7, 7, 7, 2]


def test_a_resume_within_an_epoch_goes_on_to_the_bit_in_pieces():
    states = []
    keep = Hooks(
        on_step_end=lambda t: t.global_step == 2 and states.append(deepcopy(t.state_dict()))
    )
    whole, _ = trained(CPU(), "ragged", micro_batch=2, callbacks=[keep])
    again, _ = trained(CPU(), "ragged", micro_batch=2, resume=states[0])
    assert is_same(again, whole)
    other, _ = trained(CPU(), "ragged", micro_batch=3, resume=states[0])
    assert all(torch.allclose(other[key], whole[key], rtol=0, atol=EXACT) for key in whole)


class Shards(ShardedStream):
    """Three, so that one rank has more rows than the other."""

    def shards(self) -> Any:
        return range(3)

    def read(self, shard: int) -> Any:
        train = Rows(39, SIZE).train
        return iter([train[row] for row in range(shard * 13, shard * 13 + 13)])


class DividedRows(Rows):
    def train_dataset(self) -> Any:
        return Shards()


def divided(strategy: Strategy, piece: int | None) -> Any:
    torch.manual_seed(0)
    data = DividedRows(20, SIZE)
    data.divide_streams = True
    return fitted(Small(), data, strategy=strategy, **SETTINGS, micro_batch=piece).task.state_dict()


def test_ranks_with_rows_of_their_own_have_as_many_pieces():
    cut, whole = (on(DDP(2, "cpu"), divided, piece) for piece in (2, None))
    assert all(torch.allclose(cut[key], whole[key], rtol=0, atol=EXACT) for key in whole)


# What can't be computed in pieces is one line


class Gathers(Small):
    def training_step(self, batch: Any) -> Any:
        x = self.all_gather(self.net(batch[0]))
        return {"loss": x.square().mean()}


class ByName(Small):
    """Losses that count other rows in each piece."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        error, some = (self.net(x)[:, 0] - y).square(), x[:, 0] > 0
        return {"loss": {"some": (error[some].mean(), some.sum()), "all": (error.mean(), len(x))}}


class Summed(Small):
    def training_step(self, batch: Any) -> Any:
        return {"loss": self.net(batch[0]).square().sum()}


def normed() -> Task:
    task = Small()
    task.net.insert(1, nn.BatchNorm1d(8))
    return task


THAWS = Hooks(on_epoch_start=lambda trainer: trainer.task.net[1].train(trainer.epoch > 0))
COUNTS = "losses by name gather what they count"
BY_ONE = "wants all rows of a batch, and trainer.micro_batch computes some at a time; "
REFUSED: list[tuple[Any, Any, str]] = [
    (Gathers, {"share_check": "off"}, f"Gathers.all_gather {BY_ONE}use trainer.micro_batch=null"),
    (
        ByName,
        {},
        f"{COUNTS}: ByName {BY_ONE}use trainer.micro_batch=null",
    ),
    (normed, {}, f"net.1, a BatchNorm, {BY_ONE}put it into evaluation mode, or use"),
    (normed, {"callbacks": [THAWS]}, f"net.1, a BatchNorm, {BY_ONE}put it into evaluation"),
    (Summed, {}, "depends on how its rows are shared .*, so pieces of a batch would train by ano"),
    (Small, {"micro_batch": 0}, "trainer.micro_batch=0 is out of range"),
]


@pytest.mark.parametrize(("make", "settings", "said"), REFUSED)
def test_what_wants_all_rows_is_refused(make, settings, said):
    with pytest.raises(UserError, match=said):
        fitted(make(), Rows(ROWS, SIZE), **{"micro_batch": 2, "max_epochs": 2} | settings)


def test_what_a_piece_has_of_its_own_is_told(caplog):
    made = trainer(Small(dropout=0.5), Rows(ROWS, SIZE), micro_batch=2)
    line = "1 Dropout layer sees each piece's rows alone: trainer.dropout=row"
    assert made.prepare().own == line
    assert trainer(Small(dropout=0.5), Rows(ROWS, SIZE)).prepare().own == ""
