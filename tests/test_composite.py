"""Optimizers that step together, each of its own groups, as one."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from forked import in_turn
from recorded import weights, weights_apart
from small import Hooks, Rows, Small, fitted, trainer
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Muon
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR
from torch.optim.optimizer import Optimizer

from dpframe import Strategy, UserError
from dpframe.callbacks.averages import EMA
from dpframe.composite import Composite
from dpframe.config.build import build
from dpframe.schedules import WarmupCosine
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP

MATRICES = {"match": ["net.*", "!1d"], "lr": 0.02}
NORMS = {"match": "LayerNorm", "weight_decay": 0.0}
BOTH = partial(AdamW, lr=0.01, groups={"matrices": partial(Muon, **MATRICES), "norms": NORMS})
CONFIG = {
    "_target_": "torch.optim.AdamW",
    "_partial_": True,
    "lr": 0.01,
    "groups": {"matrices": {"_target_": "torch.optim.Muon", **MATRICES}, "norms": NORMS},
}
SCHEDULE = WarmupCosine(warmup=2)


class Normed(Small):
    def __init__(self, optimizer: Any = BOTH, scheduler: Any = None) -> None:
        super().__init__(optimizer, scheduler)
        self.net.insert(1, nn.LayerNorm(8))
        self.lr_schedule = SCHEDULE if scheduler is None else None


def said(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def by_hand(task: Normed, epochs: int = 3) -> dict[str, Tensor]:
    """Two optimizers with their own schedules after one backward, whose gradients are clipped
    together."""
    norm = [*task.net[1].parameters()]
    rest = [task.net[0].bias, task.net[-1].bias]
    adam = AdamW([{"params": rest}, {"params": norm, "weight_decay": 0.0}], lr=0.01, fused=True)
    muon = Muon([weight for weight in task.parameters() if weight.ndim == 2], lr=0.02)
    factor = partial(SCHEDULE.factor, steps=5 * epochs)
    schedules = [LambdaLR(optimizer, factor) for optimizer in (adam, muon)]
    data = Rows(shuffle=False)
    for _ in range(epochs):
        for start in range(0, 20, 4):
            loss = task.training_step([column[start : start + 4] for column in data.train.tensors])
            loss["loss"].backward()
            nn.utils.clip_grad_norm_(task.parameters(), 0.5)
            for optimizer in (adam, muon):
                optimizer.step()
                optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()
    return task.state_dict()


RUN: dict[str, Any] = {"max_epochs": 3, "clip_norm": 0.5}


@pytest.mark.parametrize("make", [BOTH, build(CONFIG, "task.optimizer")], ids=["python", "config"])
def test_two_that_step_together_equal_two_by_hand_to_the_bit_also_after_a_resume(make):
    torch.manual_seed(3)
    task = Normed(make)
    wanted = by_hand(deepcopy(task))
    states: list[Any] = []
    save = Hooks(on_step_end=lambda t: states.append(deepcopy(t.state_dict())))
    whole = fitted(deepcopy(task), Rows(shuffle=False), callbacks=[save], **RUN)
    assert weights_apart(whole.task.state_dict(), wanted) == 0
    for state in states[:-1:3]:
        again = fitted(Normed(make), Rows(shuffle=False), resume=deepcopy(state), **RUN)
        assert weights_apart(again.task.state_dict(), wanted) == 0
        one, other = again.state_dict(), whole.state_dict()
        assert str(one["optimizer"]) == str(other["optimizer"])


def test_its_groups_have_names_rates_and_fused_kernels():
    seen: dict[str, float] = {}
    watch = Hooks(on_step_end=lambda t: seen.update(t.updates.learning_rates()))
    made = fitted(Normed(), callbacks=[watch], log_every=1)
    [optimizer] = [update.optimizer for update in made.updates.values()]
    assert isinstance(optimizer, Composite)
    assert [type(part) for part in optimizer.parts] == [AdamW, Muon]
    assert [group.get("name") for group in optimizer.param_groups] == [None, None, "matrices"]
    assert [group.get("fused") for group in optimizer.param_groups] == [True, True, None]
    assert seen.keys() == {"lr", "lr/matrices"}
    assert seen["lr/matrices"] == 2 * seen["lr"]


@pytest.mark.parametrize("more", [{}, {"callbacks": [EMA(0.9)]}, {"precision": "fp16"}])
def test_a_resume_within_an_epoch_goes_on_to_the_bit(more):
    states: list[Any] = []
    save = Hooks(on_step_end=lambda t: states.append(deepcopy(t.state_dict())))
    callbacks = more.get("callbacks", [])
    whole = fitted(Normed(), **{**more, "callbacks": [*callbacks, save]}, scheduler_every="step")
    again = fitted(Normed(), resume=states[6], **deepcopy(more), scheduler_every="step")
    assert weights_apart(weights(again.task), weights(whole.task)) == 0


# ---- strategies


def trained(strategy: Strategy) -> dict[str, Tensor]:
    made = fitted(Normed(), strategy=strategy, precision="64", **RUN)
    return {name: weight.detach().clone() for name, weight in made.task.state_dict().items()}


def test_ranks_and_replicas_have_the_same_curve():
    [cpu] = in_turn([(Strategy(), trained)])
    for strategy in (DataParallel(3, "cpu"), DDP(2, "cpu")):
        [other] = in_turn([(strategy, trained)])
        assert weights_apart(cpu, other) < 1e-12


class Subclass(Muon):
    """As a user may write one."""


SPLIT = partial(AdamW, groups={"head": partial(SGD, match="net.4", lr=0.1, momentum=0.9)})
WHOLE = {
    "Muon": BOTH,
    "Subclass": partial(AdamW, groups={"a": partial(Subclass, match=["net.*", "!1d"])}),
}


def sharded(strategy: Strategy) -> tuple[dict[str, Tensor], dict[str, str]]:
    made = fitted(Normed(SPLIT), strategy=strategy, precision="64", **RUN)
    state = made.whole_state_dict()
    lines = {}
    for name, make in WHOLE.items() if strategy.sharding.cuts else ():
        try:
            fitted(Normed(make), strategy=strategy)
        except UserError as error:
            lines[name] = str(error)
    return {name: weight.detach().clone() for name, weight in state.items()}, lines


def test_on_shards_parts_step_alike_and_one_that_needs_whole_matrices_is_refused():
    [(cpu, _)] = in_turn([(Strategy(), sharded)])
    [(state, lines)] = in_turn([(FSDP(2, "cpu"), sharded)])
    assert weights_apart(cpu, state) < 1e-12
    assert lines == {
        name: f"{name} needs whole weights in each process, and FSDP cuts them; use strategy=ddp, "
        "or another optimizer"
        for name in WHOLE
    }


# ---- what is refused


def test_what_can_not_step_together_is_one_line():
    closure = partial(AdamW, groups={"a": partial(LBFGS, match="net.0")})
    assert said(trainer(Small(closure)).prepare) == (
        "AdamW and LBFGS step together, and LBFGS computes the gradients of a step several times; "
        "use another optimizer in its place"
    )
    for schedule in (
        partial(OneCycleLR, max_lr=[0.1, 0.1, 0.2], total_steps=9),
        partial(CyclicLR, base_lr=[0.1, 0.1, 0.2], max_lr=0.3),
    ):
        kind = schedule.func.__name__
        assert said(trainer(Normed(BOTH, schedule)).prepare) == (
            f"task.scheduler: {kind} cycles one momentum, and AdamW and Muon have others each; set "
            "task.scheduler.cycle_momentum=false"
        )
        trainer(Normed(BOTH, partial(schedule, cycle_momentum=False))).prepare()


def test_a_group_that_names_an_optimizer_is_checked_in_a_line():
    def line(**groups: Any) -> str:
        node = {**CONFIG, "groups": groups}
        return said(lambda: Normed(build(node, "task.optimizer")).configure_optimizer())

    muon = {"_target_": "torch.optim.Muon", "match": ["net.*", "!1d"]}
    key = "task.optimizer.groups"
    assert line(a={**muon, "match": "net.0"}).startswith(
        f"{key}.a: Muon says: Muon only supports 2D parameters whereas we found a parameter with s"
    )
    assert line(a=muon, b={**muon, "match": "net.0.weight"}) == (
        f"{key}.a and b name an optimizer each, and net.0.weight is in both; leave it out of one: "
        "match: [..., '!net.0.weight']"
    )
    assert line(a=muon, b={"match": "net.4", "betas": [0.8, 0.9]}).startswith(
        f"{key}.b.betas: Muon has no such option for a group; "
    )
    assert line(a={"_target_": "torch.optim.Muon"}).startswith(f"{key}.a has no match; name its")
    assert line(a={"_target_": "torch.nn.Identity", "match": "net.0"}).startswith(f"{key}: Identit")
    assert line(a={"_target_": "torch.optim.Muon", "match": "net.0", "betas": 1}).startswith(
        f"{key}.a.betas: Muon takes no such argument; "
    )
    own = Normed(BOTH)
    assert said(own.parameter_groups, BOTH.keywords["groups"]) == (
        "groups.matrices names an optimizer of its own; such groups are for task.optimizer"
    )


def test_without_a_rest_there_is_one_optimizer_alone():
    groups = {"a": partial(SGD, match="*", lr=0.1), "b": {"match": "net.0", "lr": 0.2}}
    optimizer: Optimizer = Small(partial(AdamW, groups=groups)).configure_optimizer()
    assert type(optimizer) is SGD
    rates = [(group["name"], group["lr"]) for group in optimizer.param_groups]
    assert rates == [("b", 0.2), ("a", 0.1)]
