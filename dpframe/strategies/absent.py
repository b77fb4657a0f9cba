"""Ranks without a row of a batch call the blocks that one with rows calls, and add nothing."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpframe.data.module import leaves

END = "."  # of what that rank tells of a pass; the weights that its loss leaves out follow
Named = tuple[int, str]
"""A weight: the number of its block, or ROOT, and its name there."""
ROOT = -1


@dataclass
class Calls:
    """The side of the rank that tells: each call of a block, when it comes."""

    store: dist.Store
    name: str
    keys: list[str]
    count: int = 0

    def hook(self, number: int) -> Callable[..., None]:
        """A hook in front of a block."""

        def tell(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [value for value in leaves([args, kwargs]) if isinstance(value, Tensor)]
            has_gradient = any(tensor.requires_grad for tensor in tensors)
            self._say(str(number) + "+" * (has_gradient and torch.is_grad_enabled()))

        return tell

    def end(self, left_out: list[Named]) -> None:
        self._say(END + json.dumps(left_out))

    def _say(self, value: str) -> None:
        key = f"{self.name}/{self.count}"
        self.store.set(key, value)
        self.keys.append(key)
        self.count += 1


def follow(
    store: dist.Store, name: str, blocks: list[Any], rest: dict[str, Tensor], device: torch.device
) -> Tensor:
    """Calls the same blocks without a batch; the loss is 0, and so is each gradient of it. `rest`
    are the weights that are in no block."""
    nothing = torch.zeros((), device=device)
    left_out: set[Named] = set()
    first = zero = _zero_of(ROOT, rest, left_out, nothing)
    ends, number = [], 0
    while not (said := store.get(f"{name}/{number}").decode()).startswith(END):
        has_gradient = said.endswith("+")  # of what is before this block
        if not has_gradient:
            ends.append(zero)
            zero = nothing
        elif not zero.requires_grad:
            zero = first
        index = int(said.rstrip("+"))
        zero = blocks[index].gathered(_zero_of_block, index, blocks[index], left_out, zero)
        number += 1
    left_out |= {(index, weight) for index, weight in json.loads(said[len(END) :])}
    return Zero.apply([], left_out, zero, first, *ends)


def _zero_of_block(index: int, block: nn.Module, left_out: set[Named], zero: Tensor) -> Tensor:
    return _zero_of(index, dict(block.named_parameters()), left_out, zero)


def _zero_of(index: int, weights: dict[str, Tensor], left_out: set[Named], zero: Tensor) -> Tensor:
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    return Zero.apply([(index, name) for name in trained], left_out, *trained.values(), zero)


class Zero(torch.autograd.Function):
    """0, whose gradients are zeros: a rank that has none would leave the others waiting. Weights
    that the others' losses leave out have none."""

    @staticmethod
    def forward(ctx: Any, named: list[Named], left_out: set[Named], *tensors: Tensor) -> Tensor:
        ctx.named, ctx.left_out = named, left_out
        ctx.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return tensors[-1].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        zeros: list[Any] = [torch.zeros(f, dtype=t, device=place) for f, t, place in ctx.forms]
        for place, named in enumerate(ctx.named):
            if named in ctx.left_out:
                zeros[place] = None
        return None, None, *zeros


def find_reached(loss: Any) -> set[int]:
    """The ids of the weights that get a gradient of this loss."""
    found: set[int] = set()
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return found
