"""Channels-last memory: where it is chosen, that it changes no maths, and what files hold of it."""

from functools import partial
from typing import Any

import pytest
import torch
from small import Given, fitted, is_same, trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dpframe
from dpframe.strategies.data_parallel import DataParallel
from dpframe.trainer.compute.placement import CHANNELS_LAST, align


class Net(dpframe.Task):
    """Three colours, so that the two layouts are not the same."""

    def __init__(self, *more: nn.Module, make: Any = torch.optim.SGD) -> None:
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), *more, nn.AvgPool2d(2), nn.Conv2d(8, 6, 3)]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, 2))
        super().__init__(net, partial(make, lr=0.05, **MOMENTUM[make]))

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(self.net(batch[0]), batch[1])}

    def predict_step(self, batch: Any) -> Tensor:
        return self.net(batch[0])


MOMENTUM: dict[Any, dict[str, Any]] = {
    torch.optim.SGD: {"momentum": 0.9},
    torch.optim.AdamW: {"amsgrad": True},
}


def images() -> Given:
    x = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(x, (x.mean((1, 2, 3)) > 0.5).long())
    return Given(rows, rows, 8)


def is_turned(weight: Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def net_of(*more: nn.Module, **settings: Any) -> Any:
    return trainer(make=lambda: Net(*more), data=images(), **settings)


def test_convolutions_alone_are_turned_and_only_where_they_are_told_to_be():
    made = net_of(nn.GroupNorm(2, 8), channels_last=True)
    assert made.layout == CHANNELS_LAST
    first, second, linear = (p for p in made.task.parameters() if p.ndim > 1)
    assert is_turned(first) and is_turned(second) and linear.is_contiguous()
    shape = (8, 3, 3, 3)
    assert first.shape == shape
    for settings in ({}, {"channels_last": False}):
        made = net_of(**settings)
        assert made.layout == "" and all(p.is_contiguous() for p in made.task.parameters())
    assert trainer(channels_last=True).layout == ""  # it has no convolution


@pytest.mark.parametrize("colours, size", [(1, 3), (3, 1)])
def test_what_a_convolution_makes_is_turned_though_its_weights_look_alike_either_way(colours, size):
    """One colour, or kernels of one pixel: only the strides tell, and torch goes by these."""
    task = Net()
    task.net[0] = nn.Conv2d(colours, 8, size)
    made = trainer(task, images(), channels_last=True)
    rows = torch.rand(4, colours, 8, 8)
    assert is_turned(task.net[0](rows)) and made.layout == CHANNELS_LAST


@pytest.mark.parametrize("make", MOMENTUM)
def test_either_layout_trains_and_predicts_alike(make):
    runs = [
        fitted(make=partial(Net, make=make), data=images(), precision="64", channels_last=turned)
        for turned in (False, True)
    ]
    assert [is_turned(run.task.net[0].weight) for run in runs] == [False, True]
    one, other = ((run.task.state_dict(), run.predict().joined()) for run in runs)
    torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", MOMENTUM)
@pytest.mark.parametrize("first, then", [(False, True), (True, False), (True, True)])
def test_a_checkpoint_of_either_layout_is_gone_on_with_in_either(first, then, make):
    run = partial(fitted, make=partial(Net, make=make), data=images(), precision="64")
    whole = run(max_epochs=4, channels_last=then)
    half = run(max_epochs=2, channels_last=first)
    again = run(max_epochs=4, channels_last=then, resume=half.state_dict())
    assert is_turned(again.task.net[0].weight) is then
    mine, wanted = again.task.state_dict(), whole.task.state_dict()
    torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)
    assert is_same(mine, wanted) or first is not then


def test_what_an_optimiser_has_loaded_lies_as_its_weight_does():
    weight = torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    numbers = torch.rand(4, 3, 2, 2)
    optimizer.state[weight] = {"momentum_buffer": numbers, "step": torch.tensor(1.0)}
    align(optimizer)
    kept = optimizer.state[weight]["momentum_buffer"]
    assert kept.stride() == weight.stride() and torch.equal(kept, numbers)


def test_replicas_compute_what_one_does_turned():
    run = partial(fitted, make=Net, data=images(), channels_last=True, precision="64")
    one, three = run(), run(strategy=DataParallel(3, "cpu"))
    torch.testing.assert_close(
        three.task.state_dict(), one.task.state_dict(), rtol=1e-9, atol=1e-12
    )


def test_volumes_are_turned_too():
    task = nn.Sequential(nn.Conv3d(2, 4, 2), nn.Flatten())

    class Volumes(dpframe.Task):
        def __init__(self) -> None:
            super().__init__(task)

    weight = trainer(make=Volumes, data=images(), channels_last=True).task.net[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert not weight.is_contiguous()
