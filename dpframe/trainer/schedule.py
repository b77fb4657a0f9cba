"""When to log, to validate, to look at clock and signals, and to stop."""

from typing import NamedTuple

from dpframe.trainer.feed import Feed
from dpframe.trainer.progress import Progress
from dpframe.trainer.settings import TrainerSettings
from dpframe.trainer.stop_poll import StopPoll


class EpochEnd(NamedTuple):
    """The end of an epoch, or of training within one."""

    epochs: int  # that are whole then
    is_whole: bool
    is_last: bool  # training ends
    validates: bool
    is_extra_validation: bool  # if any: a longer run would not validate here


class Schedule:
    clock = 0.0  # seconds of training when it was last polled: the same in all processes

    def __init__(self, settings: TrainerSettings, feed: Feed, stop_poll: StopPoll) -> None:
        self._settings = settings
        self._stop_poll = stop_poll
        self._log_every = settings.log_every
        self._validate_every = settings.validate_every_steps
        has_validation = bool(feed.validation)
        self._validates_after = feed.validations_within(settings) if has_validation else frozenset()
        self._validates_within = has_validation and bool(
            self._validate_every is not None or self._validates_after
        )
        self._poll_at = 0  # steps

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

    # ---- clock and signals, at which all processes look after the same steps

    def begin(self, step: int) -> None:
        self._poll_at = self._stop_poll.begin(step)

    def polls(self, step: int) -> bool:
        return step >= self._poll_at

    def has_polled(self, step: int) -> bool:
        return self._stop_poll.done == step

    def poll(self, step: int) -> str:
        """Why to stop, or ""; a signal is raised in every process."""
        self._poll_at, self.clock = self._stop_poll.poll(step)
        limit = self._settings.max_seconds
        if limit is not None and self.clock > limit:
            return f"trainer.max_seconds={limit:g} are over"
        return ""
