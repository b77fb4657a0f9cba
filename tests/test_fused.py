"""Fused kernels: the same weights, chosen where they can be, never against the user's word."""

from functools import partial
from typing import Any

import pytest
import torch
from small import Small, fitted
from torch import nn

from dpframe.trainer.fused import fuse

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
    assert not fuse(optimizer, nn.Linear(2, 2))
    assert optimizer.param_groups[0]["fused"] == given.get("fused")


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
    assert not fuse(optimizer, model)
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
