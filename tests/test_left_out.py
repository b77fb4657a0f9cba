"""A step that is left out leaves no trace, and too many of them end the run."""

import logging
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from small import SGD, Hooks, Rows, Small, fitted, is_same
from test_loss_guard import Bad
from test_rates import Noted
from test_turns import Pair
from torch import is_tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from dpframe.callbacks import EMA, SWA
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.data.module import mapped
from dpframe.errors import Failure, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP

STEEP = 1e6  # a target of a row whose loss has no slope, but NaN
BAD_ROW = 11


class Steep(Rows):
    """One row's loss is finite, and its gradients are not."""

    def __init__(self, **given: Any) -> None:
        super().__init__(shuffle=False, **given)
        x, y = self.train.tensors
        self.train = TensorDataset(x, y.index_fill(0, torch.tensor([BAD_ROW]), STEEP))


class Blank(Rows):
    """One row has no numbers."""

    def __init__(self, **given: Any) -> None:
        super().__init__(shuffle=False, **given)
        x, y = self.train.tensors
        self.train = TensorDataset(x.index_fill(0, torch.tensor([BAD_ROW]), torch.nan), y)


class Traced(Small):
    """Whatever a step may change of it."""

    def __init__(self, optimizer: Any = SGD, scheduler: Any = None) -> None:
        super().__init__(optimizer, scheduler)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("widest", torch.zeros(()))
        self.calls, self.seen, self.mean = 0, {"rows": []}, torch.zeros(3)

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        if self.training:
            self.calls += len(x)
            self.seen["rows"].append(x.mean())
            self.mean += x.detach().mean(dim=0)
            self.widest = torch.maximum(self.widest, x.abs().max())
            self.last = x
        error = self.net(self.norm(x))[:, 0] - y
        is_steep = y == STEEP
        loss = error[~is_steep].square().sum() / len(x)
        if is_steep.any():
            loss = loss + (0 * error[is_steep]).sum().abs().sqrt()
        return {"loss": loss}

    def traces(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("calls", "seen", "mean")}
        return mapped(plain, {**self.state_dict(), **own})


def plain(value: Any) -> Any:
    """Of a tensor, also one that is cut into parts, its numbers."""
    return getattr(value, "full_tensor", lambda: value)().tolist() if is_tensor(value) else value


def states(task: Any = Traced, callbacks: Any = (), **settings: Any) -> list[Any]:
    """Those after each step of one epoch, of which the third has the bad row, and what is left."""
    found: list[Any] = []
    keep = Hooks(on_step_end=lambda t: found.append(t.task.traces()))
    made = fitted(
        make=task,
        callbacks=[keep, *callbacks],
        **{"max_epochs": 1, "on_nonfinite": "skip", "share_check": "off", **settings},
    )
    assert (made.global_step, made.progress.skipped_steps) == (len(found), 1)
    return found


def in_ranks(strategy: Any, data: Any) -> list[Any]:
    return states(strategy=strategy, data=data())


@pytest.mark.parametrize("data", [Blank, Steep])
@pytest.mark.parametrize("place", ["cpu", "data_parallel", "ddp", "fsdp"])
def test_a_step_that_is_left_out_leaves_no_trace(place, data):
    if place == "cpu":
        found = states(data=data())
    elif place == "data_parallel":
        found = states(data=data(), strategy=DataParallel(2, "cpu"))
    else:
        strategy = {"ddp": DDP, "fsdp": FSDP}[place](2, "cpu")
        found = on(strategy, in_ranks, data)
    first, second, third, fourth, _ = found
    assert is_same(second, third)
    assert not any(is_same(second[name], value) for name, value in first.items())
    assert not any(
        is_same(fourth[name], value) for name, value in third.items() if "wid" not in name
    )
    assert "nan" not in repr(third)


def test_an_accumulated_step_is_left_out_as_a_whole():
    first, second = states(data=Steep(batch_size=2), accumulate=5)
    assert is_same(first, second)
    found = states(data=Steep(batch_size=2), accumulate=2)
    assert is_same(found[1], found[2]) and not is_same(found[0], found[1])


def test_metrics_of_torchmetrics_count_no_row_of_a_step_that_is_left_out():
    torchmetrics = pytest.importorskip("torchmetrics")

    class Judged(Traced):
        def __init__(self) -> None:
            super().__init__()
            self.error = torchmetrics.MeanSquaredError()
            self.kept = torchmetrics.CatMetric()
            self.both = torchmetrics.MetricCollection(
                [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()], prefix="m_"
            )

        def training_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            if self.training:
                self.error(x[:, 0], y)
                self.kept(y)
                self.both(x[:, 0], y)
            return super().training_step(batch)

    for data, settings in (
        (Steep(), {}),
        (Bad(shuffle=False), {}),
        (Steep(), {"logical_replicas": 2}),
    ):
        made = fitted(Judged(), data, on_nonfinite="skip", max_epochs=1, **settings)
        x, y = data.train[[row for row in range(20) if row // 4 != BAD_ROW // 4]]
        wanted = pytest.approx(float((x[:, 0] - y).square().mean()))
        assert made.metrics["train/error"] == made.metrics["train/m_MeanSquaredError"] == wanted


LBFGS = partial(torch.optim.LBFGS, lr=0.1, max_iter=4, history_size=3)


class Late(Traced):
    """Of the third step the third evaluation has a loss, or a slope, that is none."""

    def __init__(self, evaluations: list[int], *, is_steep: bool) -> None:
        super().__init__(LBFGS)
        self.evaluated = evaluations.append  # nobody puts back what a function does
        self.count = evaluations.__len__
        self.is_steep = is_steep

    def training_step(self, batch: Any) -> dict[str, Any]:
        loss = super().training_step(batch)["loss"]
        if self.training and self.global_step == 2:
            self.evaluated(1)
            if self.count() == 3:
                return {"loss": loss + (0 * loss).sqrt() if self.is_steep else loss * torch.nan}
        return {"loss": loss}


@pytest.mark.parametrize("is_steep", [False, True])
def test_an_optimizer_that_needs_a_closure_leaves_out_a_step_that_goes_wrong_on_its_way(is_steep):
    evaluations, learned = [], []
    made = Hooks(on_step_end=lambda t: learned.append(deepcopy(t.update.optimizer.state_dict())))
    task = partial(Late, evaluations, is_steep=is_steep)
    found = states(task, data=Rows(shuffle=False), callbacks=[made])
    assert len(evaluations) == 3
    assert is_same(found[1], found[2]) and is_same(learned[1], learned[2])
    assert not is_same(found[2], found[3]) and not is_same(learned[2], learned[3])


def test_an_optimizer_that_needs_a_closure_leaves_out_a_step_that_begins_wrong():
    found = states(partial(Traced, LBFGS), data=Steep())
    assert is_same(found[1], found[2]) and not is_same(found[2], found[3])


class Twice(Traced):
    is_spoilt = False

    def training_step(self, batch: Any) -> dict[str, Any]:
        output = super().training_step(batch)
        return {"loss": output["loss"] * torch.nan} if self.is_spoilt else output


def test_a_step_whose_gradients_can_not_be_computed_again_is_left_out():
    returned, kept = [], []

    def again(trainer: Any) -> None:
        trainer.task.is_spoilt = trainer.global_step == 2
        returned.append(trainer.recompute_gradients())
        trainer.task.is_spoilt = False

    def keep(trainer: Any) -> None:
        kept.append(deepcopy([trainer.task.state_dict(), trainer.update.optimizer.state_dict()]))

    task = Twice(partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    hooks = Hooks(on_before_step=again, on_step_end=keep)
    made = fitted(task, Rows(shuffle=False), callbacks=[hooks], on_nonfinite="skip", max_epochs=1)
    assert [each is None for each in returned] == [False, False, True, False, False]
    assert made.progress.skipped_steps == 1 and made.global_step == 5
    assert is_same(kept[1], kept[2]) and not is_same(kept[2], kept[3])


def test_one_of_several_turns_is_left_out_alone():
    class Blinks(Pair):
        def training_step(self, batch: Any, turn: str) -> dict[str, Any]:
            output = super().training_step(batch, turn)
            is_bad = self.training and turn == "critic" and self.global_step == 3
            return {**output, "loss": output["loss"] * torch.nan} if is_bad else output

    found: list[Any] = []
    average = EMA(0.5)
    keep = Hooks(on_step_end=lambda t: found.append(deepcopy(t.task.state_dict())))
    made = fitted(Blinks(), callbacks=[keep, average], on_nonfinite="skip")
    assert made.progress.skipped_steps == 1 and average.count == 1 + made.global_step
    changed = {
        name.split(".")[0] for name, value in found[3].items() if not is_same(found[2][name], value)
    }
    assert changed == {"generator"}


def test_averages_do_not_count_a_step_that_is_left_out():
    ema, kept = EMA(0.5), []
    keep = Hooks(on_step_end=lambda t: kept.append([a.clone() for a in ema.averages]))
    fitted(Traced(), Steep(), callbacks=[ema, keep], on_nonfinite="skip", max_epochs=1)
    assert ema.count == 1 + 4 and is_same(kept[1], kept[2])
    swa = SWA(start_epoch=0, every_n_steps=1)
    fitted(Traced(), Steep(), callbacks=[swa], on_nonfinite="skip", max_epochs=1)
    assert swa.count == 4


def test_a_schedule_by_step_counts_a_step_that_is_left_out():
    """So that it ends with the training."""
    halves = partial(StepLR, step_size=1, gamma=0.5)
    for data in (Blank(), Steep()):
        task = Traced(partial(Noted, lr=1e-3), halves)
        made = fitted(task, data, on_nonfinite="skip", max_epochs=1, scheduler_every="step")
        rates = [rate for (rate,) in made.update.optimizer.rates]
        assert rates == pytest.approx([1e-3, 5e-4, 1.25e-4, 6.25e-5])


def test_more_steps_in_a_row_than_the_limit_end_the_run_in_one_line(caplog):
    class Never(Traced):
        def training_step(self, batch: Any) -> dict[str, Any]:
            output = super().training_step(batch)
            is_over = self.training and self.global_step >= 2
            return {"loss": output["loss"] * (torch.nan if is_over else 1.0)}

    given = {"data": Rows(), "on_nonfinite": "skip", "max_epochs": 4}
    with pytest.raises(Failure) as caught:
        fitted(Never(), max_skipped_steps=4, **given)
    assert str(caught.value) == (
        "step 7: 5 steps in a row were left out, as their losses or gradients are not finite; "
        "look at their rows, lower task.optimizer.lr, or raise trainer.max_skipped_steps=4"
    )
    assert fitted(Never(), max_skipped_steps=None, **given).progress.skipped_steps == 18
    with pytest.raises(Failure, match="^step 13: 11 steps in a row were left out"):
        fitted(Never(), **given)
    with caplog.at_level(logging.WARNING, "dpframe"):
        fitted(Traced(), Steep(), on_nonfinite="skip", max_skipped_steps=1)  # each row comes twice
    assert "step 3: the loss is finite, and the norm of its gradients is nan; this" in caplog.text
    with pytest.raises(UserError, match="trainer.max_skipped_steps=0 is out of range"):
        fitted(max_skipped_steps=0)


def test_a_run_that_has_left_out_a_step_writes_its_checkpoints(tmp_path):
    keeper = Checkpoint(every_n_steps=1)
    fitted(Traced(), Blank(), callbacks=[keeper], on_nonfinite="skip", directory=tmp_path)
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
