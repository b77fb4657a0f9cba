"""A Mix: one order over several data sets, in proportions that are exact after any row."""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

from dpframe.data.shuffle import Numbers
from dpframe.errors import UserError
from dpframe.values import fits, refuse_below

MOST = 1_000_000  # rows until the order of the sets begins again
Pass = Callable[[int, int, int], Numbers]
"""Of the number of a set, its rows and which pass it is: the order of these rows."""


class Several(ConcatDataset):
    """Data sets by name that are read as one."""

    names: list[str]

    def described(self) -> str:
        """For the banner, and for what a resumed run has in common."""
        raise NotImplementedError


class Mix(Several):
    """Several data sets by name as one to train on: `Mix({"web": a, "code": b}, {"web": 7,
    "code": 3})` has 7 rows of `web` for 3 of `code`, and they are spread evenly.

    An epoch has `rows` rows or, without that, as many as all sets together. Each set goes on where
    it was in the epoch before, and is shuffled again whenever it begins again.
    """

    def __init__(
        self,
        sets: Mapping[str, Dataset],
        weights: Mapping[str, float],
        rows: int | None = None,
    ) -> None:
        _check(sets, weights)
        refuse_below("rows= of dpframe.Mix", rows)
        super().__init__(sets.values())
        self.names = [*sets]
        self.parts = _whole([float(weights[name]) for name in sets])
        for name, part in zip(sets, self.parts, strict=True):
            if weights[name] and not part:
                raise UserError(
                    f"dpframe.Mix got the weight {weights[name]} for {name!r}, less than a "
                    "millionth of all; leave it out, or use 0"
                )
        self.rows = len(self) if rows is None else int(rows)
        ends = torch.tensor(self.parts).cumsum(0)
        self._sets = torch.bucketize(spread(tuple(self.parts)), ends, right=True)

    def numbers(self, start: int, stop: int, pass_of: Pass) -> Tensor:
        """The rows `start` to `stop` of a whole run, as numbers of this data set's rows."""
        period = len(self._sets)
        sets = self._sets[torch.arange(start, stop) % period]
        numbers = torch.empty_like(sets)
        ends = [0, *self.cumulative_sizes]
        for place, part in enumerate(self.parts):
            here = sets == place
            begun = int((self._sets[: start % period] == place).sum())
            first = start // period * part + begun
            size, count = len(self.datasets[place]), int(here.sum())  # type: ignore[arg-type]
            stretches = [
                pass_of(place, size, number)(
                    max(0, first - number * size), min(size, first + count - number * size)
                )
                for number in range(first // size, -(-(first + count) // size))
            ]
            if stretches:
                numbers[here] = torch.cat(stretches) + ends[place]
        return numbers

    def described(self) -> str:
        parts = [f"{part:,} {name}" for name, part in zip(self.names, self.parts, strict=True)]
        return f"a mix of {' to '.join(parts)}, {self.rows:,} rows an epoch"


@lru_cache(64)
def spread(counts: tuple[int, ...]) -> Tensor:
    """The numbers of so many rows of each set, those of the first set first, in an order in which
    each set comes evenly: any stretch has its part of each, to about a row."""
    times = [(2 * torch.arange(count) + 1).double() / (count or 1) for count in counts]
    return torch.cat(times).argsort(stable=True)


def _whole(weights: list[float]) -> list[int]:
    """In whole numbers: exactly if these are small enough, else to a millionth."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(each.denominator for each in exact))
    parts = [int(each * scale) for each in exact]
    if sum(parts) // math.gcd(*parts) > MOST:
        parts = [round(MOST * weight / sum(weights)) for weight in weights]
    return [part // math.gcd(*parts) for part in parts]


def _check(sets: Any, weights: Any) -> None:
    if not isinstance(sets, Mapping) or not sets:
        raise UserError(
            f"dpframe.Mix got a {type(sets).__name__} of sets; pass a dict of them by their names"
        )
    for name, each in sets.items():
        is_read = hasattr(each, "__getitem__") and hasattr(each, "__len__")
        if isinstance(each, IterableDataset | DataLoader) or not is_read:
            raise UserError(
                f"dpframe.Mix got a {type(each).__name__} as {name!r}, which can't be mixed row by "
                "row; pass a data set with __getitem__ and __len__"
            )
        if not len(each):
            raise UserError(f"dpframe.Mix got no rows of {name!r}; leave it out")
    if not isinstance(weights, Mapping) or weights.keys() != sets.keys():
        raise UserError(
            f"dpframe.Mix got the weights {_shown(weights)} for {', '.join(map(str, sets))}; pass "
            "a dict with a weight for each of them"
        )
    if not all(fits(each, float) and 0 <= each < math.inf for each in weights.values()) or not sum(
        weights.values()
    ):
        raise UserError(
            f"dpframe.Mix got the weights {_shown(weights)}; pass numbers from 0 on, not all 0"
        )


def _shown(weights: Any) -> str:
    return str(dict(weights) if isinstance(weights, Mapping) else weights)[:100]
