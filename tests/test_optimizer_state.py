"""An optimizer's state is each weight's own, whatever their order is, and has its size."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import on
from recorded import weights, weights_apart
from small import Rows, Small, trainer
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from dpframe import Strategy, UserError, checkpoint
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.strategies.fsdp import FSDP

MAKERS: dict[str, Any] = {
    "Adam": partial(Adam, lr=0.01),
    "AdamW": partial(AdamW, lr=0.01, amsgrad=True),
    "SGD": partial(SGD, lr=0.05, momentum=0.9),
    "Adagrad": partial(Adagrad, lr=0.01),
    "Adafactor": partial(Adafactor, lr=0.01),
}
GROUPS = {"first": {"match": "first", "lr": 0.2}, "last": {"match": "last", "lr": 0.001}}


class Moved(Small):
    """Its `__init__` makes the layers in this order."""

    def __init__(self, optimizer: Any, order: str, width: int = 5, scheduler: Any = None) -> None:
        super().__init__(optimizer, scheduler)
        del self.net
        sizes = {"first": (3, width), "inner": (width, 5), "tied": (width, 5), "last": (5, 1)}
        for name in order.split():
            setattr(self, name, nn.Linear(*sizes[name]))
        for name, other in (("tied", "inner"), ("inner", "tied")):  # one layer has two names
            if name not in order:
                setattr(self, name, getattr(self, other))

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        error = self.last(self.tied(self.first(x).tanh()).tanh())[:, 0] - y
        return {"loss": error.square().mean()}


class Halves(Moved):
    """An optimizer for the first layer, and another one."""

    def turns(self):
        return ["rest", "first"]

    def configure_optimizer(self) -> dict[str, Optimizer]:
        first = list(self.first.parameters())
        rest = [w for w in self.parameters() if all(w is not other for other in first)]
        return {"first": Adam(first), "rest": SGD(rest, lr=0.01, momentum=0.9)}

    def training_step(self, batch: list[Tensor], turn: str = "") -> dict[str, Any]:
        return super().training_step(batch)

    validation_step = training_step


class Fewer(Moved):
    """The optimizer's groups are of the config; without them it leaves out a layer."""

    def configure_optimizer(self) -> Any:
        if "groups" in self.make_optimizer.keywords:
            return super().configure_optimizer()
        return self.make_optimizer([*self.inner.parameters(), *self.last.parameters()])


def run(make: Any, order: str, resume: Any = None, **settings: Any) -> Any:
    made = {name: settings.pop(name) for name in ("optimizer", "width") if name in settings}
    trained = trainer(make=partial(make, order=order, **made), data=Rows(val=False), **settings)
    trained.prepare(deepcopy(resume), resume_anyway=True)
    trained.fit()
    return trained


def same_weights(one: Any, other: Any) -> bool:
    return weights_apart(weights(one.task), weights(other.task)) == 0


def unnamed(state: dict[str, Any]) -> dict[str, Any]:
    """As an optimizer without torch's hooks has it."""
    groups = [dict(group) for group in state["optimizer"]["param_groups"]]
    assert all(group.pop("param_names") for group in groups)
    return {**state, "optimizer": {**state["optimizer"], "param_groups": groups}}


@pytest.mark.parametrize("width", [5, 8], ids=["alike", "of other sizes"])
@pytest.mark.parametrize("name", MAKERS)
def test_each_weight_keeps_its_own_moments_if_the_order_of_layers_changes(name, width):
    make = partial(Moved, MAKERS[name])
    half = run(make, "first inner last", max_epochs=1, width=width).state_dict()
    whole = run(make, "first inner last", half, width=width)
    again = run(make, "last tied first", half, width=width)
    assert same_weights(whole, again)


def test_each_of_several_optimizers_keeps_the_moments_of_its_own_weights():
    make = partial(Halves, None)
    half = run(make, "first inner last", max_epochs=1).state_dict()
    whole, again = run(make, "first inner last", half), run(make, "last inner first", half)
    assert same_weights(whole, again)


def test_groups_keep_their_options_if_their_order_changes():
    make = partial(Moved, partial(SGD, lr=0.05, momentum=0.9, groups=GROUPS))
    half = run(make, "first inner last", max_epochs=1).state_dict()
    whole, again = run(make, "first inner last", half), run(make, "last inner first", half)
    assert [group["lr"] for group in again.update.optimizer.param_groups] == [0.05, 0.001, 0.2]
    assert same_weights(whole, again)


@pytest.mark.parametrize("width", [5, 8], ids=["alike", "of other sizes"])
def test_a_state_without_names_is_loaded_by_number_if_its_sizes_fit(width):
    make = partial(Moved, MAKERS["Adam"])
    half = run(make, "first inner last", max_epochs=1, width=width).state_dict()
    whole = run(make, "first inner last", half, width=width)
    again = run(make, "first inner last", unnamed(half), width=width)
    assert same_weights(whole, again)
    with pytest.raises(UserError) as caught:
        run(make, "last inner first", {**unnamed(half), "file": "a.ckpt"}, width=width)
    assert str(caught.value) == (
        f"resume=a.ckpt: the optimizer's exp_avg of last.weight has size ({width}, 3), not (1, 5); "
        "use checkpoint=FILE to start a new run from its weights"
    )


def changed(state: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    own = state["optimizer"]["state"][0]
    own[name] = value
    if value is None:
        del own[name]
    return state


HOSTILE = {
    "a few numbers": ("Adam", "exp_avg", torch.zeros(2), "has size (2,), not (5, 3)"),
    "one number": ("AdamW", "max_exp_avg_sq", torch.tensor(0.0), "has size (), not (5, 3)"),
    "the size turned": ("SGD", "momentum_buffer", torch.zeros(3, 5), "has size (3, 5), not (5, 3)"),
    "nothing": ("Adagrad", "sum", torch.zeros(0), "has size (0,), not (5, 3)"),
    "a row of another size": ("Adafactor", "row_var", torch.zeros(3, 1), "(3, 1), not (5, 1)"),
    "several steps": ("Adam", "step", torch.zeros(4), "step of first.weight has size (4,), not ()"),
    "no step": ("Adam", "step", 3, "step of first.weight is a int, no tensor"),
    "no tensor": ("Adam", "exp_avg", 0.5, "exp_avg of first.weight is a float, no tensor"),
    "whole numbers": ("Adam", "exp_avg", torch.zeros(5, 3, dtype=torch.int8), "is torch.int8,"),
    "nothing of that name": ("Adam", "exp_avg", None, "has no exp_avg of first.weight there"),
    "nothing for an option": ("AdamW", "max_exp_avg_sq", None, "has no max_exp_avg_sq of first."),
    "sparse": ("Adam", "exp_avg", torch.zeros(5, 3).to_sparse(), "torch.sparse_coo, and the"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_state_of_another_size_or_kind_is_refused_before_a_kernel_reads_it(case):
    name, key, value, said = HOSTILE[case]
    make = partial(Moved, MAKERS[name])
    state = run(make, "first inner last", max_epochs=1).state_dict()
    with pytest.raises(UserError) as caught:
        run(make, "first inner last", changed(state, key, value))
    assert f"{key} of first.weight" in str(caught.value)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_another_type_of_floats_is_converted_as_torch_does():
    """A kernel reads a state in its weight's type, so it is not restored as it was saved."""
    make = partial(Moved, MAKERS["Adam"])
    half = run(make, "first inner last", max_epochs=1).state_dict()
    whole = run(make, "first inner last", half)
    for state in half["optimizer"]["state"].values():
        state |= {key: value.double() for key, value in state.items()}
    assert same_weights(whole, run(make, "first inner last", half))


class Counting(SGD):
    """Keeps more than SGD does, under names that other optimizers of torch have."""

    def __init__(self, weights: Any, **options: Any) -> None:
        super().__init__(weights, lr=0.05, **options)
        self.count = 0
        for group in self.param_groups:
            group["shifts"] = torch.zeros(3)

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["shifts"] += self.count
            for weight in group["params"]:
                self.state[weight] |= {"sum": 0.5 * self.count, "step": torch.ones(2)}
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.count = saved["count"]


def test_what_an_optimizer_of_ones_own_keeps_besides_is_its_own():
    make = partial(Moved, Counting)
    half = run(make, "first inner last", max_epochs=1).state_dict()
    steps = half["progress"]["global_step"]
    again = run(make, "first inner last", half).update.optimizer
    assert again.count > steps > 0
    assert again.param_groups[0]["shifts"].tolist() == [again.count * (again.count + 1) / 2] * 3


class Bare(Optimizer):
    """As those that wrap another one, and don't call Optimizer.__init__."""

    def __init__(self, weights: Any) -> None:
        self.inner = SGD(weights, lr=0.05)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.defaults = self.inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def test_an_optimizer_that_is_not_initialized_as_torchs_trains():
    assert run(partial(Moved, Bare), "first inner last", max_epochs=1).global_step


OTHER: dict[str, Any] = {"match": "inner", "lr": 0.001}
OTHERS: dict[str, Any] = {
    "other groups": (
        Moved,
        {"optimizer": partial(SGD, lr=0.05, groups=GROUPS | {"last": OTHER})},
        "the optimizer's group of last.weight has other weights there",
    ),
    "a schedule of groups": (
        partial(Moved, scheduler=partial(StepLR, step_size=1)),
        {"order": "last inner first"},
        "StepLR keeps its rates in the order of the optimizer's groups, which differs here",
    ),
    "fewer weights": (
        Fewer,
        {"optimizer": partial(SGD, lr=0.05)},
        "the optimizer updates first.weight there, and not here",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_groups_or_weights_of_an_optimizer_are_refused_in_one_line(case):
    make, changes, said = OTHERS[case]
    before = {"optimizer": partial(SGD, lr=0.05, groups=GROUPS), "order": "first inner last"}
    state = run(make, **before, max_epochs=1).state_dict()
    with pytest.raises(UserError, match=f"resume=: {said}"):
        run(make, resume=state, **before | changes)


def test_lbfgs_has_one_state_for_all_weights_in_their_order():
    make = partial(Moved, partial(LBFGS, max_iter=2))
    state = run(make, "first inner last", max_epochs=1).state_dict()
    with pytest.raises(
        UserError, match="LBFGS keeps one state for all weights, whose order differs"
    ):
        run(make, "last inner first", state)
    state["optimizer"]["state"][0]["d"] = torch.zeros(3)
    with pytest.raises(UserError, match=r"LBFGS keeps \(3,\) numbers there, 56 here"):
        run(make, "first inner last", state)


def sharded(strategy: Strategy, folder: Path, order: str, start: Path | None) -> dict[str, Any]:
    """Two steps, the second one after a resume if there is a `start`."""
    saver = Checkpoint(every_n_steps=1, every_n_epochs=None, seconds_between=0)
    made = run(
        partial(Moved, MAKERS["Adam"]),
        order,
        start,
        width=8,
        strategy=strategy,
        max_steps=1 if start is None else 2,
        directory=folder,
        callbacks=[saver],
    )
    return weights(made.task)


def test_each_weight_keeps_its_own_moments_in_parts_too(tmp_path):
    orders = ["first inner last", "first inner last", "last inner first"]
    starts = [None, *[tmp_path / "0/checkpoints/last.ckpt"] * 2]
    first, whole, again = (
        on(FSDP(2, "cpu"), sharded, tmp_path / str(number), order, start)
        for number, (order, start) in enumerate(zip(orders, starts, strict=True))
    )
    assert weights_apart(again, whole) == 0 < weights_apart(first, whole)
    state = checkpoint.load(starts[1])
    name = state["optimizer"]["param_groups"][0]["param_names"].index("first.weight")
    moments = state["optimizer"]["state"][name]
    assert (name, moments["exp_avg"].shape) == (0, (8, 3))
    moments["exp_avg"] = torch.zeros(3, 8)
    checkpoint.save({k: v for k, v in state.items() if k != "file"}, tmp_path / "forged.ckpt")
    with pytest.raises(UserError, match=r"exp_avg of first.weight has size \(3, 8\), not"):
        on(FSDP(2, "cpu"), sharded, tmp_path / "forged", orders[0], tmp_path / "forged.ckpt")
