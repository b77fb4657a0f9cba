"""The order of a shuffled epoch: drawn as a whole, or, of many rows, computed as it is read."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dpframe import seeding

Numbers = Callable[[int, int], Tensor]
"""Of two places in an epoch: the row numbers from the first up to the second."""
DRAWN = 2**20  # rows: the order of so many takes milliseconds and 8 MB
COMPUTED = 2**15  # rows at a time: of a few only, torch's calls take longer than what they compute
ROUNDS = 6  # after 4, rows at a certain distance are still alike
BITS = 2**31 - 1


class Computed:
    """A permutation whose numbers follow from their places: a Feistel network of two digits. In
    each round one of them is moved by a hash of the other. A number that is no row is mapped again
    until it is one ("cycle walking"): the square of the base is hardly more than the rows."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._base = math.isqrt(rows - 1) + 1
        self._keys = [seeding.mix(seed, number) for number in range(ROUNDS)]

    def __call__(self, start: int, stop: int) -> Tensor:
        numbers = self._mapped(torch.arange(start, stop))
        while len(beyond := (numbers >= self._rows).nonzero()):
            numbers[beyond] = self._mapped(numbers[beyond])
        return numbers

    def _mapped(self, numbers: Tensor) -> Tensor:
        left, right = numbers // self._base, numbers % self._base
        for key in self._keys:
            left, right = right, (left + hashed(right, key)) % self._base
        return left * self._base + right


def hashed(numbers: Tensor, key: int) -> Tensor:
    """31 bits of numbers below 2**31. No product is above 63 bits, where int64 would overflow."""
    once = (numbers ^ (key & BITS)) * 0x9E3779B1
    return (((once ^ (once >> 31)) & BITS) ^ (key >> 32)) * 0x85EBCA6B >> 32
