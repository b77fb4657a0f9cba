"""How numbers are added up, over shares and processes: as floats, unless a strategy has others."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

States = dict[str, Any]
"""Of one metric, or what is kept beside those of all metrics."""


class MetricStates:
    """What is kept of a task's torchmetrics beside their own states: here, nothing."""

    is_used = False

    def reset(self) -> None:
        """A pass begins."""

    def apart(self) -> AbstractContextManager[None]:
        """Within is a pass of its own."""
        return nullcontext()

    def state_dict(self) -> States:
        return {}

    def load_state_dict(self, state: States) -> None:
        """`state` is not empty."""

    def joined(self, name: str, several: list[States], beside: list[States]) -> list[States]:
        """A metric's states in those processes that have some, from them and what is beside."""
        return several


class Sums:
    """Of host numbers, in their order: `join` of what processes have spread and added is the sum,
    and `read(saved(x))` is x."""

    zero: Any = 0.0
    is_exact = False  # whether order and grouping don't matter; all numbers are on the host

    def spread(self, *numbers: Any) -> list[float]:
        """Sums as floats, which the processes add up one by one."""
        return [*numbers]

    def join(self, floats: Iterator[float], count: int) -> list[float]:
        """So many sums, of what processes have spread."""
        return [*islice(floats, count)]

    def saved(self, number: Any) -> float | list[float]:
        """As a checkpoint holds a sum: a float, or several that add up to it."""
        return float(number)

    def read(self, saved: float | list[float]) -> Any:
        return float(sum(saved) if isinstance(saved, list) else saved)

    def of_columns(
        self,
        columns: Iterable[Iterable[float]],
        sum_numbers: Callable[[list[float]], list[float]],
    ) -> list[float]:
        """The sum of each column over all processes, whose numbers `sum_numbers` adds up."""
        totals = [sum(column, start=self.zero) for column in columns]
        return self.join(iter(sum_numbers(self.spread(*totals))), len(totals))

    def of_metrics(
        self,
        updated: Callable[[], Iterable[tuple[str, Any]]],
        merge: Callable[[Any, list[States]], None],
    ) -> MetricStates:
        """For those that are `updated` in a pass, by their names. `merge` gives a metric the states
        that torchmetrics makes of those of several processes."""
        return MetricStates()


FLOATS = Sums()
