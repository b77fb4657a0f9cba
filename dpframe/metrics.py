"""Exact means: weighted sums of what the steps returned, reduced over the replicas once."""

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, mul
from typing import Any

import torch
from torch import Tensor

from dpframe.errors import UserError

DIMENSIONS, KIND = attrgetter("ndim"), attrgetter("device", "dtype")
Sums = dict[str, tuple[float, float]]
"""By name: the weighted values' sum, and the weights'."""


class Means:
    """Collects without waiting for the GPU; `window` and `total` read, and wait.

    `reduce` sums a tensor over the processes, None: there is one; `agree` turns each process's
    names into one list.
    """

    def __init__(
        self,
        reduce: Callable[[Tensor], Tensor] | None,
        agree: Callable[[list[str]], list[str]],
    ) -> None:
        self._reduce = reduce
        self._agree = agree
        self._names: list[str] = []
        self._kept: list[tuple[dict[str, Any], Any]] = []
        self._window: Sums = {}
        self._totals: Sums = {}

    def add(self, measured: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """One (rows, output) a replica; an output with a `weight` counts that instead of rows."""
        for rows, output in measured:
            self._kept.append((output, output.get("weight", rows) if rows else 0))

    def reset(self) -> None:
        self._kept.clear()
        self._window.clear()
        self._totals.clear()

    def window(self) -> dict[str, float]:
        """The means since the last window, over all replicas."""
        self._collect()
        means = _divided(self._window)
        self._window.clear()
        return means

    def total(self, *others: "Means") -> dict[str, float]:
        """The means since the last reset, over all replicas; `others` are summed on the way."""
        self._collect(*others)
        return _divided(self._totals)

    def state_dict(self) -> dict[str, dict[str, list[float]]]:
        self._collect()
        parts = {"window": self._window, "totals": self._totals}
        return {part: {name: list(pair) for name, pair in parts[part].items()} for part in parts}

    def load_state_dict(self, state: dict[str, dict[str, list[float]]]) -> None:
        self._window = {name: (value, weight) for name, (value, weight) in state["window"].items()}
        self._totals = {name: (value, weight) for name, (value, weight) in state["totals"].items()}

    def _collect(self, *others: "Means") -> None:
        # The same in every process: each adds something in each step.
        several = [one for one in (self, *others) if one._kept]
        if not several:
            return
        for one, found in zip(several, self._summed(several), strict=True):
            for name, (value, weight) in found.items():
                for sums in (one._window, one._totals):
                    before = sums.get(name, (0.0, 0.0))
                    sums[name] = (before[0] + value, before[1] + weight)

    def _summed(self, several: list["Means"]) -> list[Sums]:
        """Over all processes, at one reduction."""
        local = [_weighted_sums(one._kept) for one in several]
        for one in several:
            one._kept.clear()
        if self._reduce is None:
            return [dict(sorted(sums.items())) for sums in local]
        both = list(zip(several, local, strict=True))
        while True:
            # The first numbers say how many names are news here: any process's news makes all
            # of them agree on the names anew, so the vectors always line up.
            numbers = [float(len(sums.keys() - set(one._names))) for one, sums in both]
            for one, sums in both:
                numbers += chain.from_iterable(sums.get(name, (0.0, 0.0)) for name in one._names)
            numbers = self._reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()
            news = numbers[: len(both)]
            if not any(news):
                break
            for count, (one, sums) in zip(news, both, strict=True):
                if count:
                    one._names = self._agree(sorted({*one._names, *sums}))
        rest = iter(numbers[len(both) :])
        return [{name: (next(rest), next(rest)) for name in one._names} for one in several]


def _weighted_sums(kept: list[tuple[dict[str, Any], Any]]) -> Sums:
    sums: Sums = {}
    alike: dict[tuple[str, ...], list[tuple[dict[str, Any], Any]]] = {}
    for output, weight in kept:
        if isinstance(weight, Tensor) or weight:
            alike.setdefault(tuple(output), []).append((output, weight))
        else:
            sums |= dict.fromkeys(output, (0.0, 0.0))
    for names, several in alike.items():
        numbers = _numbers([value for output, _ in several for value in output.values()], names)
        weights = _numbers([weight for _, weight in several], ("weight",))
        whole = sum(weights)
        for place, name in enumerate(names):
            value, weight = sums.get(name, (0.0, 0.0))
            here = sum(map(mul, numbers[place :: len(names)], weights))
            sums[name] = value + here, weight + whole
    sums.pop("weight", None)
    return sums


def is_number(value: Any) -> bool:
    """One number, be it in a tensor or in one of NumPy's."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) or getattr(value, "size", 0) == 1


def described(value: Any) -> str:
    """What is wrong with one that is no number."""
    if hasattr(value, "shape"):
        return "with more than one number; return its mean over the batch"
    return f"as a {type(value).__name__}; return one number, or leave it out"


def _numbers(values: list, names: tuple[str, ...]) -> list[float]:
    """What numbers and one-element tensors hold, with one wait a device and type of number; the
    names are those of the first values, of the next as many, and so on."""
    are_numbers = {*map(type, values)} == {Tensor} and not any(map(DIMENSIONS, values))
    if are_numbers and len({*map(KIND, values)}) == 1:  # most often
        return list(map(float, torch.stack(values).tolist()))  # waits for the GPU
    found = [0.0] * len(values)
    places: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        if not is_number(value):
            name = names[index % len(names)]
            raise UserError(f"a step returned '{name}' {described(value)}")
        if isinstance(value, Tensor):
            places.setdefault((value.device, value.dtype), []).append(index)
        else:
            found[index] = float(value if isinstance(value, int | float) else value.item())
    for indexes in places.values():
        together = torch.stack([values[index].detach().reshape(()) for index in indexes])
        for index, number in zip(indexes, together.tolist(), strict=True):
            found[index] = float(number)
    return found


def _divided(sums: Sums) -> dict[str, float]:
    return {name: value / weight for name, (value, weight) in sums.items() if weight}
