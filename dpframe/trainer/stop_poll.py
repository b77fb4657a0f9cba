"""When to stop by the clock or a signal, alike in all processes."""

import time

from dpframe.errors import Interrupted
from dpframe.launch.signals import SIGNALS, Interruption
from dpframe.strategies.base import Strategy

BETWEEN_SECONDS = 0.2
LONGEST = 1000.0  # steps, or batches, between two polls


class StopPoll:
    """Has all processes poll clock and signals after the same steps, so that they end together.

    They also agree on the number of steps until the next poll, so that they wait for each other
    a few times a second at most.
    """

    def __init__(self, strategy: Strategy, interruption: Interruption | None) -> None:
        self._strategy = strategy
        self._interruption = interruption
        self.done = 0  # at the last poll
        self._every = 1  # how many steps, or batches, are between two polls

    def begin(self, done: int) -> int:
        self.done, self._polled_at = done, time.perf_counter()
        self._began = self._polled_at
        if self._interruption is not None:
            self._interruption.begin()
        return done + self._every  # as last agreed: a short validation needs no poll

    def poll(self, done: int) -> tuple[int, float]:
        """After `done` steps or batches: when to poll again, and the main process's seconds.

        A signal is raised in every process, whichever of them it was sent to.
        """
        now = time.perf_counter()
        pace = (done - self.done) / (now - self._polled_at)
        self.done, self._polled_at = done, now
        seen = None if self._interruption is None else self._interruption.number
        pauses = self._interruption is not None and self._interruption.is_to_pause
        clock = now - self._began if self._strategy.is_main else 0.0
        wanted = min(pace * BETWEEN_SECONDS, LONGEST)
        steps, clock, pausing, *counts = self._strategy.collectives.sum_numbers(
            [wanted, clock, float(pauses), *(float(seen == number) for number in SIGNALS)]
        )
        most = max(counts)
        if most:
            raise Interrupted(SIGNALS[counts.index(most)])
        if pausing and self._interruption is not None:
            self._interruption.pause()
            paused = time.perf_counter() - now
            self._began += paused
            self._polled_at += paused
        self._every = max(1, int(steps / self._strategy.world_size))
        return done + self._every, clock
