"""Agrees with the other processes, a few times a second, on the time and on signals."""

import time

from dpframe.errors import Interrupted
from dpframe.interruption import SIGNALS, Interruption
from dpframe.strategies.base import Strategy

BETWEEN_SECONDS = 0.2
LONGEST = 1000.0  # steps, or batches, between two looks


class Lookout:
    """All processes look after the same steps, so that they end after the same one.

    How many steps are between two looks is in what they agree on: no process waits for others
    more often than it has to, and none goes by a clock of its own.
    """

    def __init__(self, strategy: Strategy, interruption: Interruption | None) -> None:
        self.clock = 0.0  # the main process's, since `begin`
        self._strategy = strategy
        self._interruption = interruption
        self._number: int | None = None

    def begin(self, done: int) -> int:
        self._done, self._looked = done, time.perf_counter()
        self._began = self._looked
        if self._interruption is not None:
            self._interruption.begin()
        return done + 1

    def look(self, done: int) -> int:
        """After `done` steps, or batches; the number of them at which to look again."""
        now = time.perf_counter()
        pace = (done - self._done) / (now - self._looked)
        self._done, self._looked = done, now
        seen = None if self._interruption is None else self._interruption.number
        clock = now - self._began if self._strategy.is_main else 0.0
        wanted = min(pace * BETWEEN_SECONDS, LONGEST)
        steps, self.clock, *counts = self._strategy.tally(
            [wanted, clock, *(float(seen == number) for number in SIGNALS)]
        )
        most = max(counts)
        self._number = SIGNALS[counts.index(most)] if most else None
        return done + max(1, int(steps / self._strategy.world_size))

    def raise_signal(self) -> None:
        """In every process, after the same step."""
        if self._number is not None:
            raise Interrupted(self._number)
