"""BatchNorm of the global batch: on any number of replicas it is that of one process."""

from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from recorded import once
from small import Given, Small, fitted
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dpframe import Strategy
from dpframe.layers.exact import GlobalBatchNorm, convert
from dpframe.strategies import CPU, DDP, FSDP, DataParallel, SingleGPU

EXACT = 1e-12
ROWS, SIZE = 21, 6  # the last batch has three rows


class Activated(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: it calls the function itself, and then something else."""

    def forward(self, x: Tensor) -> Tensor:
        own = self.running_mean, self.running_var, self.weight, self.bias, self.training
        return F.relu(F.batch_norm(x, *own, momentum=0.2, eps=self.eps))


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


def image_net(norm: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm(4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 1))


def frozen(norm: nn.Module) -> nn.Module:
    return norm.eval()


NETS = {
    "1d": lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
    "1d of a sequence": lambda: nn.Sequential(
        nn.Flatten(2), nn.BatchNorm1d(2), nn.Tanh(), nn.Flatten(), nn.Linear(50, 1)
    ),
    "2d": lambda: image_net(nn.BatchNorm2d),
    "3d": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 1)), nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(50, 1)
    ),
    "without weights": lambda: image_net(partial(nn.BatchNorm2d, affine=False)),
    "without a bias": lambda: image_net(partial(nn.BatchNorm2d, bias=False)),
    "cumulative": lambda: image_net(partial(nn.BatchNorm2d, momentum=None)),
    "untracked": lambda: image_net(partial(nn.BatchNorm2d, track_running_stats=False)),
    "synced": lambda: image_net(nn.SyncBatchNorm),
    "of a library": lambda: image_net(Activated),
    "frozen": lambda: image_net(lambda n: frozen(nn.BatchNorm2d(n))),
    "channels_last": lambda: nn.Sequential(ChannelsLast(), *image_net(nn.BatchNorm2d)),
}


def images() -> TensorDataset:
    """Their mean is a thousand times their deviation."""
    x = torch.randn(ROWS, 2, 5, 5, generator=torch.Generator().manual_seed(3)).double()
    return TensorDataset(x + 10 * x.mean(dim=(2, 3), keepdim=True), x.sum(dim=(1, 2, 3)) / 10)


OPTIMIZER = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
SETTINGS: dict[str, Any] = {"precision": "64", "max_epochs": 2, "batch_norm": "global"}


def trained(strategy: Strategy, name: str = "2d", **settings: Any) -> tuple[Any, Any, str]:
    """The state, the metrics, and what the banner says."""
    make = lambda: Small(OPTIMIZER, net=NETS[name]())  # noqa: E731
    data = Given(images, images, SIZE)
    made = fitted(make=make, data=data, strategy=strategy, **SETTINGS | settings)
    state = made.whole_state_dict(made.task)
    return {k: v.cpu().double() for k, v in state.items()}, made.metrics, made.training.own


WAYS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in NETS},
    "accumulated": {"accumulate": 3},
    "computed again": {"checkpoint_activations": ["net.1", "net.2"]},
}


@once
def everywhere(place: str) -> dict[str, Any]:
    strategies = {"ddp-2": DDP(2, "cpu"), "ddp-4": DDP(4, "cpu"), "fsdp": FSDP(2, "cpu")}
    return on(strategies[place], all_ways)


def all_ways(strategy: Strategy) -> dict[str, Any]:
    return {way: trained(strategy, **options) for way, options in WAYS.items()}


@once
def one_process() -> dict[str, Any]:
    return all_ways(CPU())


def distance(one: Any, other: Any) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("replicas", [2, 4])
def test_virtual_replicas_are_as_one_process(way, replicas):
    state, metrics, own = trained(DataParallel(replicas, "cpu"), **WAYS[way])
    wanted, numbers, _ = one_process()[way]
    assert own == "" and distance(state, wanted) < EXACT
    assert metrics["val/loss"] == pytest.approx(numbers["val/loss"], rel=EXACT)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["ddp-2", "ddp-4", "fsdp"])
def test_ranks_are_as_one_process_also_where_one_has_no_row(place, way):
    state, metrics, own = everywhere(place)[way]
    wanted, numbers, _ = one_process()[way]
    assert own == "" and distance(state, wanted) < EXACT
    assert metrics["val/loss"] == pytest.approx(numbers["val/loss"], rel=EXACT)


def test_each_replicas_own_statistics_are_others():
    state, _, own = trained(DataParallel(2, "cpu"), batch_norm="replica")
    assert distance(state, one_process()["2d"][0]) > 1e-3
    assert own == "1 BatchNorm layer sees each replica's rows alone: trainer.batch_norm=global"


def test_classes_are_torchs_own_again_and_names_stay():
    net = image_net(nn.BatchNorm2d)
    names = list(net.state_dict())
    convert(net, batch_norm=True, dropout=True)
    assert isinstance(net[1], GlobalBatchNorm) and isinstance(net[1], nn.BatchNorm2d)
    assert repr(net[1]).startswith("BatchNorm2d(") and list(net.state_dict()) == names
    convert(net, batch_norm=False, dropout=False)
    assert type(net[1]) is nn.BatchNorm2d


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind",
    [SingleGPU, DataParallel, DDP, pytest.param(FSDP, marks=pytest.mark.frees_by_waits)],
)
def test_gpus_are_as_one_process_on_the_cpu(kind):
    """Within the rounding of other kernels."""
    found = on(kind(accelerator="cuda"), all_ways)
    for way, (state, metrics, own) in found.items():
        wanted, numbers, _ = one_process()[way]
        assert own == "" and distance(state, wanted) < 1e-10, way
        assert metrics["val/loss"] == pytest.approx(numbers["val/loss"], rel=1e-9)
