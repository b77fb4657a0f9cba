"""Weights that are frozen, thawed and averaged, beside a loop by hand; and their resumes."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from recorded import Recorder, once, weights, weights_apart
from small import Rows, fitted, trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from dpframe import Callback, Strategy, Task, UserError
from dpframe.callbacks.freeze import Freeze
from dpframe.data import permutation
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU

EXACT = 1e-12
GROUPS = {
    "backbone": {"match": "net.backbone", "lr": 0.003},
    "vectors": {"match": "1d", "weight_decay": 0.0},
}
AdamW = partial(torch.optim.AdamW, lr=0.03, weight_decay=0.1, groups=GROUPS)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Tuned(Task):
    """The statistics of its norm are not those of its data: training them shows."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(nn.Sequential(), optimizer)
        norm = nn.BatchNorm1d(4)
        for part in (norm.bias, norm.running_mean, norm.num_batches_tracked):
            nn.init.constant_(part, 2)
        self.net.add_module("backbone", nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh()))
        self.net.add_module("head", nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        return {"loss": (self.net(x)[:, 0] - y).square().mean()}


def norm_alone() -> Freeze:
    return Freeze("net.backbone.1")


# An epoch has five steps. The optimizer, the callbacks, and when the linear layer is trained.
CASES: dict[str, tuple[Any, Any, Any]] = {
    "frozen": (AdamW, lambda: [Freeze("net.backbone")], lambda epoch, step: False),
    "thawed at an epoch": (
        SGD,
        lambda: [norm_alone(), Freeze("net.backbone.0", thaw_at_epoch=2)],
        lambda epoch, step: epoch >= 2,
    ),
    "thawed within an epoch": (
        AdamW,
        lambda: [Freeze("*backbone*", thaw_at_step=7), Freeze(["*", "!*0*", "!net.head"])],
        lambda epoch, step: step >= 7,
    ),
}
SETTINGS: dict[str, Any] = {"max_epochs": 4, "precision": "64", "validate_every_steps": 3}
ROWS = partial(Rows, 18)


@once
def by_hand(name: str) -> dict[str, Any]:
    make, _, is_trained = CASES[name]
    torch.manual_seed(0)
    task = Tuned(make).double()
    if make is AdamW:
        linear, norm = task.net.backbone[0], task.net.backbone[1]
        groups = [
            {"params": [linear.weight], "lr": 0.003},
            {"params": [linear.bias, *norm.parameters()], "lr": 0.003, "weight_decay": 0.0},
            {"params": [task.net.head.weight]},
            {"params": [task.net.head.bias], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.03, weight_decay=0.1)
    else:
        optimizer = make(task.parameters())
    x, y = (column.double() for column in ROWS().train.tensors)
    step = 0
    for epoch in range(4):
        for rows in permutation(18, seed=0, epoch=epoch).split(4):
            task.net.backbone.requires_grad_(False)
            task.net.backbone[0].requires_grad_(is_trained(epoch, step))
            task.net.backbone[1].eval()
            task.training_step([x[rows], y[rows]])["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return weights(task)


class Saved(Callback):
    """The states that checkpoints of all steps would hold."""

    runs_last = True

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_step_end(self, trainer):
        self.states.append(trainer.strategy.share(deepcopy(trainer.state_dict())))


def tuned(strategy: Strategy, name: str, *more: Callback, **settings: Any) -> Any:
    make, callbacks, _ = CASES[name]
    return fitted(
        make=partial(Tuned, make),
        data=ROWS(),
        strategy=strategy,
        callbacks=[*callbacks(), *more],
        **{**SETTINGS, **settings},
    ).task


def with_resumes(strategy: Strategy, name: str) -> tuple[dict[str, Any], list[int]]:
    """The weights, and the steps from which a resume ends with others."""
    saved = Saved()
    whole = weights(tuned(strategy, name, saved))
    apart = [
        step
        for step in (6, 7, 9, 10)
        if weights_apart(weights(tuned(strategy, name, resume=saved.states[step - 1])), whole)
    ]
    return whole, apart


def all_of_them(strategy: Strategy) -> dict[str, Any]:
    return {name: with_resumes(strategy, name) for name in CASES}


@once
def on_place(place: str) -> dict[str, Any]:
    kind, _, count = place.partition("-")
    kinds = {"cpu": CPU, "data_parallel": partial(DataParallel, int(count or 1), "cpu")}
    return on(kinds.get(kind, partial(DDP, 2, "cpu"))(), all_of_them)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", ["cpu", "data_parallel-3", "ddp-2"])
def test_frozen_and_thawed_weights_are_those_by_hand_and_resume_to_the_bit(place, name):
    mine, apart = on_place(place)[name]
    assert weights_apart(mine, by_hand(name)) < EXACT
    assert apart == []


def test_rates_are_logged_by_group_and_a_changed_one_goes_on_in_proportion():
    """Its own schedule halves each rate after every epoch."""

    def run(resume: Any = None, rate: float = 0.03, **own: float) -> dict[str, float]:
        groups = {**GROUPS, "backbone": {**GROUPS["backbone"], **own}}
        recorder = Recorder()
        task = Tuned(partial(AdamW, lr=rate, groups=groups))
        task.make_scheduler = partial(StepLR, step_size=1, gamma=0.5)
        one = trainer(task, ROWS(), callbacks=[saved], loggers=[recorder], max_epochs=2)
        one.fit(resume, resume_anyway=True)
        *_, (_, last) = recorder.log_
        return {name: rate for name, rate in last.items() if "/lr" in name}

    saved = Saved()
    rates = {"progress/lr": 0.015, "progress/lr/backbone": 0.0015}
    assert run() == pytest.approx(rates)
    state = saved.states[6]  # in the second epoch
    assert run(deepcopy(state), rate=0.3) == pytest.approx({**rates, "progress/lr": 0.15})
    assert run(deepcopy(state), weight_decay=0.2) == pytest.approx(rates)
    assert run(state, lr=0.03) == pytest.approx({**rates, "progress/lr/backbone": 0.015})


@pytest.mark.parametrize(
    ("freeze", "line"),
    [
        (lambda: Freeze(), ".patterns is not set; name what to freeze, e.g. net.backbone"),
        (lambda: Freeze("net.bakbone"), ".patterns=net.bakbone matches no parameter; did you mean "
            "net.backbone?"),
        (lambda: Freeze("*"), ".patterns=* leaves nothing to train; leave out a part, e.g. "
            "patterns=['*','!net.head']"),
        (lambda: Freeze("net", thaw_at_step=0), ".thaw_at_step=0; set 1 or more, or null"),
    ],
)  # fmt: skip
def test_what_can_not_be_frozen_is_one_line(freeze, line):
    with pytest.raises(UserError) as caught:
        fitted(Tuned(SGD), callbacks=[freeze()])
    assert str(caught.value) == f"callbacks.freeze{line}"
