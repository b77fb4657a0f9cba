"""Names the ranks that all others wait for: they compute slower, or wait longer for their data."""

import logging
import socket
from collections.abc import Sequence
from itertools import groupby
from statistics import mean, median_low
from typing import Any

from dpframe.stopwatch import Stopwatch
from dpframe.strategies.base import Strategy
from dpframe.trainer.progress import Progress

EVERY_SECONDS = 5.0  # between two comparisons
LASTING = 3  # comparisons in a row, until a rank is told
TIMES = 1.5  # as long as the median: a rank that computes slowly
OF_A_STEP = 0.2  # more than the median waits: a rank that waits for its data

log = logging.getLogger("dpframe")


class Pace:
    """All ranks compare their times at the same steps, by the main rank's clock. The result is only
    logged: no rank acts on it."""

    def __init__(self, strategy: Strategy, progress: Progress, watch: Stopwatch | None) -> None:
        self.slow: list[dict[str, Any]] = []  # as summary.json has it
        self._strategy = strategy
        self._progress = progress
        self._watch = watch
        self._hosts: list[str] = []  # of the ranks, on the main one
        self._due = EVERY_SECONDS
        self._clock = 0.0  # at the last comparison
        self._step, self._waited = progress.global_step, progress.data_seconds
        self._computed: list[list[float]] = []  # the newest comparisons, each of all ranks
        self._data: list[list[float]] = []

    def look(self, clock: float) -> None:
        """`clock` is in the main process's seconds, the same on all ranks."""
        if clock < self._due:
            return
        strategy, progress, ranks = self._strategy, self._progress, self._strategy.world_size
        if not self._computed:
            self._hosts = strategy.collectives.gather(socket.gethostname())
        steps = max(1, progress.global_step - self._step)
        numbers = [0.0] * (2 * ranks)
        numbers[strategy.rank] = self._watch.read() if self._watch is not None else 0.0
        numbers[ranks + strategy.rank] = (progress.data_seconds - self._waited) / steps
        told = strategy.collectives.sum_numbers(numbers)
        self._computed = [*self._computed, told[:ranks]][-LASTING:]
        self._data = [*self._data, told[ranks:]][-LASTING:]
        if strategy.is_main and len(self._data) == LASTING:
            self._tell((clock - self._clock) / steps)
        self._due, self._clock = clock + EVERY_SECONDS, clock
        self._step, self._waited = progress.global_step, progress.data_seconds

    def _tell(self, step_seconds: float) -> None:
        times = [ratios(seconds) for seconds in self._computed]
        own, usual = _means(self._computed), _usual(self._computed)
        for host, slow in self._lasting("computing", times, TIMES):
            by, took = (mean(each[rank] for rank in slow) for each in (_means(times), own))
            self._note(host, slow, "computing", times=round(by, 3))
            log.warning(
                "%s %.1f times as long for a step's forward as the median: %s, not %s; all "
                "ranks wait for that; look there for other programs, heat, or fewer cores",
                self._who(host, slow, "takes"),
                by,
                _in_words(took),
                _in_words(usual),
            )
        longer = [[s - median_low(seconds) for s in seconds] for seconds in self._data]
        own, usual = _means(self._data), _usual(self._data)
        for host, slow in self._lasting("data", longer, OF_A_STEP * step_seconds):
            waits = mean(own[rank] for rank in slow)
            self._note(host, slow, "data", seconds=waits, step_seconds=step_seconds)
            log.warning(
                "%s %s for the data of each step of %s, and the median %s; all ranks wait for "
                "that; raise data.workers, or look at the disk there",
                self._who(host, slow, "waits"),
                _in_words(waits),
                _in_words(step_seconds),
                _in_words(usual),
            )

    def _lasting(
        self, cause: str, rows: list[list[float]], limit: float
    ) -> list[tuple[str, list[int]]]:
        """The ranks of each host that were beyond the limit in all the newest comparisons; once."""
        known = {(each["node"], each["cause"]) for each in self.slow}
        least = [min(column) for column in zip(*rows, strict=True)]
        found: dict[str, list[int]] = {}
        for rank, (host, value) in enumerate(zip(self._hosts, least, strict=True)):
            if value >= limit and (host, cause) not in known:
                found.setdefault(host, []).append(rank)
        return list(found.items())

    def _note(self, host: str, slow: list[int], cause: str, **by: float) -> None:
        self.slow.append({"node": host, "ranks": slow, "cause": cause, **by})

    def _who(self, host: str, slow: list[int], verb: str) -> str:
        ranks = listed(slow)
        if len(set(self._hosts)) > 1 and len(slow) == self._hosts.count(host):
            return f"{host} ({ranks}) {verb}"
        place = f" on {host}" if len(set(self._hosts)) > 1 else ""
        return f"{ranks}{place} {verb if len(slow) == 1 else verb.removesuffix('s')}"


def ratios(seconds: Sequence[float]) -> list[float]:
    """To the median of those that are known."""
    known = [each for each in seconds if each > 0]
    return [each / median_low(known) if known else 0.0 for each in seconds]


def listed(ranks: list[int]) -> str:
    """`rank 1`, or `ranks 0, 2-3`."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def _means(rows: list[list[float]]) -> list[float]:
    return [mean(column) for column in zip(*rows, strict=True)]


def _usual(rows: list[list[float]]) -> float:
    return mean(median_low([each for each in row if each > 0] or row) for row in rows)


def _in_words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
