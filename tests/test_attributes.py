"""Attributes that steps change are a part of a checkpoint: a resume goes on with them."""

from collections import Counter, deque
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forked import on
from small import Hooks, Rows, Small, fitted, is_same
from small import trainer as trainer_of
from torch import Tensor

from dpframe import Strategy
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP


class Recurrent(Small):
    """A hidden state, and one of every plain kind, decide the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.mean, self.steps = np.float32(0.0), 0
        self.queue: deque = deque(maxlen=2)
        self.kept: dict[str, Any] = {"sums": [], "pair": (0.0, 1.0)}
        self.count: Counter = Counter()
        self.table = np.zeros(3)
        self.draw = torch.Generator().manual_seed(3)
        self.draws = [torch.Generator().manual_seed(4)]
        self.window = torch.zeros(4)
        self.last = self.window[3:]  # a view
        self.back, self.large = np.zeros(2), 10**5000

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        output = self.net(x)[:, 0]
        state = self.hidden if self.hidden is not None else torch.zeros(())
        drawn = torch.rand((), generator=self.draw)
        past = sum(self.queue, torch.zeros(())) + float(self.mean) + sum(self.kept["sums"][-2:])
        past = past + torch.rand((), generator=self.draws[0]) + self.last.sum() + self.back.sum()
        self.window.add_(0.01)
        self.back, self.large = self.back[::-1] + 0.01, self.large + 1
        past = past + self.count["steps"] / 100 + float(self.table.sum()) + drawn
        self.hidden = (0.5 * state + 0.1 * output.mean()).detach()
        self.mean = np.float32(0.9 * self.mean + 0.01 * float(y.mean()))
        self.queue.append(0.01 * y.mean())
        self.kept["sums"].append(float(self.hidden))
        self.count["steps"] += 1
        self.table[1] += 0.001
        return {"loss": (output + 0.1 * state + past * 0.1 - y).square().mean()}

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return Small.training_step(self, batch)


def copied(trainer: Any) -> dict[str, Any]:
    return deepcopy(trainer.strategy.collectives.broadcast(trainer.state_dict()))


def resumed(strategy: Strategy) -> list[Any]:
    """Weights and attributes at the end, without a stop and with one within an epoch."""
    ends = []
    for stops in (False, True):
        torch.manual_seed(0)
        task, states = Recurrent(), []
        take = Hooks(on_step_end=lambda t, to=states: to.append(copied(t)))
        own = {"strategy": strategy, "share_check": "off", "max_epochs": 2}
        trainer = fitted(task, Rows(30, batch_size=6), callbacks=[take], **own)
        if stops:
            torch.manual_seed(0)
            task = Recurrent()
            trainer = fitted(task, Rows(30, batch_size=6), resume=states[2], **own)
        attributes = task.hidden, float(task.mean), list(task.queue), task.kept, dict(task.count)
        ends.append((trainer.task.state_dict(), attributes, task.table.tolist(), task.queue.maxlen))
    return ends


@pytest.mark.parametrize("where", ["data_parallel", "ddp"])
def test_a_resume_within_an_epoch_has_the_same_bits(where):
    ends = on(DDP(2, "cpu"), resumed) if where == "ddp" else resumed(DataParallel(1, "cpu"))
    assert is_same(*ends)


class Replayed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.buffer, self.outputs, self.weights = SimpleNamespace(rows=[]), [], [*self.parameters()]

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        output = super().training_step(batch)
        self.buffer.rows.append(len(batch[0]))
        self.outputs.append(output["loss"])  # with its graph
        return output


class Keeping(Replayed):
    def on_save(self, trainer: Any, state: dict[str, Any]) -> None: ...


class Scaled(Small):
    """The first batch decides the rest."""

    scale: float | None = None

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        if self.scale is None:
            self.scale = float(x.std()) + self.global_step
        return super().training_step([x / self.scale, y])


@pytest.mark.parametrize("is_same_trainer", [True, False])
def test_what_a_resume_loads_is_in_its_checkpoints_too_where_the_task_has_it_already(
    is_same_trainer,
):
    """In a notebook a fit that was stopped goes on with the same task."""
    stopped = fitted(Scaled(), max_steps=3)
    state = copied(stopped)
    if not is_same_trainer:
        stopped = trainer_of(stopped.task, max_steps=3)
    stopped.fit(state)
    for start in (state, copied(stopped)):
        again = fitted(Scaled(), resume=start)
        assert again.task.scale == stopped.task.scale


def test_what_can_not_be_kept_is_named_once(caplog):
    take = Hooks(on_step_end=lambda trainer: trainer.state_dict())
    fitted(Replayed(), callbacks=[take])
    (record,) = caplog.records
    assert record.message == (
        "Replayed has attributes that change in training and are not in checkpoints: buffer (a "
        "SimpleNamespace); make them numbers, tensors, or lists, dicts and deques of these, or "
        "keep them by on_save and on_load"
    )
    caplog.clear()
    fitted(Keeping(), callbacks=[take])
    assert caplog.records == []


def test_a_task_without_such_attributes_keeps_none():
    assert fitted(Small()).state_dict()["attributes"] == [{}]


def gathered(strategy: Strategy) -> Any:
    torch.manual_seed(0)
    own = {"strategy": strategy, "share_check": "off"}
    return fitted(Recurrent(), max_epochs=1, **own).state_dict()


def test_another_number_of_processes_goes_on_with_the_first_ones_and_says_so(caplog):
    state = on(DDP(2, "cpu"), gathered)
    assert state is None or len(state["attributes"]) == 2
    trainer = fitted(Recurrent(), resume=state, max_epochs=2, share_check="off")
    assert trainer.task.steps_per_epoch
    (line,) = (r.message for r in caplog.records if "not all is as it was" in r.message)
    assert "last, mean, queue, table, window of 2 processes there" in line
