"""How far two runs are apart: the largest relative difference, and where it is."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Log = list[tuple[int, dict[str, float]]]
Weights = dict[str, Tensor]
INFINITY = float("inf")
ROUNDINGS = 16  # roundings that may add up in a mean of rounded numbers


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
    apart = [(largest(relative(mine, its)), name) for mine, (name, its) in pairs]
    most, name = max(apart, default=(0.0, ""))
    return Apart(most, "" if most <= tolerance else f"most in {name}")


def logs_apart(actual: Log, expected: Curve, names: Iterable[str], tolerance: float) -> Apart:
    """Where they first differ: later numbers follow from that one."""
    if [step for step, _ in actual] != [step for step, _ in expected.log]:
        return Apart(INFINITY, f"{len(actual)} points were logged, {len(expected.log)} are due")
    most, firsts = 0.0, []
    for name in sorted(names):
        points = [i for i, (_, numbers) in enumerate(expected.log) if name in numbers]
        mine = [actual[i][1].get(name, INFINITY) for i in points]
        its = [expected.log[i][1][name] for i in points]
        rounding = _rounding_of(name, expected.rounding)
        # A number that is nearly 0 by chance, e.g. the loss of one row, lacks its last digits.
        apart = relative(mine, its, least=1.0 if rounding else 1e-3)
        most = max(most, largest(apart))
        if beyond := (apart > max(tolerance, rounding)).nonzero().flatten().tolist():
            i = beyond[0]
            step = expected.log[points[i]][0]
            firsts.append(
                (points[i], f"first apart in {name} at step {step}: {mine[i]}, not {its[i]}")
            )
    return Apart(most, min(firsts, default=(0, ""))[1])


def _rounding_of(name: str, rounding: Mapping[str, float]) -> float:
    """Of a number as it is logged; `summarize` may have made it of any of those measured."""
    measured = name.partition("/")[2]
    if measured in ("lr", "grad_norm"):
        return 0.0
    return ROUNDINGS * rounding.get(measured, max(rounding.values(), default=0.0))


def nests_apart(actual: Any, expected: Any, tolerance: float = 0.0) -> str:
    """Where two nests of containers first differ; empty if they don't."""
    mine, its = leaves(actual), leaves(expected)
    names = dict.fromkeys([*its, *mine])
    unlike = (n for n in names if not _is_near(mine.get(n), its.get(n), tolerance))
    return next(unlike, "")


def _is_near(actual: Any, expected: Any, tolerance: float) -> bool:
    if not isinstance(actual, float | Tensor) or not isinstance(expected, float | Tensor):
        return actual == expected
    if torch.as_tensor(actual).shape != torch.as_tensor(expected).shape:
        return False
    known = ROUNDINGS * rounding_of(expected) if tolerance else 0.0
    return largest(relative(actual, expected)) <= max(tolerance, known)


def leaves(nest: Any, name: str = "") -> dict[str, Any]:
    """What the containers hold, by a dotted name; and the length of each list."""
    if isinstance(nest, dict):
        pairs = list(nest.items())
    elif isinstance(nest, list | tuple):
        pairs = [*enumerate(nest), ("length", len(nest))]
    else:
        return {name or "all": nest}
    results: dict[str, Any] = {}
    for key, part in pairs:
        results |= leaves(part, f"{name}.{key}".lstrip("."))
    return results


def rounding_of(value: Any) -> float:
    """What a float32 can hold may have been one before `.item()` or `.double()`."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return torch.finfo(value.dtype).eps
    number = torch.as_tensor(value, dtype=torch.float64)
    return torch.finfo(torch.float32).eps if torch.equal(number.float().double(), number) else 0.0


def relative(actual: Any, expected: Any, least: float = 1.0) -> Tensor:
    """Elementwise, to the expected number or at least to this part of the largest of all."""
    mine, its = (torch.as_tensor(value, dtype=torch.float64).cpu() for value in (actual, expected))
    size = its.abs().nan_to_num()
    if its.numel():
        size = size.clamp(min=least * float(size.max()))
    apart = (mine - its).abs() / torch.where(size == 0, 1.0, size)
    apart = torch.where(mine.isnan() & its.isnan(), 0.0, apart)  # both say: there is no number
    return apart.nan_to_num(nan=INFINITY, posinf=INFINITY)


def largest(apart: Tensor) -> float:
    return float(apart.max()) if apart.numel() else 0.0
