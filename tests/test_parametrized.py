"""Modules with parametrizations, and those that no process can get, in a Trainer's ranks."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from small import SGD, Rows, Small, is_same, trainer
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from dpframe import Trainer, UserError
from dpframe.launch.interpreter import pack, unpack
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


class Normed(Small):
    def __init__(self, net: Any = None) -> None:
        super().__init__()
        self.net = net or nn.Sequential(
            spectral_norm(nn.Linear(3, 4)),
            weight_norm(nn.Linear(4, 4)),
            orthogonal(nn.Linear(4, 4)),
            nn.Linear(4, 1),
        )
        self.optimizer = SGD


def shared() -> nn.Module:
    """Two parametrizations of one weight, one of a bias, a hook, and a weight in two layers."""
    first, last = spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 3)
    parametrize.register_parametrization(first, "weight", Scaled())
    parametrize.register_parametrization(first, "bias", Scaled())
    last.weight = first.parametrizations.weight.original
    first.register_forward_hook(doubled)
    return nn.Sequential(first, last, first)


def doubled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 2 * out


@pytest.mark.parametrize("copied", [lambda net: unpack(pack(net)), deepcopy])
def test_a_parametrized_module_arrives_as_it_was(copied):
    torch.manual_seed(0)
    net = shared()
    there = copied(net)
    x = torch.randn(2, 3)
    assert is_same(there.state_dict(), net.state_dict())
    assert list(dict(there.named_parameters())) == list(dict(net.named_parameters()))
    assert there[0] is there[2] and there[1].weight is there[0].parametrizations.weight.original
    assert repr(there) == repr(net)
    for _ in range(2):  # u and v move
        assert torch.equal(there(x), net(x))
    assert is_same(there.state_dict(), net.state_dict())
    with torch.no_grad():
        there[0].bias = torch.ones(3)
    assert torch.equal(there[0].bias, torch.ones(3))
    assert not torch.equal(net[0].bias, there[0].bias)
    parametrize.remove_parametrizations(there[0], "weight")
    assert parametrize.is_parametrized(net[0], "weight")


@pytest.mark.parametrize("strategy", [DDP(2, "cpu"), FSDP(2, "cpu")])
def test_a_parametrized_task_trains_on_ranks_of_a_program_as_on_one_process(strategy):
    made = []
    for given in (CPU(), strategy):
        torch.manual_seed(0)
        one = Trainer(Normed(), Rows(), strategy=given, max_epochs=2, precision="64")
        one.fit()
        made.append(one.task)
    alone, several = (task.state_dict() for task in made)
    assert list(alone) == list(several)
    for name in alone:
        torch.testing.assert_close(several[name], alone[name], rtol=1e-9, atol=1e-11)


class Kept(Small):
    def __init__(self) -> None:
        super().__init__()
        self.made = {"by": [1, (number for number in range(2))]}


SENT = "{} can't be sent to the ranks of DDP: {}"
WAY = "; start them by the command or by torchrun, where each makes its own"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Normed(torch.jit.script(nn.Sequential(nn.Linear(3, 1)))),
         ("Trainer.task.net, a RecursiveScriptModule,", "Tried to serialize object")),
        (Kept, ("Trainer.task.made.by.1, a generator,", "cannot pickle 'generator' object")),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_no_rank_can_get_is_named_in_one_line(make, said):
    with pytest.raises(UserError) as caught:
        trainer(make(), strategy=DDP(2, "cpu")).fit()
    (line,) = str(caught.value).splitlines()
    assert line.startswith(SENT.format(*said)) and line.endswith(WAY)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("strategy", [CPU, partial(DataParallel, 2), partial(DDP, 2, "cpu")])
def test_a_layer_without_weights_is_one_line(strategy):
    task = Small()
    task.net = nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d(), nn.LazyLinear(1))
    with pytest.raises(UserError) as caught:
        trainer(task, strategy=strategy()).fit()
    assert str(caught.value) == (
        "net.1, a LazyBatchNorm1d, has no weights yet; call the network once on a row in the "
        "task's __init__, e.g. self.net(torch.zeros(1, 8)), or give the layer its sizes"
    )
