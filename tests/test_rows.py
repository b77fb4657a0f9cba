"""What a step may ask of the other rows of its batch, and losses that are means of their own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from small import Adam, Rows, Small, fitted, is_same
from torch import Tensor
from torch.nn.functional import l1_loss
from torch.utils.checkpoint import checkpoint

from dpframe import Strategy, UserError, dropout_rows
from dpframe.rows import current_share
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU

THREE = partial(DataParallel, 3, "cpu")
SETTINGS = {"precision": "64", "max_epochs": 2, "share_check": "strict"}


def weights(kind: Any, strategy: Strategy, data: Any = Rows, **settings: Any) -> Any:
    torch.manual_seed(0)
    given = {**SETTINGS, **settings}
    trained = fitted(kind(), data(23, 7), strategy=strategy, **given)
    state = trained.task.state_dict()
    if strategy.sharding.cuts:
        state = strategy.sharding.whole(state)
    return state, trained.metrics


def in_rank(strategy: Strategy, kind: Any, settings: dict[str, Any]) -> Any:
    return weights(kind, strategy, **settings)


def alike(kind: Any, **settings: Any) -> None:
    """On all strategies."""
    state, metrics = weights(kind, CPU(), **settings)
    others = [weights(kind, THREE(), **settings)]
    others += [on(each, in_rank, kind, settings) for each in (DDP(2, "cpu"), FSDP(2, "cpu"))]
    for other, numbers in others:
        for name, weight in state.items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-12)
        assert numbers == pytest.approx(metrics, rel=1e-11)


# ---- random numbers of rows


class Noisy(Small):
    drawn: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.drawn = []

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        noise = self.randn_rows(*x.shape)
        self.drawn.append(noise)
        return {**super().training_step([x + noise, y]), "rate": self.rand_rows(len(x)).mean()}


def test_a_row_has_the_same_noise_on_any_number_of_replicas():
    alike(Noisy)


def test_rows_steps_epochs_and_draws_differ_and_a_validation_is_always_the_same():
    trained = fitted(Noisy(), Rows(8, 4), seed=5, max_epochs=3, sanity_batches=0)
    passes = [torch.stack(trained.task.drawn[at : at + 4]) for at in (0, 4, 8)]
    train, val = [drawn[:2] for drawn in passes], [drawn[2:] for drawn in passes]
    assert len(set(torch.stack(train).flatten().tolist())) == 3 * 8 * 3
    assert torch.equal(val[0], val[1]) and torch.equal(val[0], val[2])
    assert not torch.equal(val[0][0], val[0][1])
    again = fitted(Noisy(), Rows(8, 4), seed=6, max_epochs=1, sanity_batches=0)
    assert not torch.equal(again.task.drawn[0], passes[0][0])


class Turns(Noisy):
    def configure_optimizer(self) -> Any:
        return {f"layer{part}": Adam(self.net[part].parameters()) for part in (0, 3)}

    def training_step(self, batch: list[Tensor], turn: str) -> dict[str, Any]:  # type: ignore[override]
        return super().training_step(batch)

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return super().training_step(batch)


def test_turns_have_noise_of_their_own():
    one, other = fitted(Turns(), Rows(4, 4, val=False), max_steps=1).task.drawn
    assert not torch.equal(one, other)


def test_a_compiled_step_draws_the_same(monkeypatch):
    state, _ = weights(Noisy, CPU())
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled, _ = weights(Noisy, CPU(), compile=True)
    assert is_same(state, compiled)


def test_by_hand_there_is_noise_as_of_torch():
    task = Noisy()
    torch.manual_seed(3)
    expected = torch.randn(2, 3)
    torch.manual_seed(3)
    assert torch.equal(task.randn_rows(2, 3), expected)
    torch.manual_seed(3)
    assert torch.equal(task.randn_rows(torch.Size([2, 3])), expected)
    assert task.rand_rows(4, dtype=torch.float64).dtype == torch.float64


class OtherRows(Noisy):
    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": self.net(self.randn_rows(9, 3)).mean()}


@pytest.mark.parametrize("size", [(), ((),), (4.0, 3), ("x",), (torch.ones(4, 3),)])
def test_a_size_that_is_none_is_one_line(size):
    with pytest.raises(UserError, match="randn_rows got the size .*; pass whole numbers"):
        Noisy().randn_rows(*size)


def test_what_is_no_row_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"randn_rows was asked for 9 rows in a share of 4; make"):
        fitted(OtherRows(), max_steps=1)
    assert current_share.rows == 0
    trained = fitted(Noisy(), max_steps=1)
    with pytest.raises(UserError, match=r"Noisy.randn_rows was used outside of a step"):
        trained.task.randn_rows(4, 3)


class Penalised(Small):
    """Differentiates in its step what a checkpoint computes again, without the contexts."""

    def __init__(self, draw: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x = self.net(batch[0]).relu()
        block = partial(self.draw, self)
        y = checkpoint(lambda x: block(x).square(), x, use_reentrant=False)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return {"loss": slope.square().mean()}


@pytest.mark.parametrize(
    ("who", "draw"),
    [
        ("Penalised.randn_rows", lambda task, x: x * task.randn_rows(*x.shape)),
        ("Penalised.all_gather", lambda task, x: x + task.all_gather(x).mean()),
        ("dropout by row", lambda task, x: dropout_rows(x)),
    ],
)
def test_a_block_that_is_computed_again_within_a_step_is_not_drawn_or_gathered_anew(who, draw):
    """Its gradient would be of other numbers than its value."""
    with pytest.raises(UserError, match=f"{who} is computed again in the backward, where the step"):
        fitted(Penalised(draw), strategy=DataParallel(2, "cpu"), share_check="off", max_steps=1)


# ---- several denominators


class Detects(Small):
    """Every row counts for one loss, and the positive targets for another."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        given, found = self.net(x)[:, 0], y > 0.5
        box = l1_loss(given[found], y[found])  # NaN where there is none
        return {
            "loss": {"cls": ((given - y).square().mean(), len(x)), "box": (box, found.sum()[None])}
        }


def test_means_of_their_own_are_those_of_the_whole_batch_on_any_strategy():
    alike(Detects)
    alike(Detects, accumulate=2)


@pytest.mark.parametrize("size", [1, 5, 23])
@pytest.mark.parametrize("strategy", [CPU(), DataParallel(2, "cpu")], ids=["cpu", "parallel"])
def test_each_is_logged_as_the_mean_over_what_it_counts_in_any_batches(size, strategy):
    """A batch of which none counts has no part in it."""
    data = Rows(23)
    data.eval_batch_size = size
    trainer = fitted(Detects(), data, strategy=strategy, max_epochs=1)
    x, y = data.held_out.tensors
    with torch.no_grad():
        given, found = trainer.task.net(x)[:, 0], y > 0.5
    assert 0 < found.sum() < len(y)
    cls, box = (given - y).square().mean().item(), l1_loss(given[found], y[found]).item()
    expected = {"val/cls": cls, "val/box": box, "val/loss": cls + box}
    assert {name: trainer.metrics[name] for name in expected} == pytest.approx(expected)


def test_losses_by_name_in_some_batches_alone_are_one_line():
    class Sometimes(Detects):
        def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
            output = super().training_step(batch)
            is_even = self.global_step % 2 == 0
            return output if is_even else {"loss": output["loss"]["cls"][0]}

    with pytest.raises(UserError, match="^a step returned losses by name for some batches and one"):
        fitted(Sometimes(), max_steps=4)


class InAnyOrder(Detects):
    """As who goes over the kinds of targets that its rows have: each share has them in an order of
    its own, and without those that none of its rows has."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        errors, kinds = (
            (self.net(x)[:, 0] - y).square(),
            [(v > 0.3) + (v > 1.5) for v in y.tolist()],
        )
        of_kind = {kind: torch.tensor([each == kind for each in kinds]) for kind in kinds}
        means = {kind: errors[rows].mean() for kind, rows in of_kind.items()}
        return {"loss": {f"kind{kind}": (means[kind], kinds.count(kind)) for kind in means}}


def test_their_names_may_come_in_any_order_and_be_left_out():
    alike(InAnyOrder)


class OfTheFirst(Detects):
    """Has a loss of the batch's first row, which no share but the first one ever has."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        errors, is_first = (self.net(x)[:, 0] - y).square(), x[:, 0] == 0
        losses = {"all": (errors.mean(), len(x))}
        return {"loss": losses | ({"first": (errors[0], 1)} if is_first.any() else {})}


class FirstIsKnown(Rows):
    def __init__(self, rows: int = 23, batch_size: int = 7) -> None:
        super().__init__(rows, batch_size, shuffle=False)
        for each in (self.train, self.held_out):
            each.tensors[0][::batch_size, 0] = 0.0


def test_a_loss_of_one_share_alone_is_that_of_the_batch():
    alike(OfTheFirst, data=FirstIsKnown)


def test_more_names_than_a_share_sends_are_one_line(monkeypatch):
    losses = {f"kind{number}": (torch.ones(()), 1) for number in range(129)}
    monkeypatch.setattr(Small, "training_step", lambda task, batch: {"loss": losses})
    with pytest.raises(UserError, match="returned 129 losses by name; 128 is the limit"):
        fitted(Small(), max_steps=1)


def test_they_train_as_a_loop_by_hand_and_have_names():
    torch.manual_seed(0)
    trained = fitted(Detects(), Rows(12, 6, shuffle=False), strategy=THREE(), max_epochs=1)
    torch.manual_seed(0)
    task, data = Detects(), Rows(12, 6, shuffle=False)
    optimizer, losses = task.configure_optimizer(), []
    for first in (0, 6):
        x, y = data.train[first : first + 6]
        (cls, _), (box, _) = task.training_step([x, y])["loss"].values()
        optimizer.zero_grad()
        (cls + box).backward()
        optimizer.step()
        found = (y > 0.5).sum().item()
        losses.append((6, cls.item(), found, found * box.item()))
    assert all(map(torch.allclose, trained.task.parameters(), task.parameters()))
    rows, cls, found, box = zip(*losses, strict=True)
    cls, box = sum(cls) / len(rows), sum(box) / sum(found)
    numbers = {"train/cls": cls, "train/box": box, "train/loss": cls + box}
    assert {name: trained.metrics[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({"loss": {}}, "no loss in its dict of losses"),
        ({"loss": {"a": torch.ones(())}}, "the loss 'a' as a Tensor; return"),
        ({"loss": {"a": (torch.ones(2), 2)}}, "the loss 'a' as something other"),
        ({"loss": {"a": (torch.ones(()), "2")}}, "the count of 'a' as a str; return one number"),
        ({"loss": {"weight": (torch.ones(()), 2)}}, "a loss named 'weight'; use another name"),
        ({"loss": {1: (torch.ones(()), 2)}}, "a loss named 1; use another name"),
        ({"loss": {"a": (torch.ones(()), 2)}, "weight": 3}, "each of them has its own: leave"),
        ({"loss": {"a": (torch.ones(()), 2)}, "a": 3}, "'a' among its losses and beside them"),
    ],
)
def test_a_wrong_dict_of_losses_is_one_line(output, said, monkeypatch):
    monkeypatch.setattr(Small, "training_step", lambda task, batch: output)
    with pytest.raises(UserError, match=f"Small.training_step returned .*{said}"):
        fitted(Small(), max_steps=1)
