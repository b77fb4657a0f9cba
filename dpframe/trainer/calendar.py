"""When to log, to validate, and to stop, by the clock or a signal, alike in all processes."""

import time
from typing import NamedTuple

from dpframe.errors import Interrupted
from dpframe.launch.signals import SIGNALS, Interruption
from dpframe.strategies.base import Strategy
from dpframe.trainer.feed import TrainingData
from dpframe.trainer.progress import Progress
from dpframe.trainer.settings import TrainerSettings

BETWEEN_SECONDS = 0.2
LONGEST = 1000.0  # steps, or batches, between two polls


class EpochEnd(NamedTuple):
    """The end of an epoch, or of training within one."""

    epochs: int  # that are whole then
    is_whole: bool
    is_last: bool  # training ends
    validates: bool
    is_extra_validation: bool  # if any: a longer run would not validate here


class Calendar:
    """Says what is due after a step and after an epoch."""

    clock = 0.0  # seconds of training when it was last polled: the same in all processes

    def __init__(
        self, settings: TrainerSettings, feed: TrainingData, stop_poll: "StopPoll"
    ) -> None:
        self._settings = settings
        self._stop_poll = stop_poll
        self._log_every = settings.log_every
        self._validate_every = settings.validate_every_steps
        has_validation = bool(feed.validation)
        self._validates_after = feed.validations_within(settings) if has_validation else frozenset()
        self._validates_within = has_validation and bool(
            self._validate_every is not None or self._validates_after
        )
        self._skips_validations = has_validation and settings.validate_every_epochs > 1
        self._poll_at = 0  # steps
        self._logs_together = stop_poll.collectives.world_size > 1

    def logs(self, step: int) -> bool:
        return step % self._log_every == 0

    def validates(self, progress: Progress) -> bool:
        """Whether to validate after this step, whatever ends with it."""
        if not self._validates_within:
            return False
        every = self._validate_every
        is_due = every is not None and progress.global_step % every == 0
        return is_due or progress.batches_done in self._validates_after

    def end_epoch(self, progress: Progress, *, is_whole: bool, should_stop: bool) -> EpochEnd:
        epochs = progress.epoch + is_whole
        is_last = should_stop or bool(self._settings.reached(epochs, progress.global_step))
        every = max(1, int(self._settings.validate_every_epochs))
        is_due = is_whole and epochs % every == 0
        is_extra = not (is_due or self.validates(progress))
        return EpochEnd(epochs, is_whole, is_last, is_due or is_last, is_extra)

    # ---- what ends training, at which all processes look after the same steps

    def begin(self, step: int) -> None:
        self._poll_at = self._stop_poll.begin(step)

    def polls(self, step: int) -> bool:
        """Now and then, and where several processes log: they wait for each other there anyway."""
        return step >= self._poll_at or (self._logs_together and step % self._log_every == 0)

    def polls_before_end(self, step: int, *, is_over: bool) -> bool:
        """Whether to poll before an epoch ends, too. All processes poll after it; a stop that is
        first seen there only comes too late for a validation that another epoch's end has."""
        if self._stop_poll.done == step:
            return False
        return is_over or self._skips_validations or step >= self._poll_at

    def poll(self, step: int, wish: str | None) -> str | None:
        """Why all processes stop, if they do: by the clock, or by a wish, i.e. the reason of one of
        them. A signal is raised in every process."""
        self._poll_at, self.clock, wish = self._stop_poll.poll(step, wish)
        limit = self._settings.max_seconds
        if limit is not None and self.clock > limit:
            return f"trainer.max_seconds={limit:g} are over"
        return wish


class StopPoll:
    """Has all processes poll clock and signals after the same steps, so that they end together.

    They also agree on the number of steps until the next poll, so that they wait for each other
    a few times a second at most.
    """

    def __init__(self, strategy: Strategy, interruption: Interruption | None) -> None:
        self.collectives = strategy.collectives
        self._interruption = interruption
        self.done = 0  # at the last poll
        self.every = 1  # how many steps, or batches, are between two polls

    def begin(self, done: int) -> int:
        self.done, self._polled_at = done, time.perf_counter()
        self._began = self._polled_at
        if self._interruption is not None:
            self._interruption.begin()
        return done + self.every  # as last agreed: a short validation needs no poll

    def poll(self, done: int, wish: str | None = None) -> tuple[int, float, str | None]:
        """After `done` steps or batches: when to poll again, the main process's seconds, and the
        first wish of all processes'.

        A signal is raised in every process, whichever of them it was sent to.
        """
        now, wanted = time.perf_counter(), float(self.every)
        if done > self.done:
            pace = (done - self.done) / (now - self._polled_at)
            wanted = min(pace * BETWEEN_SECONDS, LONGEST)
        self.done, self._polled_at = done, now
        seen = None if self._interruption is None else self._interruption.number
        clock = now - self._began if self.collectives.is_main else 0.0
        own = wanted, clock, float(wish is not None)
        steps, clock, wishes, *counts = self.collectives.sum_numbers(
            [*own, *(float(seen == number) for number in SIGNALS)]
        )
        most = max(counts)
        if most:
            raise Interrupted(SIGNALS[counts.index(most)])
        self.every = max(1, int(steps / self.collectives.world_size))
        if 0 < wishes < self.collectives.world_size:
            gathered = self.collectives.gather(wish)
            wish = self.collectives.broadcast(next(filter(None, gathered), ""))
        return done + self.every, clock, wish
