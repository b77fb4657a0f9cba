"""Weights of ranks that are no longer the same: noticed, whatever has pulled them apart."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from recorded import once
from small import Adam, Hooks, Rows, Small, fitted
from torch import Tensor, nn

from dpframe import Callback, Strategy, Task, Trainer, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU
from dpframe.trainer.checks.alike import checksum

SAID = (
    "{name} of rank 1 is not rank 0's after step {step} (they differ by {by}%), so that each rank "
    "trains a model of its own; change weights on all ranks alike, by what a torch.Generator draws "
    "that they seed alike, e.g. by trainer.global_step"
)
ANYWAY = "; trainer.share_check=warn trains on"
FIRST, LAST = "net.0.weight", "net.3.bias"


class Reset(Small):
    def on_epoch_start(self, trainer: Trainer) -> None:
        if self.epoch == 2:
            self.net[-1].reset_parameters()


def reset(trainer: Trainer) -> None:
    if trainer.global_step == 11:
        trainer.task.net[-1].reset_parameters()


class Normed(Small):
    """Its ranks draw for dropout and keep statistics of their own."""

    def __init__(self) -> None:
        super().__init__(Adam, dropout=0.5)
        self.net.insert(1, nn.BatchNorm1d(8))
        self.net[0].requires_grad_(False)
        self.turned = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16).T, requires_grad=False)
        self.part = nn.Parameter(torch.ones(9)[1:], requires_grad=False)
        self.none = nn.Parameter(torch.ones(0), requires_grad=False)
        self.waves = nn.Parameter(torch.ones(2, dtype=torch.complex128), requires_grad=False)


class OfFew(Small):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.few = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)


def changes(
    change: Callable[[Tensor], object], name: str = FIRST, hook: str = "on_step_end", step: int = 1
) -> list[Callback]:
    """A hook of rank 1 alone changes a weight, once."""

    def changed(trainer: Trainer) -> None:
        if trainer.strategy.rank == 1 and trainer.global_step == step:
            with torch.no_grad():
                change(trainer.task.get_parameter(name))

    return [Hooks(**{hook: changed})]


def noise(trainer: Trainer) -> None:
    """Langevin's."""
    with torch.no_grad():
        for weight in trainer.task.parameters():
            weight.add_(0.01 * torch.randn_like(weight))


def alike(trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(trainer.global_step)
    with torch.no_grad():
        for weight in trainer.task.parameters():
            weight.add_(0.01 * torch.randn(weight.shape, generator=generator))


def stop(trainer: Trainer) -> None:
    if trainer.epoch == 3:
        trainer.stop("it is enough")


def swap(weight: Tensor) -> None:
    weight[[0, 1]] = weight[[1, 0]]


NOISE, RESET = [Hooks(on_step_end=noise)], [Hooks(on_step_end=reset)]
ROUNDED = changes(lambda weight: weight.mul_(1 + 1e-6))
# Settings, and in which weight and after which step it is noticed; an epoch has five steps.
NOTICED: dict[str, tuple[dict[str, Any], str, int]] = {
    "weights that a hook draws again": ({"callbacks": RESET}, "net.3.weight", 20),
    "noise of each rank": ({"callbacks": NOISE}, FIRST, 5),
    "of logical shares": (
        {"callbacks": changes(torch.relu_), "logical_replicas": 2}, FIRST, 5,
    ),
    "one weight of one rank": ({"callbacks": changes(torch.zero_, LAST)}, LAST, 5),
    "rows that are swapped": ({"callbacks": changes(swap)}, FIRST, 5),
    "signs that are turned": ({"callbacks": changes(torch.neg_)}, FIRST, 5),
    "what is not a number": (
        {"callbacks": changes(lambda w: w.fill_(torch.nan), LAST, step=5)}, LAST, 5,
    ),
    "a frozen weight": ({"make": partial(OfFew, torch.float32),
        "callbacks": changes(torch.zero_, "few")}, "few", 5),
    "whole numbers": ({"make": partial(OfFew, torch.int8),
        "callbacks": changes(lambda w: w.add_(1), "few")}, "few", 5),
    "after the last whole epoch": (
        {"callbacks": changes(torch.zero_, step=11), "max_steps": 12}, FIRST, 12,
    ),
    "before training is stopped": (
        {"callbacks": [*changes(torch.zero_, step=12), Hooks(on_epoch_end=stop)]}, FIRST, 15,
    ),
    "at the end of the last epoch": (
        {"callbacks": changes(torch.zero_, hook="on_epoch_end", step=15), "max_epochs": 3},
        FIRST, 15,
    ),
    "rounding, if that is strict": ({"callbacks": ROUNDED, "share_check": "strict"}, FIRST, 5),
}  # fmt: skip
HEALTHY: dict[str, dict[str, Any]] = {
    "layers and weights of all kinds": {"make": Normed},
    "weights that are drawn again as an epoch begins": {"make": Reset},
    "noise that is drawn alike": {"callbacks": [Hooks(on_step_end=alike)]},
    "zeros of two signs": {"make": partial(OfFew, torch.float32), "callbacks": [
        Hooks(on_fit_start=lambda trainer: trainer.task.few.data.zero_()),
        *changes(torch.neg_, "few")]},
    "what is not looked at": {"callbacks": NOISE, "share_check": "off"},
}  # fmt: skip
WARNED = {
    "what is only to be warned of": {"callbacks": NOISE, "share_check": "warn"},
    "rounding": {"callbacks": ROUNDED},
}


@contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings of this rank."""
    warnings = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dpframe").addHandler(handler)
    try:
        yield warnings
    finally:
        logging.getLogger("dpframe").removeHandler(handler)


def outcome(strategy: DDP, settings: dict[str, Any]) -> tuple[str, list[str], int]:
    """The error, the warnings of this rank, and the steps that were made."""
    steps = Hooks()
    given = {"max_epochs": 4, **settings, "callbacks": [*settings.get("callbacks", ()), steps]}
    said = ""
    with warned() as warnings:
        try:
            fitted(data=Rows(20, 4, val=False), strategy=strategy, **given)
        except UserError as error:
            said = str(error)
    draws = " draws random numbers, which differ between ranks"
    told = [w for w in warnings if not w.endswith("this changes the curve") and draws not in w]
    return said, told, max(steps.steps("on_step_end"), default=0)


def all_of_them(strategy: DDP) -> list[dict[str, tuple[str, list[str], int]]]:
    cases = {name: settings for name, (settings, *_) in NOTICED.items()} | HEALTHY | WARNED
    return strategy.collectives.gather({n: outcome(strategy, given) for n, given in cases.items()})


@once
def by_ranks() -> list[dict[str, tuple[str, list[str], int]]]:
    return on(DDP(2, "cpu"), all_of_them)


@pytest.mark.parametrize("name", NOTICED)
def test_weights_that_are_apart_end_all_ranks_after_the_same_step(name):
    _, weight, step = NOTICED[name]
    for said, warnings, steps in (ranks := [found[name] for found in by_ranks()]):
        by = said.partition("differ by ")[2].partition("%")[0]
        assert said == SAID.format(name=weight, step=step, by=by) + ANYWAY
        assert warnings == [] and steps == step
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("name", HEALTHY)
def test_ranks_that_are_alike_and_those_that_are_not_looked_at_train_on(name):
    assert [found[name] for found in by_ranks()] == [("", [], 20)] * 2


@pytest.mark.parametrize("name", WARNED)
def test_rounding_and_what_is_meant_is_a_warning_of_the_main_rank(name):
    (said, warnings, steps), others = (found[name] for found in by_ranks())
    assert (said, steps) == ("", 20) and others == ("", [], 20)
    assert [w.partition(" (")[0] for w in warnings] == [
        f"{FIRST} of rank 1 is not rank 0's after step {step}" for step in (5, 10, 20, 20)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.int8])
@pytest.mark.parametrize("rows", [1, 3, 5000])
def test_each_bit_of_a_weight_and_its_place_count(rows, dtype):
    weight = torch.arange(1, 5 * rows + 1).reshape(rows, 5) % 97  # all of which these types have
    weight = weight.to(dtype)
    signs, last = weight.clone(), weight.clone()
    signs[0, :2] *= -1
    last[-1, -1] += 1
    others = [weight, weight.flip(0), weight.flip(1), signs, last, weight[:, :4]]
    sums = [checksum([each], torch.device("cpu")) for each in others]
    assert len(set(sums)) == len(others) - (rows == 1)
    part = torch.cat([weight[:1], weight])[1:]
    across = weight.T.contiguous().T  # as of channels_last
    for same in (weight.clone(), part, across):
        assert checksum([same, same], torch.device("cpu")) == checksum([weight] * 2, weight.device)


def test_one_process_and_a_strategy_that_says_nothing_are_not_asked(monkeypatch):
    def asked(*args: Any) -> None:
        raise AssertionError("it is")

    monkeypatch.setattr("dpframe.trainer.checks.alike.find_apart", asked)
    for kind in (CPU, DataParallel):
        fitted(strategy=kind(None if kind is CPU else 2), max_epochs=1)
    assert DDP.has_alike_weights and not (Strategy.has_alike_weights or FSDP.has_alike_weights)


class Mixed(Small):
    """A batch is mixed by a number that a hook draws."""

    generator: torch.Generator | None = None

    def on_batch_start(self, trainer: Trainer, batch: Any) -> None:
        for share in batch.shares:
            share.batch[0].mul_(torch.rand(1, generator=self.generator))


class MixedAlike(Mixed):
    def on_batch_start(self, trainer: Trainer, batch: Any) -> None:
        self.generator = torch.Generator().manual_seed(trainer.global_step)
        super().on_batch_start(trainer, batch)


def of_mixed(strategy: DDP) -> list[list[tuple[str, list[str]]]]:
    def of(task: Task, **settings: Any) -> tuple[str, list[str]]:
        with warned() as warnings:
            try:
                fitted(task, strategy=strategy, max_epochs=2, **settings)
            except UserError as error:
                return str(error), warnings
        return "", warnings

    once_later = Hooks(on_step_end=lambda t: t.global_step == 5 and torch.rand(1))
    cases = [
        of(Mixed()),
        of(Mixed(), share_check="strict"),
        of(MixedAlike()),
        of(Small(), callbacks=[once_later]),
        of(Mixed(), share_check="off"),
        of(Mixed(), logical_replicas=2),
    ]
    return strategy.collectives.gather(cases)


def test_a_hook_of_a_batch_or_a_step_that_draws_is_told_once():
    said = (
        "{} draws random numbers, which differ between ranks, so the curve changes if it depends "
        "on them: draw from a torch.Generator that all ranks seed alike, e.g. by "
        "trainer.global_step"
    )
    mixed = said.format("Mixed.on_batch_start")
    main, other = on(DDP(2, "cpu"), of_mixed)
    quiet: tuple[str, list[str]] = ("", [])
    later = said.format("Hooks.on_step_end")
    assert main == [("", [mixed]), (mixed, []), quiet, ("", [later]), quiet, quiet]
    assert other == [quiet, (mixed, []), quiet, quiet, quiet, quiet]


def drawn_again(strategy: Strategy) -> Any:
    torch.manual_seed(0)
    return fitted(Reset(), strategy=strategy, precision="64", max_epochs=4).task.state_dict()


def test_hooks_of_an_epoch_draw_the_same_on_any_number_of_replicas():
    wanted = drawn_again(CPU())
    for strategy in (DataParallel(2, "cpu"), DDP(2, "cpu")):
        found = on(strategy, drawn_again)
        assert all(torch.allclose(found[key], wanted[key], rtol=0, atol=1e-12) for key in wanted)
