"""Sums without rounding: they are the same in whatever order their numbers come."""

import math
import sys
from collections.abc import Iterable, Iterator

FINEST = 1074  # 2**-1074 is the smallest float: every finite one is a whole number of these
LARGEST = sys.float_info.max
LIMB_BITS = 32  # as floats, limbs of millions of processes add up without rounding
LIMBS = 68  # of the largest float, with room for 2**78 of them


class Exact:
    """A sum of floats. What is infinite or NaN is kept beside it."""

    __slots__ = ("rest", "units")

    def __init__(self, units: int = 0, rest: float = 0.0) -> None:
        self.units = units
        self.rest = rest

    @classmethod
    def of(cls, number: float) -> "Exact":
        if not math.isfinite(number):
            return cls(0, number)
        numerator, denominator = number.as_integer_ratio()  # a power of two
        return cls(numerator << (FINEST + 1 - denominator.bit_length()))

    @classmethod
    def sum(cls, numbers: Iterable[float]) -> "Exact":
        return sum(map(cls.of, numbers), start=cls())

    def __add__(self, other: "Exact | float") -> "Exact":
        if not isinstance(other, Exact):
            other = Exact.of(other)
        return Exact(self.units + other.units, self.rest + other.rest)

    def __float__(self) -> float:
        if self.rest:  # NaN is, too
            return self.rest
        try:
            return self.units / (1 << FINEST)  # rounded once
        except OverflowError:
            return math.inf if self.units > 0 else -math.inf

    def floats(self) -> list[float]:
        """Few, which add up to it without rounding."""
        found, units = [], self.units
        while units:
            near = max(-LARGEST, min(LARGEST, float(Exact(units))))
            found.append(near)
            units -= Exact.of(near).units
        return [*found, self.rest] if self.rest else found or [0.0]

    def spread(self) -> list[float]:
        """The sum as floats. Those of several sums add up elementwise without rounding."""
        size, sign = abs(self.units), -1.0 if self.units < 0 else 1.0
        mask = (1 << LIMB_BITS) - 1
        limbs = [sign * ((size >> (LIMB_BITS * place)) & mask) for place in range(LIMBS)]
        return [*limbs, self.rest]

    @classmethod
    def join(cls, numbers: Iterator[float]) -> "Exact":
        """From as many floats as `spread` makes."""
        units = sum(int(next(numbers)) << (LIMB_BITS * place) for place in range(LIMBS))
        return cls(units, next(numbers))
