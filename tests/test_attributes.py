"""Attributes that steps change are a part of a checkpoint: a resume goes on with them."""

import json
import sys
from collections import Counter, deque
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command import dpframe as command
from command import write
from forked import on
from small import Hooks, Rows, Small, fitted, is_same
from small import trainer as trainer_of
from torch import Tensor

from dpframe import Strategy, UserError, checkpoint, load
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.trainer.resume.attributes import Attributes

WITH = ["--config-dir", "conf"]


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
        self.seen: set = set()
        self.window = torch.zeros(4)
        self.last = self.window[3:]  # a view
        self.back, self.large = np.zeros(2), 10**5000

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        output = self.net(x)[:, 0]
        state = self.hidden if self.hidden is not None else torch.zeros(())
        past = sum(self.queue, torch.zeros(())) + float(self.mean) + sum(self.kept["sums"][-2:])
        past = past + self.last.sum() + self.back.sum() + 0.001 * len(self.seen)
        self.window.add_(0.01)
        self.back, self.large = self.back[::-1] + 0.01, self.large + 1
        past = past + self.count["steps"] / 100 + float(self.table.sum())
        self.hidden = (0.5 * state + 0.1 * output.mean()).detach()
        self.mean = np.float32(0.9 * self.mean + 0.01 * float(y.mean()))
        self.queue.append(0.01 * y.mean())
        self.kept["sums"].append(float(self.hidden))
        self.count["steps"] += 1
        self.table[1] += 0.001
        self.seen.update(np.arange(len(self.seen), len(self.seen) + 2))  # numbers of NumPy's
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
        self.draw = torch.Generator().manual_seed(3)
        self.buffer, self.outputs, self.weights = SimpleNamespace(rows=[]), [], [*self.parameters()]

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        output = super().training_step(batch)
        self.buffer.rows.append(len(batch[0]))
        torch.rand((), generator=self.draw)
        vars(self.net)["theirs"] = object()  # a library's module has its own reasons
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


def test_what_torchmetrics_keeps_in_a_collection_is_no_attribute_of_the_task():
    """Else a resume on other replicas names it as a change."""
    torchmetrics = pytest.importorskip("torchmetrics")
    task = Small()
    task.judged = torchmetrics.MetricCollection(
        [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()]
    )
    kept = Attributes(task)
    task.judged.update(torch.ones(3), torch.zeros(3))
    assert kept.state_dict() == {}


def test_what_can_not_be_kept_is_named_once(caplog):
    take = Hooks(on_step_end=lambda trainer: trainer.state_dict())
    fitted(Replayed(), callbacks=[take])
    (record,) = caplog.records
    assert record.message == (
        "Replayed has attributes that change in training and are not in checkpoints: draw (a "
        "Generator), buffer (a SimpleNamespace); make them numbers, tensors, or lists, dicts and "
        "deques of these, or keep them by on_save and on_load"
    )
    caplog.clear()
    fitted(Keeping(), callbacks=[take])
    assert caplog.records == []


LARGE: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a vocabulary": ({f"word{n}": n for n in range(1000)}, lambda large: large.update(word7=8)),
    "counts": (Counter(range(1000)), lambda large: large.update([7])),
    "rows": ([[n, {"at": (n, 0.5)}] for n in range(1000)], lambda large: large[7].append(1)),
    "a queue": (deque(range(1000)), lambda large: large.append(1)),
    "a set": ({*range(1000)}, lambda large: large.add(1000)),
    "arrays": ([np.zeros(2) for _ in range(1000)], lambda large: large[7].fill(1)),
    "tensors": ([torch.zeros(2) for _ in range(1000)], lambda large: large[7].fill_(1)),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_change_within_a_large_attribute_is_kept_and_none_keeps_nothing(kind):
    large, change = LARGE[kind]
    task = Small()
    task.large = deepcopy(large)
    attributes = Attributes(task)
    assert attributes.state_dict() == {}
    change(task.large)
    assert list(attributes.state_dict()[""]) == ["large"]


def test_plain_entries_of_a_large_attribute_are_remembered_as_one_number():
    task = Small()
    task.large = LARGE["a vocabulary"][0]
    mark = Attributes(task)._before["", "large"]
    assert mark[0] is dict and isinstance(mark[1], int)


def test_a_task_without_such_attributes_keeps_none():
    assert fitted(Small()).state_dict()["attributes"] == [{}]


def gathered(strategy: Strategy) -> Any:
    torch.manual_seed(0)
    own = {"strategy": strategy, "share_check": "off"}
    return fitted(Recurrent(), max_epochs=1, **own).state_dict()


def kept_scale(strategy: Strategy) -> list[Any]:
    made = fitted(Scaled(), strategy=strategy, share_check="off", max_steps=3)
    state = made.strategy.collectives.broadcast(made.state_dict())
    again = fitted(Scaled(), strategy=strategy, share_check="off", max_steps=4, resume=state)
    return [each[""]["scale"] for each in state["attributes"]] + [again.task.scale]


def test_a_sharded_task_keeps_its_attributes_too():
    first, second, after = on(FSDP(2, "cpu"), kept_scale)
    assert first == after != second


def test_another_number_of_processes_goes_on_with_the_first_ones_and_says_so(caplog):
    state = on(DDP(2, "cpu"), gathered)
    assert state is None or len(state["attributes"]) == 2
    trainer = fitted(Recurrent(), resume=state, max_epochs=2, share_check="off")
    assert trainer.task.steps_per_epoch
    (line,) = (r.message for r in caplog.records if "not all is as it was" in r.message)
    assert "last, mean, queue, seen, table, window of 2 processes there" in line


MEAN = """
import dpframe
from torch import nn

class Mean(dpframe.Task):
    # Its guess is a running mean that a step keeps as a plain attribute.
    def __init__(self, optimizer):
        super().__init__(nn.Linear(13, 1), optimizer)
        self.mean = 0.0
    def training_step(self, batch):
        x, y = batch
        self.mean = 0.9 * self.mean + 0.1 * float(y.mean())
        return self.validation_step(batch)
    def validation_step(self, batch):
        x, y = batch
        return {"loss": (0.001 * self.net(x) + self.mean - y).square().mean()}
    def predict_step(self, batch):
        return self.net(batch[0]) * 0 + self.mean
"""
RECIPE = """
# @package _global_
task:
  _target_: running_mean.Mean
  optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.01}
data: {_target_: dpframe.recipes.boston.BostonData}
trainer: {max_epochs: 2}
"""


@pytest.fixture(scope="module")
def mean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mean")
    write(folder, {"running_mean.py": MEAN, "conf/recipe/mean.yaml": RECIPE})
    done = command(*WITH, "recipe=mean", "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("strategy", ["cpu", "ddp"])
def test_an_evaluation_has_the_attributes_of_its_checkpoint(mean, strategy):
    of_run = json.loads((mean / "run/summary.json").read_text())["metrics"]
    run = ["mode=validate", "checkpoint=run/checkpoints/last.ckpt", f"hydra.run.dir={strategy}"]
    run += [f"strategy={strategy}", *["trainer.gpus=2"][: strategy == "ddp"]]
    done = command(*WITH, *run, cwd=mean)
    assert done.returncode == 0, done.stderr
    measured = json.loads((mean / strategy / "summary.json").read_text())["metrics"]
    assert measured["val/loss"] == pytest.approx(of_run["val/loss"], rel=1e-6)


def test_a_loaded_task_has_the_attributes_of_its_checkpoint(mean, monkeypatch):
    monkeypatch.chdir(mean)
    monkeypatch.setattr(sys, "path", [*sys.path])
    task = load(mean / "run/checkpoints/last.ckpt", config_dir="conf")
    sys.modules.pop("running_mean")
    state = checkpoint.load(mean / "run/checkpoints/last.ckpt")
    assert task.mean == state["attributes"][0][""]["mean"] > 10


def test_a_run_that_begins_with_weights_has_no_attributes_of_theirs(mean):
    run = ["recipe=mean", "checkpoint=run/checkpoints/last.ckpt", "hydra.run.dir=again"]
    again = command(*WITH, *run, "trainer.max_epochs=1", cwd=mean)
    assert again.returncode == 0, again.stderr
    means = [
        checkpoint.load(mean / f"{name}/checkpoints/last.ckpt")["attributes"][0][""]["mean"]
        for name in ("run", "again")
    ]
    assert means[1] < means[0]


@pytest.mark.parametrize(
    "module, key",
    [("", "training_step"), ("", "net"), ("", "_buffers"), ("", "device"), ("", "a b")],
)
def test_a_file_can_not_set_what_is_no_attribute_of_the_users(module, key, caplog):
    state = fitted(Scaled(), max_steps=3).state_dict()
    state["attributes"] = [{module: {key: {}}}]
    with pytest.raises(UserError, match="has what this run would not have written: ValueError"):
        fitted(Scaled(), resume=state)


def test_a_file_can_not_set_what_torchs_modules_have():
    state = fitted(Small(), max_steps=3).state_dict()
    state["attributes"] = [{"net.2": {"p": 0.5}}]
    assert fitted(Small(), resume=state).task.net[2].p == 0.0
