"""The gradient of a trial, by a random number of each weight's: no second copy of it is held."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

WIDTH = 4096
MOST_WEIGHTS = 50_000_000  # up to which gradients are compared
FORWARD_SECONDS = 0.1
FLOORS = {torch.float64: 1e-6}  # of the whole gradient's norm, below which a weight's is rounding
FLOOR = 1e-2  # with fewer digits


@contextmanager
def projected(weights: Mapping[str, Tensor]) -> Iterator[dict[str, list[Tensor]]]:
    """Within, each backward adds what it gives to each weight, and leaves no gradient."""
    found: dict[str, list[Tensor]] = {}
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    before = {name: weight.grad for name, weight in trained.items()}
    handles = []
    for name, weight in trained.items():
        weight.grad = None
        handles.append(weight.register_post_accumulate_grad_hook(partial(_take, found, name)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for name, weight in trained.items():
            weight.grad = before[name]


def _take(found: dict[str, list[Tensor]], name: str, weight: Tensor) -> None:
    gradient = weight.grad
    weight.grad = None
    if gradient is not None:
        found.setdefault(name, []).append(_projection(gradient.detach()))


def _projection(gradient: Tensor) -> Tensor:
    """A random number of the gradient, and its norm."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    flat = gradient.reshape(-1)
    width = min(WIDTH, len(flat)) or 1
    rows = len(flat) // width
    kind = flat.dtype, flat.device
    across, along = _random(WIDTH, *kind), _random(rows + 1, *kind)
    number = flat[: rows * width].view(rows, width) @ across[:width] @ along[:rows]
    rest = flat[rows * width :]
    number = number + rest @ across[: len(rest)] * along[rows]
    return torch.stack([number, flat.norm()]).double().cpu()


@lru_cache(16)
def _random(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(device, dtype)


def gradients_apart(
    whole: dict[str, list[Tensor]], parts: dict[str, list[Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, float, float, float]]:
    """Each weight's name, its number for all rows and for the shares, and by how much of its norm
    these differ. Where neither number is finite, nothing is told: the step says it."""
    sums = {name: sum(each) for name, each in whole.items()}
    others = {name: sum(each) for name, each in parts.items()}
    norms = [_norm(sums, name) for name in sums]
    least = sum(norm**2 for norm in norms if math.isfinite(norm)) ** 0.5 * FLOORS.get(dtype, FLOOR)
    for name in {**sums, **others}:
        a, b = _number(sums, name), _number(others, name)
        if not (math.isfinite(a) or math.isfinite(b)):
            continue
        size = max(_norm(sums, name), least)
        yield name, a, b, abs(a - b) / size if size else float(a != b)


def _number(sums: Mapping[str, Any], name: str) -> float:
    return float(sums[name][0]) if name in sums else 0.0


def _norm(sums: Mapping[str, Any], name: str) -> float:
    return float(sums[name][1]) if name in sums else 0.0
