"""Random generators that rows draw from: what they draw is a fact of the row."""

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from dpframe import seeding
from dpframe.data.contents import OF_COLLATE, walked

ITEMS = 100  # of a list or a dict that are looked into
OF_OTHERS = ("builtins", "torch", "typing")  # modules whose classes have no generators
KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Draws(NamedTuple):
    """What the generators are seeded by: a seed of the batch, and the places of its rows in it."""

    seed: int
    places: Sequence[int]


class OfProcess:
    """The global ones of Python and NumPy, and torch's of the CPU."""


class Generators:
    """Those of NumPy, Python and torch that are in attributes of a data set, or of their classes,
    and `others`.

    They are seeded before each row, each with a seed of its own, by the place of the row in the
    global batch: so it does not matter which process reads it. Afterwards they are as before."""

    def __init__(self, dataset: Any, collates: Sequence[Any] = (), *others: OfProcess) -> None:
        in_collates = (walked(each, deepest=OF_COLLATE, items=ITEMS) for each in collates)
        values = [value for _, value in chain(walked(dataset, items=ITEMS), *in_collates)]
        classes = dict.fromkeys(chain(*(type(value).__mro__ for value in values)))
        of_classes = (vars(each).values() for each in classes if each.__module__ not in OF_OTHERS)
        found = (value for value in chain(values, *of_classes) if isinstance(value, KINDS))
        own = list({id(each): each for each in found if _can_be_seeded(each)}.values())
        self.are_own = bool(own)  # some of them
        self._all = [*own, *others]

    def seed(self, *numbers: int) -> None:
        for number, generator in enumerate(self._all):
            _seed(generator, seeding.mix(*numbers, number))

    def states(self) -> list[Any]:
        return list(map(state_of, self._all))

    def have_drawn(self, since: list[Any]) -> bool:
        return not all(map(_is_same, since, self.states()))

    def restore(self, states: list[Any]) -> None:
        for generator, state in zip(self._all, states, strict=True):
            _restore(generator, state)


def _can_be_seeded(generator: Any) -> bool:
    """Not one of the operating system, nor e.g. a RandomState with another bit generator."""
    try:
        state = state_of(generator)
        _seed(generator, 0)
        _restore(generator, state)
    except Exception:
        return False
    return True


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, OfProcess):
        seeding.reseed(seed, [])
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif bits := getattr(generator, "bit_generator", None):
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed % 2**32)


def state_of(generator: Any) -> Any:
    if isinstance(generator, OfProcess):
        return seeding.random_state([])
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return bits.state if bits else generator.get_state(legacy=False)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool((one == other).all() if hasattr(one, "all") else one == other)


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, OfProcess):
        seeding.restore_random_state(state, [])
    elif bits := getattr(generator, "bit_generator", None):
        bits.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
