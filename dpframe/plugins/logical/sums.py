"""How numbers of shares are added up: without rounding."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dpframe.plugin import MetricStates, Sums
from dpframe.plugins.logical.exact import Exact
from dpframe.plugins.logical.metrics import ShareMetrics, States


class ExactSums(Sums):
    """Each is rounded once, where it is read: so it does not matter who adds which numbers."""

    zero = Exact()
    is_exact = True
    metrics: ShareMetrics | None = None  # of a task that has some

    def spread(self, *numbers: Exact) -> list[float]:
        return [part for number in numbers for part in number.spread()]

    def join(self, floats: Iterator[float], count: int) -> list[float]:
        return [float(Exact.join(floats)) for _ in range(count)]

    def saved(self, number: Exact) -> list[float]:
        return number.floats()

    def read(self, saved: float | list[float]) -> Exact:
        return Exact.sum(saved if isinstance(saved, list) else [saved])

    def of_metrics(
        self,
        updated: Callable[[], Iterable[tuple[str, Any]]],
        merge: Callable[[Any, list[States]], None],
    ) -> MetricStates:
        self.metrics = ShareMetrics(updated, merge)
        return self.metrics
