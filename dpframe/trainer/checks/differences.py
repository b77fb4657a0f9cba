"""Numbers that differ between all rows and their shares."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dpframe.metrics import SOMETIMES_WEIGHTED, is_number, weight_of
from dpframe.task import Output
from dpframe.trainer.checks.draws import NotCompared
from dpframe.trainer.outputs import Measured

TINY = 1e-9  # a loss that is smaller is rounding


class Difference(NamedTuple):
    """A number that differs between the shares and the whole."""

    name: str
    whole: float
    parts: float
    off: float  # of the size of what is added
    step: int = 0  # at which it is so, if not from the first one on
    weight: str = ""  # whose gradient it is


def compared(whole: Output, parts: Sequence[Measured]) -> Iterator[Difference]:
    """Each number of all rows, and the mean of its shares'."""
    if len({"weight" in output for output in [whole, *(output for _, output in parts)]}) > 1:
        raise NotCompared(SOMETIMES_WEIGHTED)
    for name, value in whole.items():
        others = [output.get(name) for _, output in parts]
        if name == "weight" or not all(map(is_number, [value, *others])):
            continue
        weights = [float(weight_of(name, output, rows)) for rows, output in parts]
        if not (total := sum(weights)):
            continue
        of_all, *of_parts = map(_number, (value, *others))
        pairs = [(v, w) for v, w in zip(of_parts, weights, strict=True) if w]
        mean = sum(v * w for v, w in pairs) / total
        size = max(abs(of_all), sum(abs(v) * w for v, w in pairs) / total, TINY)
        is_alike = of_all == mean or (math.isnan(of_all) and math.isnan(mean))
        off = 0.0 if is_alike else abs(of_all - mean) / size if math.isfinite(size) else math.inf
        yield Difference(name, of_all, mean, off)


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)
