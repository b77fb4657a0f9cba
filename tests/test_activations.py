"""Activations that are computed again: the same numbers to the bit, less memory, the same names."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from small import SGD, Rows, Small, fitted, is_same, trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dpframe import Strategy, TrainerSettings, UserError
from dpframe.modes.measure import Probe
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU
from dpframe.trainer.compute.activations import KEY, Recomputed, drop_activations

WIDTH = 8


class Block(nn.Module):
    """Random numbers, running statistics, a keyword: what a second forward could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        layers = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.mlp = nn.Sequential(*layers)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.last(x)


class Deep(Small):
    def __init__(self, make: Callable[[], nn.Module] = Net) -> None:
        super().__init__(partial(SGD, lr=0.005, momentum=0.9))
        self.net = make()


BLOCKS = ["net.blocks.0", "net.blocks.1", "net.blocks.2"]


def trained(strategy: Strategy, **given: Any) -> dict[str, Any]:
    data = Rows(24, batch_size=8)
    one = fitted(make=Deep, data=data, strategy=strategy, precision="64", **given)
    return {"task": dict(one.task.state_dict()), "metrics": one.metrics}


def both(strategy: Strategy) -> list[dict[str, Any]]:
    return [trained(strategy, checkpoint_activations=choice) for choice in (None, True)]


@pytest.mark.parametrize("strategy", [CPU(), DataParallel(2, "cpu"), DDP(2, "cpu")])
def test_numbers_names_and_running_statistics_are_those_of_activations_that_are_kept(strategy):
    kept, again = on(strategy, both)
    assert is_same(again, kept)


class Mixing(nn.Module):
    """Draws for its rows, and looks at those of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, task: Any) -> Tensor:
        x = self.inner(x + 0.1 * task.randn_rows(*x.shape))
        rows = task.all_gather(x)
        weights = (x @ rows.T * torch.full((), 0.1)).softmax(1)  # of the default type
        return x + weights @ task.all_gather(torch.tanh(x)) + 0.1 * task.rand_rows(len(x), 1)


class Mixed(Small):
    def __init__(self) -> None:
        super().__init__(partial(SGD, lr=0.01))
        del self.net
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList([Mixing(), Mixing()])

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x = self.first(batch[0])
        for block in self.blocks:
            x = self._called(block, x)
        return {"loss": (self.last(x)[:, 0] - batch[1]).square().mean()}

    def _called(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, self)


class ByHand(Mixed):
    def _called(self, block: nn.Module, x: Tensor) -> Tensor:
        contexts = self.checkpoint_contexts
        return checkpoint(block, x, self, use_reentrant=False, context_fn=contexts)


def mixed(strategy: Strategy) -> list[dict[str, Any]]:
    found = []
    for make, choice in ((Mixed, None), (Mixed, ["blocks"]), (ByHand, None)):
        run = fitted(
            make=make,
            data=Rows(24, batch_size=8),
            strategy=strategy,
            precision="64",
            checkpoint_activations=choice,
            accumulate=2,
        )
        found.append({"task": dict(run.task.state_dict()), "metrics": run.metrics})
    return found


@pytest.mark.gpu(2)
def test_threads_of_gpus_draw_and_gather_again_as_in_the_forward():
    """They add up gradients in any order."""
    kept, again, by_hand = mixed(DataParallel([0, 1], "cuda"))
    for found in (again, by_hand):
        for name, weight in kept["task"].items():
            torch.testing.assert_close(found["task"][name], weight, rtol=0, atol=1e-14)


@pytest.mark.parametrize("strategy", [CPU(), DataParallel(3, "cpu"), DDP(2, "cpu")])
def test_what_is_computed_again_draws_and_gathers_as_in_the_forward(strategy):
    kept, again, by_hand = on(strategy, mixed)
    assert is_same(again, kept) and is_same(by_hand, kept)


def test_a_block_may_be_computed_again_several_times():
    task = Mixed()
    drop_activations(task, ["blocks"])
    loss = task.training_step([torch.ones(4, 3), torch.ones(4)])["loss"]
    weights = [*task.parameters()]
    first, second = (torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2))
    assert is_same(first, second)


class InPlace(Mixed):
    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x).mul_(2.0)


def test_rows_that_are_changed_where_they_were_gathered_are_refused_in_one_line():
    with pytest.raises(UserError, match="InPlace changes in place what self.all_gather gave to a"):
        fitted(
            InPlace(),
            Rows(24, batch_size=8),
            strategy=DataParallel(2, "cpu"),
            checkpoint_activations=["blocks"],
            share_check="off",
        )


def test_it_resumes_to_the_bit_with_or_without():
    whole = trained(CPU(), checkpoint_activations=True)
    half = partial(fitted, make=Deep, data=Rows(24, batch_size=8), precision="64", max_epochs=1)
    for first, then in ((True, None), (None, True)):
        state = half(checkpoint_activations=first).state_dict()
        assert is_same(trained(CPU(), checkpoint_activations=then, resume=state), whole)


def test_a_block_keeps_its_inputs_alone():
    def bytes_of(**given: Any) -> int:
        probe = Probe(accelerator="cpu")
        probe.kept = {}
        with saved_tensors_hooks(probe.keep, lambda tensor: tensor):
            fitted(Deep(partial(Net, 6)), Rows(24, batch_size=8), strategy=probe, **given)
        return max(probe.held)

    kept, again = bytes_of(), bytes_of(checkpoint_activations=True)
    # x and y, each block's input, the last layer's, and the error; and each block's random state.
    assert again <= 8 * 4 * (3 + 1 + 7 * WIDTH + 1) + 100
    assert kept > 4 * again


@pytest.mark.parametrize(
    "choice, names",
    [
        (True, BLOCKS),
        ("net.blocks", BLOCKS),
        (["net.blocks.*"], BLOCKS),
        (["net.blocks.[01]", "net.last"], [*BLOCKS[:2], "net.last"]),
        (["*.mlp"], [f"{name}.mlp" for name in BLOCKS]),
        (False, []),
        (None, []),
    ],
)
def test_patterns_choose_the_outermost_modules_and_only_the_last_choice_counts(choice, names):
    task = Deep()
    drop_activations(task, ["net"])
    assert drop_activations(task, choice) == names
    changed = [name for name, module in task.named_modules() if isinstance(module, Recomputed)]
    assert sorted(changed) == sorted(names)
    assert all(type(block).__name__ == "Block" for block in task.net.blocks)
    assert is_same(copy.deepcopy(task).state_dict(), task.state_dict())


def stages(*, deep: bool) -> nn.Module:
    """Blocks in lists of lists, as torchvision's ResNets have them; or layers in lists."""
    parts = [nn.Sequential(Block(), Block()) if deep else nn.Sequential(nn.Linear(1, 1))]
    return nn.Sequential(nn.Linear(3, 3), *parts)


def test_true_are_blocks_in_lists_and_in_lists_of_lists():
    assert drop_activations(Deep(partial(stages, deep=True)), True) == ["net.1.0", "net.1.1"]
    assert drop_activations(Deep(partial(stages, deep=False)), True) == ["net.1"]


@pytest.mark.parametrize(
    "make, choice, said",
    [
        (Deep, ["net.block.*"], "=net.block.* matches no module of Deep; did you mean net.blocks?"),
        (Deep, "zz", "=zz matches no module of Deep; there is, e.g., net"),
        (
            Small,
            True,
            "=true finds no blocks in Small: no module that is made of others lies in a ",
        ),
    ],
)
def test_what_chooses_nothing_is_refused_before_training(make, choice, said):
    with pytest.raises(UserError) as caught:
        trainer(make(), checkpoint_activations=choice).prepare()
    assert str(caught.value).startswith(KEY + said)
    with pytest.raises(UserError, match=f"{KEY}=3 is neither true, null nor names of modules"):
        TrainerSettings(checkpoint_activations=3)


def test_nothing_is_computed_twice_without_a_gradient():
    task = Deep()
    drop_activations(task, True)
    calls: list[int] = []
    task.net.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        task.net(torch.randn(4, 3))
    assert len(calls) == 1
    task.net(torch.randn(4, 3)).sum().backward()
    assert len(calls) == 3
