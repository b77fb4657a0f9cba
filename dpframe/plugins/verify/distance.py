"""How far two runs are apart: the largest relative difference, and where it is."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

INFINITY = float("inf")
LEAST = 1e-3  # of the largest number, which others count as at least
ROUNDINGS = 16  # roundings that may add up in a mean of rounded numbers
Log = dict[str, list[tuple[int, float]]]
"""By name, the points of a curve: a step, and the number that was logged."""
Weights = dict[str, Tensor]
Outputs = list[tuple[int, dict[str, Any]]]
"""What each batch's step returned, by the rows of the batch."""


class Apart(NamedTuple):
    """`where` continues a sentence, e.g. "most in net.0.weight"; empty within the tolerance."""

    most: float
    where: str = ""


class Curve(NamedTuple):
    """What a training logs and the weights it ends with."""

    log: Log
    weights: Weights
    rounding: Mapping[str, float] = {}  # the relative error of each metric that the task rounds


def weights_apart(actual: Weights, expected: Weights, tolerance: float) -> Apart:
    """Tensor by tensor in their order: another check compares their names."""
    if [t.shape for t in actual.values()] != [t.shape for t in expected.values()]:
        return Apart(INFINITY, f"these are not the task's own tensors: {', '.join(actual)}")
    pairs = zip(actual.values(), expected.items(), strict=True)
    # A tensor that is 0 but for rounding, e.g. a bias before a BatchNorm, has no size of its own.
    sizes = [float(its.abs().max()) for its in expected.values() if its.numel()]
    floor = LEAST * max(filter(math.isfinite, sizes), default=0.0)
    apart = [(largest(relative(mine, its, floor=floor)), name) for mine, (name, its) in pairs]
    most, name = max(apart, default=(0.0, ""))
    return Apart(most, "" if most <= tolerance else f"most in {name}")


def logs_apart(actual: Log, expected: Curve, names: Iterable[str], tolerance: float) -> Apart:
    """Where they first differ: later numbers follow from that one."""
    most, firsts = 0.0, []
    for name in sorted(names):
        mine, its = actual.get(name, []), expected.log[name]
        if [step for step, _ in mine] != [step for step, _ in its]:
            return Apart(INFINITY, f"{len(mine)} points of {name} were logged, {len(its)} are due")
        rounding = _rounding_of(name, expected.rounding)
        # A number that is nearly 0 by chance, e.g. the loss of one row, lacks its last digits.
        least = 1.0 if rounding else LEAST
        apart = relative([value for _, value in mine], [value for _, value in its], least)
        most = max(most, largest(apart))
        for i in (apart > max(tolerance, rounding)).nonzero().flatten().tolist()[:1]:
            step, value = mine[i]
            firsts.append((step, f"{name} at step {step}: {value}, not {its[i][1]}"))
    return Apart(most, f"first apart in {min(firsts)[1]}" if firsts else "")


def _rounding_of(name: str, rounding: Mapping[str, float]) -> float:
    """The rounding of a logged number, which `summarize` may have made of any measured one."""
    measured = name.partition("/")[2]
    if measured in ("lr", "grad_norm"):
        return 0.0
    return ROUNDINGS * rounding.get(measured, max(rounding.values(), default=0.0))


def nests_apart(actual: Any, expected: Any, tolerance: float = 0.0) -> str:
    """Where two nests of containers first differ; empty if they don't."""
    mine, its = _leaves(actual), _leaves(expected)
    unlike = (name for name in its | mine if not _is_near(mine.get(name), its.get(name), tolerance))
    return next(unlike, "")


def _is_near(actual: Any, expected: Any, tolerance: float) -> bool:
    if not isinstance(actual, float | Tensor) or not isinstance(expected, float | Tensor):
        return actual == expected
    if torch.as_tensor(actual).shape != torch.as_tensor(expected).shape:
        return False
    rounding = ROUNDINGS * rounding_of(expected) if tolerance else 0.0
    return largest(relative(actual, expected)) <= max(tolerance, rounding)


def _leaves(nest: Any, name: str = "all") -> dict[str, Any]:
    """What the containers hold, by a dotted name; and the length of each list."""
    if isinstance(nest, dict):
        parts = nest
    elif isinstance(nest, list | tuple):
        parts = {**dict(enumerate(nest)), "length": len(nest)}
    else:
        return {name: nest}
    prefix = "" if name == "all" else f"{name}."
    return {key: leaf for at in parts for key, leaf in _leaves(parts[at], f"{prefix}{at}").items()}


def roundings(outputs: Outputs) -> dict[str, float]:
    """The relative error of each metric: of one number it may look larger than it is."""
    names = {name for _, output in outputs for name in output}
    return {
        name: min(rounding_of(output[name]) for _, output in outputs if name in output)
        for name in names - {"weight"}
    }


def rounding_of(value: Any) -> float:
    """What a float32 can hold may have been one before `.item()` or `.double()`."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return torch.finfo(value.dtype).eps
    number = torch.as_tensor(value, dtype=torch.float64)
    return torch.finfo(torch.float32).eps if torch.equal(number.float().double(), number) else 0.0


def relative(actual: Any, expected: Any, least: float = 1.0, floor: float = 0.0) -> Tensor:
    """Elementwise, to the expected number or at least to this part of the largest of all, and to
    `floor`."""
    mine, its = (torch.as_tensor(value, dtype=torch.float64).cpu() for value in (actual, expected))
    size = its.abs().nan_to_num()
    if its.numel():
        size = size.clamp(min=max(least * float(size.max()), floor))
    apart = (mine - its).abs() / torch.where(size == 0, 1.0, size)
    apart = torch.where(mine.isnan() & its.isnan(), 0.0, apart)  # both say: there is no number
    return apart.nan_to_num(nan=INFINITY, posinf=INFINITY)


def largest(apart: Tensor) -> float:
    return float(apart.max()) if apart.numel() else 0.0
