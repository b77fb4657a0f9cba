"""Gradients that the ranks would not share: told before an update is made of them."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on
from recorded import once
from small import Hooks, Rows, Small, fitted
from torch import Tensor

from dpframe import Strategy, Trainer, UserError
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU


class Partly(Small):
    """Leaves its second layer out of a forward, on one rank or on all."""

    def __init__(self, leaves_out: int, rank: int | None) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.05, momentum=0.9))
        self.leaves_out = leaves_out if rank in (None, dist.get_rank()) else 0
        self.forwards = 0

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        self.forwards += 1
        out = self.net[0](x) if self.forwards == self.leaves_out else self.net(x)
        return {"loss": (out[:, 0] - y).square().mean()}


def partly(leaves_out: int, rank: int | None = None) -> Callable[[], Partly]:
    return partial(Partly, leaves_out, rank)


def thaw(trainer: Trainer) -> None:
    trainer.task.net[0].requires_grad_(trainer.global_step >= 2)


def freeze(trainer: Trainer) -> None:
    trainer.task.net[0].bias.requires_grad_(trainer.global_step < 2)


class ThawingInItsStep(Small):
    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.05))
        self.net[0].requires_grad_(False)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        self.net[0].requires_grad_(self.global_step == 2)
        return super().training_step(batch)


class Thawing(Small):
    """Its optimiser is ready for what is frozen yet."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.05))
        self.net[0].requires_grad_(False)

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Hooked(Small):
    """A hook of a weight gives another gradient, of each share's a part."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: 0.1 * gradient)


def hooked(strategy: Strategy) -> Any:
    torch.manual_seed(0)  # here, as a hook is not sent to a rank
    made = fitted(Hooked(), Rows(9, 4), strategy=strategy, precision="64", share_check="strict")
    return made.task.state_dict()


def test_a_hook_of_a_weight_gets_a_gradient_also_of_a_share_without_rows():
    wanted, found = hooked(CPU()), on(DDP(2, "cpu"), hooked)
    assert all(torch.allclose(found[key], wanted[key], rtol=0, atol=1e-12) for key in wanted)


def hook_refused(strategy: Strategy) -> str:
    with pytest.raises(UserError) as caught:
        hooked(strategy)
    return str(caught.value)


def test_a_hook_that_copies_of_a_weight_would_not_have_is_refused():
    line = "net.0.weight has a hook, which the {} would not have; "
    with pytest.raises(UserError, match=line.format("ranks that this program starts")):
        Trainer(Hooked(), Rows(), gpus=2, accelerator="cpu", max_epochs=1).fit()
    if torch.__version__ >= "2.13":
        assert on(FSDP(2, "cpu"), hook_refused).startswith(
            line.format("parts that strategy=fsdp makes of it")
        )


UNUSED = (
    "no gradient in this step on rank {rank}: net.3.weight, net.3.bias; the ranks can't share "
    "theirs; set strategy.find_unused_parameters=true where a step may leave out parameters"
)
# A task, settings of the trainer, options of ddp, and what is said in the third step.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any], str]] = {
    "unused at the last step": (partly(3), {}, {}, UNUSED),
    "unused in an update's last batch": (partly(6), {"accumulate": 2}, {}, UNUSED),
    "thawed within a step": (
        ThawingInItsStep,
        {},
        {},
        "thawed within this step: net.0.weight, net.0.bias; the ranks don't share these gradients; "
        "set requires_grad in a hook, e.g. on_epoch_start, not in training_step",
    ),
}
# A task and settings, trained alike on all ranks though what is frozen changes.
CHANGING: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "frozen in between": (Small, {"callbacks": [Hooks(on_step_end=freeze)]}),
    "thawed in between": (Thawing, {"callbacks": [Hooks(on_step_end=thaw)]}),
    "thawed under accumulation": (
        Thawing,
        {"callbacks": [Hooks(on_step_end=thaw)], "accumulate": 2},
    ),
}


def outcome(strategy: DDP, name: str) -> Any:
    """What it was refused with, and the updates made; the weights of each rank where it was not."""
    make, settings, options, _ = CASES[name] if name in CASES else (*CHANGING[name], {}, "")
    before = dict(getattr(strategy, "options", {}))
    strategy.options = before | options
    updates: list[int] = []
    callbacks = [
        Hooks(on_step_end=lambda trainer: updates.append(trainer.global_step)),
        *settings.get("callbacks", ()),
    ]
    settings = {**settings, "callbacks": callbacks, "precision": "64", "max_steps": 3}
    torch.manual_seed(0)
    try:
        one = fitted(make(), Rows(30, 5, val=False), strategy=strategy, **settings)
    except UserError as error:
        return str(error), updates
    finally:
        strategy.options = before
    return strategy.collectives.gather([p.detach().numpy().copy() for p in one.task.parameters()])


def all_of_them(strategy: DDP) -> list[dict[str, Any]]:
    found = {name: outcome(strategy, name) for name in (*CASES, *CHANGING)}
    strategy.options["find_unused_parameters"] = True
    found |= {f"{name}, found": outcome(strategy, name) for name in ALLOWED}
    return strategy.collectives.gather(found)


ALLOWED = ["unused at the last step", "unused in an update's last batch"]


@once
def by_ranks() -> list[dict[str, Any]]:
    return on(DDP(2, "cpu"), all_of_them)


@pytest.mark.parametrize("name", CASES)
def test_gradients_that_would_not_be_shared_are_told_before_their_update(name):
    for rank, found in enumerate(by_ranks()):
        assert found[name] == (CASES[name][-1].format(rank=rank), [1, 2])


@pytest.mark.parametrize("name", ALLOWED)
def test_what_find_unused_parameters_allows_is_trained_alike_on_all_ranks(name):
    first, second = by_ranks()[0][f"{name}, found"]
    assert all((mine == other).all() for mine, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", CHANGING)
def test_weights_that_are_thawed_or_frozen_in_between_are_trained_as_on_one_replica(name):
    (alone,) = outcome(CPU(), name)
    for weights in by_ranks()[0][name]:
        for mine, other in zip(weights, alone, strict=True):
            assert abs(mine - other).max() < 1e-12


def apart(strategy: DDP) -> None:
    fitted(partly(3, rank=1)(), Rows(30, 5, val=False), strategy=strategy, max_steps=3)


def test_a_rank_that_alone_leaves_a_parameter_out_ends_the_job_with_its_line():
    """At once: the other rank would wait for it for longer than a test may take."""
    with pytest.raises(UserError) as caught:
        on(DDP(2, "cpu", timeout_seconds=600), apart)
    assert str(caught.value) == UNUSED.format(rank=1)


# Ranks that do not do the same


def thaw_otherwise(trainer: Trainer) -> None:
    name = ("weight", "bias")[trainer.strategy.rank]
    getattr(trainer.task.net[0], name).requires_grad_(trainer.global_step >= 2)


def thaw_later(trainer: Trainer) -> None:
    trainer.task.net[0].requires_grad_(trainer.global_step >= 2 + trainer.strategy.rank)


class GathersAlone(Small):
    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        if self.rank == 0 or self.global_step < 2:
            self.all_gather(batch[0])
        return super().training_step(batch)


def differently(strategy: DDP, make: Any, hook: Any, folder: Path) -> None:
    callbacks = [Hooks(on_step_end=hook)] if hook else []
    try:
        fitted(make(), Rows(30, 5, val=False), strategy=strategy, callbacks=callbacks)
    except UserError as error:
        (folder / f"{strategy.rank}.error").write_text(str(error))
        raise


def refused(folder: Path, make: Any, hook: Any = None, *, seconds: float = 5) -> str:
    with pytest.raises(UserError) as caught:
        on(DDP(2, "cpu", timeout_seconds=seconds), differently, make, hook, folder)
    return str(caught.value)


THAWED = "rank 0 has thawed net.0.weight, net.0.bias, and rank 1 has not; "
ALIKE = "set requires_grad on all ranks at the same step, e.g. by trainer.global_step"


def test_a_rank_that_thaws_alone_is_told_in_the_last_line(tmp_path):
    assert refused(tmp_path, Thawing, thaw_later) == THAWED + ALIKE


def test_ranks_that_thaw_other_weights_are_refused_at_once(tmp_path):
    refused(tmp_path, Thawing, thaw_otherwise, seconds=600)
    assert (tmp_path / "0.error").read_text() == (
        "rank 0 has thawed net.0.weight, and rank 1 has thawed net.0.bias; " + ALIKE
    )


def test_a_rank_that_gathers_alone_is_named_with_the_line_that_called(tmp_path):
    assert re.fullmatch(
        r"rank 0 called self.all_gather in training_step \(test_ddp.py, line \d+\), and rank 1 did "
        "not; every rank that has rows has to call it equally often in each step",
        refused(tmp_path, GathersAlone),
    )
