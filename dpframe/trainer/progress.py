"""How far a run has come: the counters of a checkpoint; and the poll of clock and signals."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from dpframe.data import Batch
from dpframe.errors import Interrupted
from dpframe.launch.signals import SIGNALS, Interruption
from dpframe.strategies.base import Strategy

BETWEEN_SECONDS = 0.2
LONGEST = 1000.0  # steps, or batches, between two polls
LEAST = {"validated_step": -1}


@dataclass
class Progress:
    global_step: int = 0  # optimizer updates
    epoch: int = 0  # whole epochs done
    batches_done: int = 0  # of the current epoch
    rows_seen: int = 0
    skipped_steps: int = 0  # left out by trainer.on_nonfinite=skip
    validated_step: int = -1  # the step of the newest val/ numbers
    ended_step: int = 0  # the newest step after which an epoch, or training, has ended
    seconds: float = 0.0
    data_seconds: float = 0.0  # of these, waiting for training data

    @property
    def current_epoch(self) -> int:
        """The one of the newest step, as people count them: from 1."""
        return max(1, self.epoch + (self.batches_done > 0))

    def count(self, batches: Sequence[Batch]) -> None:
        """After an update by them."""
        self.global_step += 1
        self.batches_done += len(batches)
        for batch in batches:
            self.rows_seen += batch.rows

    def state_dict(self) -> dict[str, int | float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises for what this class would not have saved: a file may hold anything."""
        for field in fields(self):
            value = state[field.name]
            kinds = (int, float) if field.type is float else (int,)
            if type(value) not in kinds or not value >= LEAST.get(field.name, 0):
                raise ValueError(f"{field.name} is {str(value)[:200]}")
            setattr(self, field.name, value)


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
