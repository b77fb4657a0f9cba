"""A mean over weights is exact whatever type they are of, and what has weight 0 adds nothing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recorded import weights, weights_apart
from small import Small, fitted
from torch import Tensor
from torch.utils.data import TensorDataset

from dpframe import DataModule, Strategy, UserError
from dpframe.errors import Failure
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP

# The first batch has no weight at all, the second's second half has none.
MASK = torch.tensor([0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 1])
BATCH = 4
Adam = partial(torch.optim.Adam, lr=0.01, weight_decay=0.1)


class Masked(DataModule):
    def __init__(self, mask: Tensor = MASK) -> None:
        super().__init__(BATCH, shuffle=False)
        draw = torch.Generator().manual_seed(4)
        x = torch.randn(len(mask), 3, generator=draw)
        self.columns = x, x.sum(dim=1).sin(), mask

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(*self.columns)


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


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "int64": Tensor.long,
    "float32": Tensor.float,
    "int": int,
    "one row": lambda count: count.reshape(1),
}
CASES = [  # of that type, divided by at least so much, so many batches to a step
    ("int64", 0, 1),
    ("int64", 1, 2),
    ("float32", 0, 2),
    ("float32", 1, 1),
    ("int", 0, 2),
    ("one row", 0, 1),
]


def trained(strategy: Strategy) -> dict[Any, Any]:
    found = {}
    for name, least, accumulate in CASES:
        one = fitted(
            data=Masked(),
            make=partial(Tokens, KINDS[name], least),
            strategy=strategy,
            precision="64",
            accumulate=accumulate,
            log_every=1,
        )
        found[name, least, accumulate] = weights(one.task), one.metrics["train/loss"]
    return found


def trained_in_ranks(strategy: Strategy) -> dict[Any, Any]:
    strategy.setup()
    try:
        return trained(strategy)
    finally:
        strategy.close()


def by_hand(accumulate: int) -> tuple[dict[str, Any], float]:
    """A step without any weight is one whose gradients are 0."""
    torch.manual_seed(0)
    task = Tokens().double()
    optimizer = Adam(task.parameters())
    for _ in range(2):
        total = 0.0
        for rows in torch.arange(len(MASK)).split(accumulate * BATCH):
            x, y, mask = (column[rows] for column in Masked().columns)
            x, y = x.double(), y.double()
            error = ((task.net(x)[:, 0] - y).square() * mask).sum()
            optimizer.zero_grad()
            (error / max(int(mask.sum()), 1)).backward()
            optimizer.step()
            total += error.item()
    return weights(task), total / int(MASK.sum())


@pytest.mark.parametrize(
    "strategy",
    [Strategy(), DataParallel(2, "cpu"), DataParallel(3, "cpu"), DDP(2, "cpu")],
    ids=["cpu", "data_parallel-2", "data_parallel-3", "ddp-2"],
)
def test_weights_of_every_type_and_of_0_give_the_mean_of_the_hand_written_loop(strategy):
    found = strategy.launch(trained_in_ranks, strategy)
    for case in CASES:
        mine, loss = found[case]
        wanted, mean = by_hand(case[-1])
        assert weights_apart(mine, wanted) <= 1e-12, case
        assert loss == pytest.approx(mean, rel=1e-12), case


def test_a_loss_that_is_nan_where_there_is_weight_is_still_told():
    class Bad(Tokens):
        def training_step(self, batch):
            output = super().training_step(batch)
            return {**output, "loss": output["loss"] / 0.0}

    with pytest.raises(Failure, match="^step 2: the loss is inf, rows 4 5 6 7;"):
        fitted(Bad(least=1), Masked())


def test_a_weight_with_a_gradient_is_refused():
    class Gated(Tokens):
        def training_step(self, batch):
            return {**super().training_step(batch), "weight": self.net(batch[0]).sum()}

    with pytest.raises(UserError) as caught:
        fitted(Gated(), Masked())
    assert str(caught.value) == (
        "Gated.training_step returned a 'weight' with a gradient; it only says how much the loss "
        "counts: return weight.detach()"
    )


class Sometimes(Small):
    """Its steps return a weight where the first row says so."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, y, mask = batch
        output = super().training_step((x, y))
        return {**output, "weight": 2.0} if mask[0] else output


def sometimes(strategy: Strategy) -> list[str]:
    strategy.setup()
    told = []
    try:
        for first in ([0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]):
            mask = torch.tensor([*first, 1, 1, 1, 1])
            with pytest.raises(UserError) as caught:
                fitted(Sometimes(), Masked(mask), strategy=strategy, accumulate=2)
            told.append(str(caught.value))
    finally:
        strategy.close()
    return told


@pytest.mark.parametrize(
    "strategy", [DataParallel(2, "cpu"), DDP(2, "cpu")], ids=["data_parallel", "ddp"]
)
def test_a_weight_that_some_batches_or_ranks_lack_is_refused_by_all(strategy):
    """In the first batch by an agreement, so that no rank waits for another."""
    told = strategy.launch(sometimes, strategy)
    assert set(told) == {
        "a step returned a 'weight' for some batches and none for others; return one always, "
        "or never"
    }


def test_a_validation_of_weight_0_says_so():
    class Unseen(Masked):
        def val_dataset(self):
            x, y, mask = self.columns
            return TensorDataset(x, y, 0 * mask)

    with pytest.raises(UserError) as caught:
        fitted(Tokens(), Unseen())
    assert str(caught.value) == (
        "val: the weights of all 18 rows add up to 0: there is no mean over them"
    )


def test_a_run_that_never_has_a_weight_of_0_divides_by_it_on_no_number_of_replicas():
    """A share may have none where its batch has: it is like a lent row."""
    runs = []
    for replicas in (1, 2):
        strategy = DataParallel(replicas, "cpu")
        strategy.setup()
        data = Masked(MASK[4:])
        runs.append(fitted(Tokens(), data, strategy=strategy, on_nonfinite="skip"))
    assert [run.skipped_steps for run in runs] == [0, 0]
