"""A Logger that keeps what it got, and how far two runs are apart."""

from collections.abc import Callable
from typing import Any

import numpy
from torch import nn

from dpframe import Logger

Log = list[tuple[int, dict[str, float]]]


class Recorder(Logger):
    def __init__(self) -> None:
        self.log_: Log = []

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        scalars = {k: v for k, v in scalars.items() if k != "step/samples_per_second"}
        self.log_.append((step, scalars))


def weights(module: nn.Module) -> dict[str, Any]:
    """As NumPy arrays: they travel between processes by value. Of parts the whole."""
    state = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in module.state_dict().items()}
    return {name: t.detach().cpu().numpy().copy() for name, t in state.items()}


def weights_apart(mine: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference in a tensor, relative to the largest number in it."""
    assert mine.keys() == other.keys()
    apart = [
        float(numpy.abs(mine[name] - other[name]).max())
        / (float(numpy.abs(other[name]).max()) or 1)
        for name in other
    ]
    return worst(apart)


def logs_apart(mine: Log, other: Log) -> float:
    """The largest relative difference of a number; steps and names have to be the same."""
    assert [step for step, _ in mine] == [step for step, _ in other]
    apart = []
    for (step, numbers), (_, wanted) in zip(mine, other, strict=True):
        assert numbers.keys() == wanted.keys(), f"step {step}"
        apart += [abs(numbers[k] - v) / (abs(v) or 1.0) for k, v in wanted.items()]
    return worst(apart)


def worst(apart: list[float]) -> float:
    assert apart, "nothing was compared"
    return max(apart) if all(number == number for number in apart) else float("nan")


def once(call: Callable[..., Any]) -> Callable[..., Any]:
    """Like functools.cache, for failures too: a group of ranks takes seconds to start."""
    kept: dict[tuple, Any] = {}

    def kept_or_called(*args: Any) -> Any:
        if args not in kept:
            try:
                kept[args] = call(*args)
            except Exception as error:
                kept[args] = error
        if isinstance(kept[args], Exception):
            raise kept[args]
        return kept[args]

    return kept_or_called
