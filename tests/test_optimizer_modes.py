"""Optimizers with a train() and eval() of their own: which weights are seen where."""

from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from forked import in_turn
from recorded import weights_apart
from small import Hooks, Rows, Small, fitted, trainer
from torch import Tensor
from torch.optim import Optimizer

import dpframe
from dpframe import Strategy, UserError, checkpoint
from dpframe.callbacks.averages import EMA, SWA
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP

Weights = dict[str, Tensor]


class ScheduleFree(Optimizer):
    """As the package's SGD: steps are at y, evaluations at the average x, and z is a state."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def train(self) -> None:
        self._move(is_training=True)

    def eval(self) -> None:
        self._move(is_training=False)

    @torch.no_grad()
    def _move(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if is_training else 1 - 1 / group["beta"]
            for p in group["params"] if group["train_mode"] != is_training else ():
                if p in self.state:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = is_training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.param_groups[0]["train_mode"], "not in training"
        for group in self.param_groups:
            group["k"] += 1
            share, beta, lr = 1 / group["k"], group["beta"], group["lr"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, share)
                    p.add_(p.grad, alpha=lr * (beta * (1 - share) - 1))
                    z.sub_(p.grad, alpha=lr)


MAKERS: dict[str, Any] = {
    "stand-in": ScheduleFree,
    "a part": partial(torch.optim.AdamW, groups={"a": partial(ScheduleFree, match="net.0")}),
}
if find_spec("schedulefree"):
    import schedulefree

    MAKERS["AdamW"] = partial(schedulefree.AdamWScheduleFree, lr=0.02, warmup_steps=3)
    MAKERS["SGD"] = partial(schedulefree.SGDScheduleFree, lr=0.05)
ALL = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
DOUBLE: dict[str, Any] = {"precision": "64", "max_epochs": 3}


def copied(task: Any) -> Weights:
    return {name: value.detach().clone() for name, value in task.state_dict().items()}


def same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in (*one, *other))


def by_hand(task: Small, make: Any, epochs: int) -> tuple[list[Weights], list[Weights]]:
    """The weights of the steps, and those of an evaluation after each epoch."""
    optimizer, data = make(list(task.parameters())), Rows(shuffle=False)
    trained, evaluated = [], []
    for _ in range(epochs):
        optimizer.train()
        for start in range(0, 20, 4):
            batch = [column[start : start + 4] for column in data.train.tensors]
            task.training_step(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            trained.append(copied(task))
        before = copied(task)
        optimizer.eval()
        evaluated.append(copied(task))
        optimizer.train()
        task.load_state_dict(before)  # which the way back rounds
    return trained, evaluated


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "a part"])
def test_steps_validations_and_the_task_after_training_have_the_weights_that_they_should(name):
    torch.manual_seed(3)
    task = Small(MAKERS[name])
    wanted = by_hand(deepcopy(task), MAKERS[name], 3)
    trained: list[Weights] = []
    evaluated: list[Weights] = []
    ends: list[Weights] = []
    look = Hooks(
        on_step_end=lambda t: trained.append(copied(t.task)),
        on_validation_start=lambda t: evaluated.append(copied(t.task)),
        on_validation_end=lambda t: ends.append(copied(t.task)),
        on_fit_end=lambda t: ends.append(copied(t.task)),
    )
    fitted(task, Rows(shuffle=False), callbacks=[look], max_epochs=3)
    for mine, theirs in zip((trained, evaluated), wanted, strict=True):
        assert all(same(*pair) for pair in zip(mine, theirs, strict=True))
    assert all(same(*pair) for pair in zip(ends, [*wanted[1], wanted[1][-1]], strict=True))
    assert same(copied(task), wanted[1][-1])


@ALL
def test_neither_validations_nor_saves_change_training_and_each_save_is_resumed_to_the_bit(make):
    states: list[Any] = []
    save = Hooks(
        **{
            hook: lambda t: states.append(deepcopy(t.state_dict()))
            for hook in ("on_step_end", "on_validation_end", "on_epoch_end", "on_fit_end")
        }
    )
    plain = fitted(make=partial(Small, make), data=Rows(val=False))
    whole = fitted(make=partial(Small, make), callbacks=[save], validate_every_steps=2)
    assert same(copied(plain.task), copied(whole.task))
    for state in states[::3]:
        again = fitted(make=partial(Small, make), resume=deepcopy(state), validate_every_steps=2)
        assert same(copied(again.task), copied(whole.task))
        assert again.metrics == whole.metrics
        assert str(again.state_dict()["optimizer"]) == str(whole.state_dict()["optimizer"])


@ALL
def test_a_file_holds_both_and_all_but_a_resume_take_those_of_an_evaluation(tmp_path, make):
    one = fitted(make=partial(Small, make), callbacks=[Checkpoint()], directory=tmp_path)
    state = checkpoint.load(tmp_path / "checkpoints" / "last.ckpt")
    assert same(state["averaged"], copied(one.task))
    assert not same(state["task"], state["averaged"])
    best = checkpoint.load(tmp_path / "checkpoints" / "best.ckpt")
    tested = Small(make)
    checkpoint.load_task(tested, best)
    assert trainer(tested).validate()["val/loss"] == best["metrics"]["val/loss"]


class Best(Hooks):
    """Keeps the best weights, and puts them into the task at the end."""

    best: tuple[float, Weights] = (float("inf"), {})

    def on_validation_end(self, trainer: dpframe.Trainer) -> None:
        self.best = min(self.best, (trainer.metrics["val/loss"], copied(trainer.task)), key=id_of)

    def on_fit_end(self, trainer: dpframe.Trainer) -> None:
        trainer.task.load_state_dict(self.best[1])


def id_of(pair: tuple[float, Weights]) -> float:
    return pair[0]


def test_a_callback_that_keeps_the_best_weights_keeps_those_that_were_measured():
    keep = Best()
    one = fitted(Small(partial(ScheduleFree, lr=0.3)), callbacks=[keep])
    assert trainer(one.task).validate()["val/loss"] == keep.best[0]


def test_a_run_that_ends_with_an_error_in_a_validation_is_resumed_from_its_last_save():
    states: list[Any] = []

    def fail(t: dpframe.Trainer) -> None:
        if t.global_step > 5:
            states.append(deepcopy(t.state_dict()))
            raise RuntimeError("gone")

    whole = fitted(make=partial(Small, ScheduleFree))
    with pytest.raises(RuntimeError, match="gone"):
        fitted(make=partial(Small, ScheduleFree), callbacks=[Hooks(on_validation_start=fail)])
    again = fitted(make=partial(Small, ScheduleFree), resume=states[-1])
    assert same(copied(again.task), copied(whole.task))


def run(strategy: Strategy, make: Any) -> Any:
    made = trainer(make=partial(Small, make), strategy=strategy, validate_every_steps=2, **DOUBLE)
    made.fit()
    state = made.state_dict()
    return made.metrics, made.whole_state_dict(), [state[n] for n in ("task", "averaged") if state]


@pytest.mark.parametrize("make", [m for n, m in MAKERS.items() if n != "SGD"])
def test_all_strategies_have_the_same_weights(make):
    [(metrics, weights, saved)] = in_turn([(Strategy(), run, make)])
    for strategy in (DataParallel(3, "cpu"), DDP(2, "cpu"), FSDP(2, "cpu")):
        [(other, *rest)] = in_turn([(strategy, run, make)])
        for mine, theirs in zip([weights, *saved], [rest[0], *rest[1]], strict=True):
            assert weights_apart(mine, theirs) < 1e-12
        assert other == pytest.approx(metrics, rel=1e-10)


@pytest.mark.parametrize("average", [EMA, SWA])
def test_a_second_average_is_refused(average):
    one = trainer(make=partial(Small, ScheduleFree), callbacks=[average()])
    with pytest.raises(UserError) as caught:
        one.fit()
    assert str(caught.value) == (
        f"callbacks.{average.__name__.lower()}: ScheduleFree averages the weights itself; leave "
        "one of them out"
    )
