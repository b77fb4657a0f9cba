"""How far two runs are apart: the largest relative difference, and where it is."""

from typing import NamedTuple

from torch import Tensor

from dpframe.testing.reference import Log

Weights = list[tuple[str, Tensor]]
INFINITY = float("inf")


class Apart(NamedTuple):
    """`where` reads on after "first apart" or "most apart"."""

    most: float
    where: str = ""


def weights_apart(given: Weights, wanted: Weights) -> float:
    return weights_compared(given, wanted).most


def weights_compared(given: Weights, wanted: Weights) -> Apart:
    """Tensor by tensor in their order: their names are another check's."""
    if [t.shape for _, t in given] != [t.shape for _, t in wanted]:
        names = ", ".join(name for name, _ in given)
        return Apart(INFINITY, f"these are not the task's own tensors: {names}")
    apart = [(_of(mine, its), name) for (name, its), (_, mine) in zip(wanted, given, strict=True)]
    most, name = max(apart, default=(0.0, ""))
    return Apart(most, f"most in {name}")


def logs_compared(given: Log, wanted: Log, names: set[str], tolerance: float) -> Apart:
    """Where they are first apart: later numbers follow from that one."""
    if [step for step, _ in given] != [step for step, _ in wanted]:
        return Apart(INFINITY, f"{len(given)} points were logged, {len(wanted)} are due")
    apart, where = 0.0, ""
    largest = {name: _largest(wanted, name) for name in names}
    for (step, numbers), (_, its) in zip(given, wanted, strict=True):
        for name in sorted(its.keys() & names):
            here = _relative(numbers.get(name, INFINITY), its[name], largest[name])
            if not here <= tolerance and not where:
                where = f"first in {name} at step {step}: {numbers.get(name)}, not {its[name]}"
            apart = max(apart, here)
    return Apart(apart, where)


def _of(given: Tensor, wanted: Tensor) -> float:
    """Relative to the largest number of the tensor."""
    if not wanted.numel():
        return 0.0
    largest = float(wanted.double().abs().max())
    return _known(float((given.double() - wanted.double()).abs().max()) / (largest or 1.0))


def _relative(given: float, wanted: float, largest: float) -> float:
    """A number that is nearly 0 by chance, as a loss of one row, has lost its last digits."""
    if given != given and wanted != wanted:
        return 0.0  # both say that there is no such number
    return _known(abs(given - wanted) / (max(abs(wanted), largest / 1000) or 1.0))


def _largest(log: Log, name: str) -> float:
    known = [abs(numbers[name]) for _, numbers in log if numbers.get(name) is not None]
    return max((number for number in known if number == number), default=0.0)


def _known(number: float) -> float:
    """What is not a number is apart from every number."""
    return number if number == number else INFINITY
