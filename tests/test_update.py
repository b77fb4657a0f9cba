"""Updates beside a loop by hand: weighted, sparse, late; fused kernels, and schedules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from recorded import Recorder, once, weights, weights_apart
from small import Given, Hooks, Rows, Small, Streamed, fitted, is_same
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from dpframe import DataModule, Strategy, Task, UserError
from dpframe.data import permutation
from dpframe.errors import Failure
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU
from dpframe.trainer import outputs
from dpframe.trainer.optim.optimizers import fuse

Make = Callable[..., torch.optim.Optimizer]
SETTINGS: dict[str, Any] = {"max_epochs": 3, "precision": "64", "log_every": 1}
EXACT = 1e-12


class Words(Task):
    """An embedding and a head; `updated` are the parts that its optimizer takes.

    Where it weighs, rows whose words' mean is below `lightest` have weight 0.
    """

    least = 0.0  # the sum of the weights is divided by at least this

    def __init__(
        self, make: Make, updated: str = "", *, sparse: bool, weighs: bool, lightest: float = 0.0
    ) -> None:
        super().__init__(nn.Embedding(7, 3, sparse=sparse))
        self.head = nn.Linear(3, 1)
        self.make, self.updated, self.weighs = make, updated, weighs
        self.lightest = lightest

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        words, y = batch
        error = self.head(self.net(words).mean(1))[:, 0] - y
        mean = words.double().mean(1)
        weight = mean * (mean >= self.lightest) if self.weighs else torch.ones_like(y)
        loss = (error.square() * weight).sum() / weight.sum().clamp(min=self.least)
        return {"loss": loss, "weight": weight.sum()} if self.weighs else {"loss": loss}

    def configure_optimizer(self) -> torch.optim.Optimizer:
        named = self.named_parameters()
        return self.make([weight for name, weight in named if name.startswith(self.updated)])


def texts() -> DataModule:
    draw = torch.Generator().manual_seed(3)
    words = torch.randint(0, 7, (17, 4), generator=draw)
    return Given(TensorDataset(words, torch.randn(17, generator=draw)), batch_size=8)


class Tokens(Small):
    """`kind` makes a weight of a sum; `least` is what the sum is at least divided by."""

    def __init__(self, kind: Callable[[Tensor], Any] = Tensor.long, least: int = 0) -> None:
        super().__init__(Adam)
        self.kind, self.least = kind, least

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, y, mask = batch
        error = (self.net(x)[:, 0] - y).square() * mask
        count = mask.sum()
        return {"loss": error.sum() / count.clamp(min=self.least), "weight": self.kind(count)}


# The first batch has no weight at all, the second's second half has none.
MASK = torch.tensor([0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 1])


def masked(mask: Tensor = MASK) -> Given:
    x = torch.randn(len(mask), 3, generator=torch.Generator().manual_seed(4))
    return Given(TensorDataset(x, x.sum(dim=1).sin(), mask), shuffle=False)


class Late(Small):
    """Its second layer comes into play at the second epoch."""

    epoch = 0

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        out = self.net(x)[:, 0] if self.epoch else self.net[0](x)[:, 0]
        return {"loss": (out - y).square().mean()}


Adam = partial(torch.optim.Adam, lr=0.01, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.3)
LATE = partial(Rows, 17, 8, val=False)
words = partial(Words, sparse=True, weighs=False)
dense = partial(Words, sparse=False, weighs=False)
Case = tuple[Callable[[], Task], Callable[[], Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "a part of the weights": (partial(dense, SGD, "head"), texts, {"clip_norm": 0.1}),
    "sparse": (partial(words, SGD), texts, {}),
    "sparse, clipped": (partial(words, SGD), texts, {"clip_norm": 0.1, "clip_value": 0.01}),
    "sparse, accumulated": (partial(words, SGD), texts, {"accumulate": 2, "clip_norm": 0.2}),
    "sparse, weighted": (partial(Words, SGD, sparse=True, weighs=True), texts, {}),
    "sparse, mostly of weight 0": (
        partial(Words, SGD, sparse=True, weighs=True, lightest=3.75),
        texts,
        {"clip_norm": 0.1},
    ),
    "sparse, with a momentum": (partial(words, partial(SGD, momentum=0.9)), texts, {}),
    "sparse adam": (partial(words, torch.optim.SparseAdam, "net"), texts, {"clip_norm": 0.1}),
    "late momentum": (partial(Late, partial(SGD, lr=0.05, momentum=0.9)), LATE, {}),
    "int64 weights": (partial(Tokens, Tensor.long), masked, {}),
    "int64 weights, finite": (partial(Tokens, Tensor.long, 1), masked, {"accumulate": 2}),
    "float32 weights": (partial(Tokens, Tensor.float), masked, {"accumulate": 2}),
    "float32 weights, finite": (partial(Tokens, Tensor.float, 1), masked, {}),
    "plain numbers as weights": (partial(Tokens, int), masked, {"accumulate": 2}),
    "weights of shape (1,)": (partial(Tokens, lambda count: count.reshape(1)), masked, {}),
}
Result = tuple[dict[str, Any], list[float], float]
"""The weights, the norm of each step's gradient, and the last epoch's loss."""


@once
def by_hand(name: str) -> Result:
    """Torch alone; the norm is one of all that the optimizer takes, and nothing else. A step
    without any weight is one whose gradients are 0."""
    make, data_of, settings = CASES[name]
    torch.manual_seed(0)
    task = make().double()
    task.least = 1
    data = data_of()
    columns = [
        column.double() if column.is_floating_point() else column
        for column in data.train_dataset().tensors
    ]
    count = len(columns[0])
    optimizer = task.configure_optimizer()
    updated = [weight for group in optimizer.param_groups for weight in group["params"]]
    norms: list[float] = []
    for epoch in range(SETTINGS["max_epochs"]):
        task.epoch = epoch
        total = whole = 0.0
        order = permutation(count, seed=0, epoch=epoch) if data.shuffle else torch.arange(count)
        batches = order.split(data.batch_size)
        size = settings.get("accumulate", 1)
        for start in range(0, len(batches), size):
            rows = torch.cat(batches[start : start + size])
            task.zero_grad()
            output = task.training_step([column[rows] for column in columns])
            output["loss"].backward()
            weight = float(output.get("weight", len(rows)))
            total, whole = total + output["loss"].item() * weight, whole + weight
            gradients = [weight.grad.to_dense() for weight in updated if weight.grad is not None]
            norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
            clip = settings.get("clip_norm", float("inf")) / (norms[-1] + 1e-6)
            limit = settings.get("clip_value", float("inf"))
            for weight in updated:
                if weight.grad is not None:
                    gradient = (weight.grad.to_dense() * min(1.0, clip)).clamp(-limit, limit)
                    is_sparse = weight.grad.is_sparse
                    weight.grad = (
                        gradient.sparse_mask(weight.grad.coalesce()) if is_sparse else gradient
                    )
            optimizer.step()
    return weights(task), norms, total / whole


def trained(strategy: Strategy, name: str) -> Result:
    make, data_of, settings = CASES[name]
    recorder = Recorder()
    hooks = Hooks(on_epoch_start=lambda trainer: setattr(trainer.task, "epoch", trainer.epoch))
    one = fitted(
        make=make,
        data=data_of(),
        strategy=strategy,
        callbacks=[hooks],
        loggers=[recorder],
        **SETTINGS,
        **settings,
    )
    assert all(weight.grad is None for weight in one.task.parameters())
    logged = [numbers for _, numbers in recorder.log_]
    norms = [numbers["step/grad_norm"] for numbers in logged if "step/grad_norm" in numbers]
    return weights(one.task), norms, one.metrics["train/loss"]


def all_of_them(strategy: Strategy) -> dict[str, Any]:
    """Every case in one group of ranks; a group takes seconds to start."""
    results: dict[str, Any] = {"sometimes": sometimes(strategy)}
    for name in CASES:
        strategy.options["find_unused_parameters"] = name == "late momentum"
        results[name] = trained(strategy, name)
    return results


@once
def by_ranks() -> dict[str, Any]:
    return on(DDP(2, "cpu"), all_of_them)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", ["cpu", "data_parallel-2", "data_parallel-3", "ddp"])
def test_an_update_is_the_one_by_hand(place, name):
    if place == "ddp":
        mine = by_ranks()[name]
    else:
        mine = trained(CPU() if place == "cpu" else DataParallel(int(place[-1]), "cpu"), name)
    wanted = by_hand(name)
    assert weights_apart(mine[0], wanted[0]) < EXACT
    assert mine[1] == pytest.approx(wanted[1], rel=EXACT)
    assert mine[2] == pytest.approx(wanted[2], rel=EXACT)


# Weights


def test_a_loss_that_is_nan_where_there_is_weight_is_still_told():
    class Bad(Tokens):
        def training_step(self, batch):
            output = super().training_step(batch)
            return {**output, "loss": output["loss"] / 0.0}

    with pytest.raises(Failure, match="^step 2: the loss is inf, rows 4 5 6 7;"):
        fitted(Bad(least=1), masked())


def test_a_weight_with_a_gradient_is_refused():
    class Gated(Tokens):
        def training_step(self, batch):
            return {**super().training_step(batch), "weight": self.net(batch[0]).sum()}

    with pytest.raises(UserError) as caught:
        fitted(Gated(), masked())
    assert str(caught.value) == (
        "Gated.training_step returned a 'weight' with a gradient; it only says how much the loss "
        "counts: return weight.detach()"
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_weights_are_summed_in_64_bits_where_the_device_has_none(monkeypatch, accumulate):
    def trained() -> tuple[dict[str, Any], dict[str, float]]:
        torch.manual_seed(0)
        made = fitted(Tokens(), masked(), accumulate=accumulate)
        return made.task.state_dict(), made.metrics

    expected = trained()
    monkeypatch.setattr(outputs, "has_float64", lambda device: False)  # as on Apple's MPS
    monkeypatch.setattr(torch.Tensor, "double", lambda tensor: pytest.fail("64 bits"))
    assert is_same(trained(), expected)


class Sometimes(Small):
    """Its steps return a weight where the first row says so."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, y, mask = batch
        output = super().training_step((x, y))
        return {**output, "weight": 2.0} if mask[0] else output


def sometimes(strategy: Strategy) -> set[str]:
    """What is said where the first batch has weights in its second half, its first, or nowhere."""
    lines = set()
    for first in ([0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]):
        mask = torch.tensor([*first, 1, 1, 1, 1])
        with pytest.raises(UserError) as caught:
            fitted(Sometimes(), masked(mask), strategy=strategy, accumulate=2)
        lines.add(str(caught.value))
    return lines


@pytest.mark.parametrize("place", ["data_parallel", "ddp"])
def test_a_weight_that_some_batches_or_ranks_lack_is_refused_by_all(place):
    """In the first batch by an agreement, so that no rank waits for another."""
    is_ddp = place == "ddp"
    lines = by_ranks()["sometimes"] if is_ddp else sometimes(DataParallel(2, "cpu"))
    assert lines == {
        "a step returned a 'weight' for some batches and none for others; return one always, "
        "or never"
    }


def test_a_validation_of_weight_0_says_so():
    data = masked()
    data.val = masked(0 * MASK).train
    with pytest.raises(UserError) as caught:
        fitted(Tokens(), data)
    assert str(caught.value) == (
        "val: the weights of all 18 rows add up to 0: there is no mean over them"
    )


def test_a_run_that_never_has_a_weight_of_0_divides_by_it_on_no_number_of_replicas():
    """A share may have none where its batch has."""
    runs = []
    for replicas in (1, 2):
        strategy, data = DataParallel(replicas, "cpu"), masked(MASK[4:])
        runs.append(fitted(Tokens(), data, strategy=strategy, on_nonfinite="skip"))
    assert [run.progress.skipped_steps for run in runs] == [0, 0]


# A resume


KINDS = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS")
]


class Flat(Small):
    """Without biases, which Muon does not take."""

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return self.make_optimizer([weight for weight in self.parameters() if weight.ndim == 2])


STATES: dict[str, tuple[Callable[[], Task], Callable[[], DataModule]]] = {
    name: (partial(Small, partial(getattr(torch.optim, name), lr=0.01)), Rows) for name in KINDS
}
STATES["Muon"] = (partial(Flat, partial(torch.optim.Muon, lr=0.01)), Rows)
STATES["SparseAdam"] = (partial(words, partial(torch.optim.SparseAdam, lr=0.01), "net"), texts)
STATES["sparse momentum"] = (partial(words, partial(SGD, momentum=0.9)), texts)


@pytest.mark.parametrize("name", STATES)
def test_every_stock_optimizer_goes_on_to_the_bit_in_float64(name):
    make, data = STATES[name]
    run = partial(fitted, make=make, data=data(), precision="64")
    whole, half = run(max_epochs=3), run(max_epochs=1)
    again = run(max_epochs=3, resume=half.state_dict())
    assert is_same(again.task.state_dict(), whole.task.state_dict())
    assert is_same(again.update.optimizer.state_dict(), whole.update.optimizer.state_dict())


# Fused kernels


MAKERS = {
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
}


def is_fused(one: Any) -> bool:
    return all(group.get("fused") is True for group in one.update.optimizer.param_groups)


@pytest.mark.parametrize("name", MAKERS)
def test_the_weights_are_those_of_the_plain_kernels(name):
    runs = []
    for fused in (None, False):
        make = partial(Small, partial(MAKERS[name], fused=fused))
        runs.append(fitted(make=make, precision="64", max_epochs=4))
    assert [is_fused(one) for one in runs] == [True, False]
    for mine, plain in zip(runs[0].task.parameters(), runs[1].task.parameters(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("given", [{"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_the_users_own_choice_stands(given):
    weights = list(nn.Linear(2, 2).parameters())
    optimizer = torch.optim.Adam(weights, **given)
    assert not fuse(optimizer, nn.Linear(2, 2), None)
    assert optimizer.param_groups[0]["fused"] == given.get("fused")


class OnMPS(nn.Parameter):
    device = torch.device("mps", 0)  # type: ignore[assignment]


@pytest.mark.parametrize("kind, fits", [("Adam", True), ("SGD", True), ("Adagrad", False)])
def test_mps_has_the_fused_kernels_of_three_optimizers(kind, fits):
    weight = OnMPS(torch.zeros(2))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
    assert fuse(optimizer, nn.Linear(2, 2), None) is fits


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    "model, kind",
    [
        (nn.Embedding(4, 2, sparse=True), torch.optim.SGD),
        (nn.Linear(2, 2).to(torch.complex64), torch.optim.SGD),
        (nn.Linear(2, 2), Own),
        (nn.Linear(2, 2), torch.optim.Rprop),
    ],
    ids=["sparse", "complex", "own class", "no such kernel"],
)
def test_what_has_no_such_kernel_stays_as_it_was(model, kind):
    optimizer = kind(model.parameters(), lr=0.1)
    before = dict(optimizer.param_groups[0])
    assert not fuse(optimizer, model, None)
    assert optimizer.param_groups[0].keys() == before.keys()
    assert optimizer.param_groups[0].get("fused") == before.get("fused")


@pytest.mark.parametrize("precision", ["32", "fp16", "bf16"])
def test_clipping_and_loss_scaling_see_the_gradients_first(precision):
    """A clip to nothing leaves the weights where they were, whatever the scaler does."""
    make = partial(Small, partial(torch.optim.SGD, lr=1.0))
    one = fitted(make=make, precision=precision, clip_value=1e-12, max_epochs=1)
    assert is_fused(one)
    torch.manual_seed(0)
    for weight, first in zip(one.task.parameters(), make().parameters(), strict=True):
        torch.testing.assert_close(weight, first, rtol=0, atol=1e-6)


# Schedules


HALVES = partial(StepLR, step_size=1, gamma=0.5)
BASE = 0.05  # small.SGD's


STUCK = partial(
    ReduceLROnPlateau, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
)  # nothing ever gets better


def logged(scheduler, name: str = "progress/lr", **settings) -> list[float]:
    recorder = Recorder()
    fitted(make=lambda: Small(scheduler=scheduler), loggers=[recorder], **settings)
    return [scalars[name] for _, scalars in recorder.log_ if name in scalars]


@pytest.mark.parametrize(
    ("scheduler", "settings", "halved"),
    [
        (HALVES, {"max_epochs": 3}, [0, 1, 2]),
        (HALVES, {"max_epochs": 3, "max_steps": 7}, [0, 1]),  # an epoch that is cut short is none
        (STUCK, {"max_epochs": 4, "plateau_monitor": "val/loss"}, [0, 0, 1, 2]),
        (STUCK, {"max_epochs": 4, "plateau_monitor": "train/loss"}, [0, 0, 1, 2]),
        (STUCK, {"max_epochs": 6, "validate_every_epochs": 2}, [0, 0, 0, 0, 1, 1]),
        (STUCK, {"max_epochs": 2, "scheduler_every": "step"}, [0, 0]),
    ],
)
def test_a_schedule_steps_after_each_epoch_and_a_plateau_by_new_validations(
    scheduler, settings, halved
):
    assert logged(scheduler, **settings) == [BASE / 2**n for n in halved]


def test_a_schedule_by_step_steps_after_each_update():
    each = {"scheduler_every": "step", "log_every": 1, "max_steps": 4, "accumulate": 2}
    assert logged(HALVES, "step/lr", **each) == [BASE / 2**n for n in (0, 1, 2, 3)]


@pytest.mark.parametrize(
    "monitor, data, said",
    [
        ("val/los", Rows(), "val/los is not measured; did you mean val/loss?"),
        ("val/loss", Rows(val=False), "val/loss is not measured; did you mean train/loss?"),
    ],
)
def test_a_plateau_over_a_metric_that_is_not_there_is_refused(monitor, data, said):
    with pytest.raises(UserError) as caught:
        logged(STUCK, plateau_monitor=monitor, data=data)
    assert str(caught.value) == f"trainer.plateau_monitor={said}"


ONE_CYCLE = partial(OneCycleLR, max_lr=0.1)


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"scheduler_every": "step", "accumulate": 2}, 6),
        ({"scheduler_every": "epoch", "accumulate": 2}, 2),
        ({"scheduler_every": "step", "max_steps": 7}, 7),
        ({"scheduler_every": "step", "max_steps": 8, "max_epochs": None, "data": Streamed()}, 8),
    ],
)
def test_one_cycle_is_told_how_often_it_will_be_stepped_and_comes_to_its_end(settings, length):
    one = fitted(make=lambda: Small(scheduler=ONE_CYCLE), **settings)
    assert one.update.scheduler.total_steps == length
    assert one.update.scheduler.last_epoch == length


def test_a_length_that_was_given_is_kept():
    given = partial(ONE_CYCLE, total_steps=50)
    one = fitted(make=lambda: Small(scheduler=given), scheduler_every="step")
    assert one.update.scheduler.total_steps == 50


def test_one_cycle_over_a_stream_asks_for_its_length():
    with pytest.raises(UserError, match="^task.scheduler needs total_steps, and nothing says how"):
        by_step = {"scheduler_every": "step", "data": Streamed()}
        fitted(make=lambda: Small(scheduler=ONE_CYCLE), **by_step)


def test_a_task_may_make_its_own_optimizer_and_scheduler():
    class Own(Small):
        def configure_optimizer(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return optimizer, StepLR(optimizer, self.steps_per_epoch, gamma=0.1)

    one = fitted(Own(), scheduler_every="step", max_epochs=1)
    assert one.update.learning_rates()[""] == pytest.approx(0.05)
