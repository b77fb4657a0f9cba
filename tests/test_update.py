"""Updates beside a loop by hand: of a part of the weights, of sparse gradients, of late ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recorded import Recorder, once, weights, weights_apart
from small import Hooks, Rows, Small, fitted, is_same
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpframe import DataModule, Strategy, Task
from dpframe.data import permutation
from dpframe.strategies.cpu import CPU
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP

Make = Callable[..., torch.optim.Optimizer]
SETTINGS: dict[str, Any] = {"max_epochs": 3, "precision": "64", "log_every": 1}
EXACT = 1e-12


class Words(Task):
    """An embedding and a head; `updated` are the parts that its optimiser takes.

    Where it weighs, rows whose words' mean is below `lightest` have weight 0.
    """

    smallest = 0.0  # what the sum of the weights is divided by, if it is less

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
        loss = (error.square() * weight).sum() / weight.sum().clamp(min=self.smallest)
        return {"loss": loss, "weight": weight.sum()} if self.weighs else {"loss": loss}

    def configure_optimizer(self) -> torch.optim.Optimizer:
        named = self.named_parameters()
        return self.make([weight for name, weight in named if name.startswith(self.updated)])


class Late(Small):
    """Its second layer comes into play at the second epoch."""

    epoch = 0

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        out = self.net(x)[:, 0] if self.epoch else self.net[0](x)[:, 0]
        return {"loss": (out - y).square().mean()}


class Texts(DataModule):
    def __init__(self) -> None:
        super().__init__(batch_size=8)
        draw = torch.Generator().manual_seed(3)
        words = torch.randint(0, 7, (17, 4), generator=draw)
        self.columns = words, torch.randn(17, generator=draw)

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(*self.columns)


SGD = partial(torch.optim.SGD, lr=0.3)
words = partial(Words, sparse=True, weighs=False)
dense = partial(Words, sparse=False, weighs=False)
CASES: dict[str, tuple[Callable[[], Task], dict[str, Any]]] = {
    "a part of the weights": (partial(dense, SGD, "head"), {"clip_norm": 0.1}),
    "sparse": (partial(words, SGD), {}),
    "sparse, clipped": (partial(words, SGD), {"clip_norm": 0.1, "clip_value": 0.01}),
    "sparse, accumulated": (partial(words, SGD), {"accumulate": 2, "clip_norm": 0.2}),
    "sparse, weighted": (partial(Words, SGD, sparse=True, weighs=True), {}),
    "sparse, mostly of weight 0": (
        partial(Words, SGD, sparse=True, weighs=True, lightest=3.75),
        {"clip_norm": 0.1},
    ),
    "sparse, with a momentum": (partial(words, partial(SGD, momentum=0.9)), {}),
    "sparse adam": (partial(words, torch.optim.SparseAdam, "net"), {"clip_norm": 0.1}),
    "late momentum": (partial(Late, partial(SGD, lr=0.05, momentum=0.9)), {}),
}


def data_of(name: str) -> Any:
    return Rows(17, 8, val=False) if name == "late momentum" else Texts()


@once
def by_hand(name: str) -> tuple[dict[str, Any], list[float]]:
    """Torch alone; the norm is one of all that the optimiser takes, and nothing else."""
    make, settings = CASES[name]
    torch.manual_seed(0)
    task = make().double()
    task.smallest = 1.0
    columns = [
        column.double() if column.is_floating_point() else column
        for column in data_of(name).train_dataset().tensors
    ]
    optimizer = task.configure_optimizer()
    updated = [weight for group in optimizer.param_groups for weight in group["params"]]
    norms: list[float] = []
    for epoch in range(SETTINGS["max_epochs"]):
        task.epoch = epoch
        batches = permutation(17, seed=0, epoch=epoch).split(8)
        size = settings.get("accumulate", 1)
        for start in range(0, len(batches), size):
            rows = torch.cat(batches[start : start + size])
            task.zero_grad()
            task.training_step([column[rows] for column in columns])["loss"].backward()
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
    return weights(task), norms


def trained(strategy: Strategy, name: str) -> tuple[dict[str, Any], list[float]]:
    make, settings = CASES[name]
    recorder = Recorder()
    hooks = Hooks(on_epoch_start=lambda trainer: setattr(trainer.task, "epoch", trainer.epoch))
    one = fitted(
        make=make,
        data=data_of(name),
        strategy=strategy,
        callbacks=[hooks],
        loggers=[recorder],
        **SETTINGS,
        **settings,
    )
    assert all(weight.grad is None for weight in one.task.parameters())
    logged = [numbers for _, numbers in recorder.log_]
    norms = [numbers["step/grad_norm"] for numbers in logged if "step/grad_norm" in numbers]
    return weights(one.task), norms


def all_of_them() -> dict[str, Any]:
    """Every case in one group of ranks; a group takes seconds to start."""
    strategy = DDP()
    strategy.setup()
    try:
        found = {}
        for name in CASES:
            strategy.options["find_unused_parameters"] = name == "late momentum"
            found[name] = trained(strategy, name)
        return found
    finally:
        strategy.close()


@once
def by_ranks() -> dict[str, Any]:
    return DDP(2, "cpu").launch(all_of_them)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", ["cpu", "data_parallel", "ddp"])
def test_an_update_is_the_one_by_hand(place, name):
    if place == "ddp":
        mine = by_ranks()[name]
    else:
        strategy = CPU() if place == "cpu" else DataParallel(2, "cpu")
        strategy.setup()
        mine = trained(strategy, name)
    wanted = by_hand(name)
    assert weights_apart(mine[0], wanted[0]) < EXACT
    assert mine[1] == pytest.approx(wanted[1], rel=EXACT)


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


@pytest.mark.parametrize("name", KINDS)
def test_every_stock_optimiser_goes_on_to_the_bit_in_float64(name):
    kind = partial(getattr(torch.optim, name), lr=0.01)
    make: Callable[[], Task] = partial(Flat if name == "Muon" else Small, kind)
    data: DataModule = Rows()
    if name == "SparseAdam":
        make, data = partial(words, kind, "net"), Texts()
    whole = fitted(make=make, data=data, precision="64", max_epochs=3)
    half = fitted(make=make, data=data, precision="64", max_epochs=1)
    again = fitted(make=make, data=data, precision="64", max_epochs=3, resume=half.state_dict())
    assert is_same(again.task.state_dict(), whole.task.state_dict())
    assert is_same(again.update.optimizer.state_dict(), whole.update.optimizer.state_dict())


def test_a_sparse_momentum_goes_on_to_the_bit():
    make = partial(words, partial(SGD, momentum=0.9))
    whole = fitted(make=make, data=Texts(), precision="64", max_epochs=3)
    half = fitted(make=make, data=Texts(), precision="64", max_epochs=1)
    again = fitted(make=make, data=Texts(), precision="64", max_epochs=3, resume=half.state_dict())
    assert is_same(again.task.state_dict(), whole.task.state_dict())
