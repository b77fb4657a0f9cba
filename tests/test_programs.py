"""Programs as users write them, in small: on each strategy they are right, or noticed.

They are the steps of Lightning's, bolts', PyTorch's and nanoGPT's examples, and of DETR, PPO and a
fine-tuning of Hugging Face's that are right on one replica.
"""

from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from small import Adam, fitted
from test_share_check import (
    HONEST,
    NOTICED,
    Made,
    Step,
    advantages,
    contrasts,
    error,
    token_mean,
    token_weight,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from dpframe import Strategy, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU


class Plain(Step):
    """Without dropout, and with what the programs below keep."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.net[2].p = 0.0
        self.slow = nn.Linear(6, 1).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(4))


def vae(task, x, y, labels):
    """The sum over rows and pixels of pytorch/examples, over the whole batch."""
    noise = 0.1 * task.randn_rows(*x.shape).to(x)
    return (task.net(x + noise) - y).square().sum() * task.batch_rows / len(x)


def detr(task, x, y, labels):
    boxes, found = task.net(x)[labels[:, 0] > 1], y[labels[:, 0] > 1]
    counts = {"cls": (error(task, x, y).mean(), len(x))}
    return {"loss": {**counts, "box": (functional.l1_loss(boxes, found), len(boxes))}}


def diffusion(task, x, y, labels):
    level = task.rand_rows(len(x), 1).to(x)
    noise = task.randn_rows(*x.shape).to(x)
    return (task.net(level * x + (1 - level) * noise) - noise[:, :1]).square().mean()


def moco(task, x, y, labels):
    """Keys of a slow network are queued in a buffer, of all replicas' rows."""
    keys = task.all_gather(task.slow(x))[:4, 0].detach()
    scores = task.net(x) * task.queue.clone()
    task.queue.copy_(keys)
    return scores.square().mean() + error(task, x, y).mean()


def distilled(task, x, y, labels):
    return (task.net(x) - task.slow(x)).square().mean()


def maml(task, x, y, labels):
    """A step of each row's own, through which the loss is differentiated."""
    weights = dict(task.net.named_parameters())
    inner = functional_call(task.net, weights, (x,)).square().mean()
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    size = sum(slope.square().sum() for slope in slopes)
    return error(task, x, y).mean() + 0 * size


def lstm(task, x, y, labels):
    """What the step before has left in an attribute counts nothing for the loss."""
    task.center = task.net(x).mean().detach()
    return error(task, x, y).mean()


def byol(task, x, y, labels):
    """Moves the weights of its slow network itself."""
    if task.training:
        with torch.no_grad():
            task.slow.weight.lerp_(task.net[0].weight[:1], 0.1)
    return distilled(task, x, y, labels)


RIGHT = HONEST | {
    "vae": vae,
    "detr": detr,
    "diffusion": diffusion,
    "moco": moco,
    "lstm": lstm,
    "maml": maml,
    "distillation": distilled,
    "fine-tuning": token_weight,
}
WRONG = NOTICED | {"segmentation": token_mean, "ppo": advantages, "simclr": contrasts}
DRAWN = {"noise and dropout"}  # by torch, otherwise on each number of replicas
CHANGED = {"moco", "gathered rows in attributes"}  # buffers, by each replica of a process


def trained(make: Any, strategy: Strategy) -> Any:
    torch.manual_seed(0)
    try:
        made = fitted(make(), Made(), strategy=strategy, precision="64", max_epochs=2)
    except UserError as error:
        return str(error)
    state: Any = made.task.state_dict()
    if strategy.sharding.cuts:
        state = strategy.sharding.whole(state, for_all=True)
    return {name: tensor.clone() for name, tensor in state.items()}, made.metrics


class Turns(Plain):
    """A GAN: noise in both turns, and a mean each."""

    def __init__(self) -> None:
        super().__init__(None)
        self.critic = nn.Linear(6, 1)

    def configure_optimizer(self) -> Any:
        return {name: Adam(getattr(self, name).parameters()) for name in ("net", "critic")}

    def training_step(self, batch: list[Tensor], turn: str) -> dict[str, Any]:  # type: ignore[override]
        fake = batch[0] * self.net(self.randn_rows(*batch[0].shape).to(batch[0]))
        if turn == "net":
            return {"loss": functional.softplus(-self.critic(fake)).mean()}
        real, drawn = self.critic(batch[0]), self.critic(fake.detach())
        return {"loss": (functional.softplus(-real) + functional.softplus(drawn)).mean()}

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": self.critic(batch[0]).mean()}


MAKES: dict[str, Any] = {name: partial(Plain, of) for name, of in (RIGHT | WRONG).items()}
del MAKES["a slope"]  # of a bias that has no gradient, which the ranks can't share
MAKES |= {"gan": Turns, "byol": partial(Plain, byol)}


def all_of_them(strategy: Strategy) -> dict[str, Any]:
    return {name: trained(make, strategy) for name, make in MAKES.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    with CPU() as strategy:
        return all_of_them(strategy)


@pytest.mark.parametrize(
    "strategy",
    [DataParallel(2, "cpu"), DDP(2, "cpu"), DDP(3, "cpu"), FSDP(2, "cpu")],
    ids=["data_parallel-2", "ddp-2", "ddp-3", "fsdp-2"],
)
def test_a_program_is_right_or_noticed(strategy, alone):
    found = on(strategy, all_of_them)
    is_shared = strategy.name == "DataParallel"
    noticed = {name for name, result in found.items() if isinstance(result, str)}
    assert noticed == {*WRONG} | ({"byol"} if strategy.name != "DDP" else set())
    for name in WRONG:
        assert "depends on how its rows are shared" in found[name]
    for name in found.keys() - noticed - DRAWN - (CHANGED if is_shared else set()):
        (state, metrics), (expected, numbers) = found[name], alone[name]
        for key, weight in expected.items():
            assert torch.allclose(state[key], weight, rtol=0, atol=1e-11), (name, key)
        assert metrics == pytest.approx(numbers, rel=1e-9), name


def test_all_are_right_on_one_replica(alone):
    assert [name for name, result in alone.items() if isinstance(result, str)] == []
