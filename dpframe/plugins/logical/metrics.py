"""torchmetrics by the share, so that it does not matter who computes which share.

Sums of floats are added up without rounding, and lists are in the order of the rows.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dpframe.plugin import MetricStates
from dpframe.plugins.logical.exact import Exact

States = dict[str, Any]
LARGEST = 10_000  # numbers of a sum; the host adds up each by itself
WAITING = 1_000  # sums that stay on their device until the host takes them


class ShareMetrics(MetricStates):
    """What shares have added in one process, since the last reset."""

    is_used = True

    def __init__(
        self,
        updated: Callable[[], Iterable[tuple[str, Any]]],
        merge: Callable[[Any, list[States]], None],
    ) -> None:
        self._updated = updated
        self._merge = merge
        self._is_sum: dict[tuple[str, str], bool] = {}  # by metric and state
        self.reset()

    def reset(self) -> None:
        self._sums: dict[str, dict[str, list[Exact]]] = {}
        self._ends: dict[str, dict[str, list[list[int]]]] = {}  # in a list: of which share, where
        self._updates: dict[str, int] = {}
        self._waiting: list[tuple[str, str, Tensor]] = []

    @contextmanager
    def apart(self) -> Iterator[None]:
        before = vars(self).copy()
        try:
            yield
        finally:
            vars(self).update(before)

    def end_share(self, share: list[int]) -> None:
        """After a share's step: what it is a share of, and its number."""
        for name, metric in self._updated():
            # Of one that does not say so, an update may do more than add.
            if metric.full_state_update is False:
                self._add(name, metric, share)

    def state_dict(self) -> States:
        self._take()
        sums = {
            name: {key: [number.floats() for number in numbers] for key, numbers in of_keys.items()}
            for name, of_keys in self._sums.items()
        }
        return {"sums": sums, "ends": self._ends}

    def load_state_dict(self, state: States) -> None:
        self.reset()
        self._ends = state["ends"]
        for name, of_keys in state["sums"].items():
            self._sums[name] = {key: list(map(Exact.sum, each)) for key, each in of_keys.items()}

    def joined(self, name: str, several: list[States], beside: list[States]) -> list[States]:
        """The first process's states get what all shares have added."""
        several = list(map(dict, several))
        sums, ends = ([b.get(part, {}).get(name, {}) for b in beside] for part in ("sums", "ends"))
        for key, state in several[0].items():
            if isinstance(state, list):
                lists = [states[key] for states in several]
                several[0][key] = _in_order(lists, [of_keys.get(key, []) for of_keys in ends])
                for states in several[1:]:
                    states[key] = []
            elif parts := [of_keys[key] for of_keys in sums if key in of_keys]:
                columns = zip(*parts, strict=True)
                numbers = [float(Exact.sum(chain.from_iterable(column))) for column in columns]
                total = torch.tensor(numbers, dtype=torch.float64).to(state.dtype).view(state.shape)
                several[0][key] = state + total.to(state.device)
        return several

    def _add(self, name: str, metric: Any, share: list[int]) -> None:
        """Takes the sums out of the metric, and notes where its lists end."""
        if metric.update_count == self._updates.get(name, 0):
            return
        self._updates[name] = metric.update_count
        for key, state in metric.metric_state.items():
            if isinstance(state, list):
                self._ends.setdefault(name, {}).setdefault(key, []).append([*share, len(state)])
            elif state.is_floating_point() and self._adds_up(name, metric, key, state.numel()):
                self._waiting.append((name, key, state.detach()))
                setattr(metric, key, torch.zeros_like(state))
        if len(self._waiting) >= WAITING:
            self._take()

    def _adds_up(self, name: str, metric: Any, key: str, numbers: int) -> bool:
        if numbers > LARGEST:
            return False
        if (name, key) not in self._is_sum:  # torchmetrics tells only by doing it
            probe, one = deepcopy(metric), torch.ones_like(getattr(metric, key))
            states = probe.metric_state
            self._merge(probe, [{**states, key: one}, {**states, key: 2 * one}])
            self._is_sum[name, key] = torch.equal(getattr(probe, key), 3 * one)
        return self._is_sum[name, key]

    def _take(self) -> None:
        for name, key, state in self._waiting:
            numbers, sums = state.flatten().tolist(), self._sums.setdefault(name, {})
            before = sums.get(key) or [Exact()] * len(numbers)
            sums[key] = [one + number for one, number in zip(before, numbers, strict=True)]
        self._waiting.clear()


def _in_order(lists: list[list[Any]], ends: list[list[list[int]]]) -> list[Any]:
    """List entries in the order of the shares; entries of no share come last."""
    parts: list[tuple[list[Any], list[Any]]] = []
    for values, own in zip(lists, ends, strict=True):
        begin = 0
        for *share, end in own:
            parts.append((share, values[begin:end]))
            begin = end
        parts.append(([math.inf], values[begin:]))
    parts.sort(key=lambda part: part[0])
    return list(chain.from_iterable(values for _, values in parts))
