"""Keeps `last.ckpt`, and `best.ckpt` by a metric, in the run directory."""

import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpframe import checkpoint, files
from dpframe.callbacks.base import Callback
from dpframe.callbacks.monitor import Monitor
from dpframe.errors import Interrupted, UserError

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

log = logging.getLogger("dpframe")
LAST, BEST = "last.ckpt", "best.ckpt"


class Checkpoint(Callback):
    """`keep` is how many of the best are kept; the best of all is always `best.ckpt`.

    The best are judged at the epochs of `every_n_epochs`, at validations within an epoch, and at
    the end of training. Files are written on a thread of their own while training goes on. An
    epoch that ends less than `seconds_between` after the last save is saved only if it is a best.
    """

    runs_last = True  # what the others decide at this hook belongs in the checkpoint
    needs_directory = True

    def __init__(
        self,
        monitor: str = "val/loss",
        mode: str = "min",
        keep: int = 1,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
        seconds_between: float = 0.5,
    ) -> None:
        _refuse_less("keep", keep, 0, "0 or more")
        _refuse_less("every_n_epochs", every_n_epochs, 1, "1 or more, or null")
        _refuse_less("every_n_steps", every_n_steps, 1, "1 or more, or null")
        _refuse_less("every_n_minutes", every_n_minutes, math.ulp(0), "more than 0, or null")
        _refuse_less("seconds_between", seconds_between, 0, "0 or more")
        self.monitor = Monitor(monitor, mode, key="callbacks.checkpoint")
        self.keep = keep
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.every_seconds = None if every_n_minutes is None else 60 * every_n_minutes
        self.seconds_between = seconds_between
        self.kept: list[tuple[float, str]] = []  # the best first; empty where keep is 1
        self.dropped: list[str] = []  # those that are no longer, and not yet removed
        self.saved_step = -1
        self.saved_clock = 0.0
        self.judged_step = -1
        self.writer = checkpoint.Writer(seconds_between)

    def on_fit_start(self, trainer: "Trainer") -> None:
        if trainer.strategy.is_main:
            files.sweep(_directory(trainer))
            self._finish_killed_save(trainer)

    def on_step_end(self, trainer: "Trainer") -> None:
        is_due = self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        # The clock is the same in all processes.
        since = trainer.clock - self.saved_clock
        if is_due or (self.every_seconds is not None and since >= self.every_seconds):
            self._save(trainer, [LAST])

    def on_validation_end(self, trainer: "Trainer") -> None:
        is_within_epoch = trainer.progress.batches_done > 0  # at its end, on_epoch_end knows more
        if is_within_epoch and trainer.mode == "fit" and self.monitor.is_of_validation:
            self._save(trainer, self._judge(trainer))

    def on_epoch_end(self, trainer: "Trainer") -> None:
        if trainer.epoch % (self.every_n_epochs or 1):
            return
        names = self._judge(trainer)
        since = trainer.clock - self.saved_clock
        if self.every_n_epochs and (names or self.saved_step < 0 or since >= self.seconds_between):
            names = [*names, LAST]
        elif self.every_n_epochs:  # the weights must not depend on a clock
            trainer.strategy.weight_sync(is_read=True)
        self._save(trainer, names)

    def on_fit_end(self, trainer: "Trainer") -> None:
        names = self._judge(trainer)
        if trainer.global_step != self.saved_step:
            names = [*names, LAST]
        self._save(trainer, names)
        self.writer.wait()
        if trainer.strategy.is_main and not (_directory(trainer) / BEST).is_file():
            trainer.checkpoint = str(_directory(trainer) / LAST)  # the best one was deleted

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None:
        if isinstance(error, Interrupted):
            self._save(trainer, [LAST] if trainer.global_step != self.saved_step else [])
            self.writer.wait()
            return
        try:
            self.writer.wait()
        except Exception as second:  # it must not hide what ended the run
            log.warning("%s", second)

    def state_dict(self) -> dict[str, Any]:
        kept = [list(pair) for pair in self.kept]
        return {**self.monitor.state_dict(), "kept": kept, "judged_step": self.judged_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.monitor.load_state_dict(state):
            return
        kept = state.get("kept")
        if not (isinstance(kept, list) and all(map(_is_kept, kept))):  # they may be removed later
            raise UserError(
                f"resume: callbacks.checkpoint would have kept {str(kept)[:200]}, which are not "
                "its files; use another checkpoint"
            )
        self.kept = [(value, name) for value, name in kept]
        judged = state.get("judged_step")
        self.judged_step = judged if type(judged) is int else -1

    def _judge(self, trainer: "Trainer") -> list[str]:
        """The files that this step's state belongs in; what it pushes out of `kept` is dropped."""
        step = trainer.global_step
        has_value = step == trainer.progress.validated_step or not self.monitor.is_of_validation
        if not self.keep or not has_value or step == self.judged_step:
            return []
        self.judged_step = step
        value = self.monitor.value(trainer.metrics)
        names = [BEST] if self.monitor.is_better(value) else []
        if self.keep == 1 or math.isnan(value):
            return names
        name = f"epoch{trainer.epoch:04d}-step{step}.ckpt"
        ranked = sorted([*self.kept, (value, name)], key=lambda pair: self.monitor.sign * pair[0])
        self.kept = ranked[: self.keep]
        self.dropped += [old for _, old in ranked[self.keep :] if old != name]
        return [name, *names] if (value, name) in self.kept else names

    def _save(self, trainer: "Trainer", names: list[str]) -> None:
        if not names:
            return
        if LAST in names:
            self.saved_step, self.saved_clock = trainer.global_step, trainer.clock
        state = trainer.state_dict()  # in every process: each contributes its random state
        if trainer.strategy.is_main:
            trainer.report.flush()  # the curve goes as far as the checkpoint, whatever happens
            folder = _directory(trainer)
            dropped = [folder / name for name in self.dropped]
            self.writer.save(state, [folder / name for name in names], dropped)
            best = LAST if self.monitor.best is None else BEST
            trainer.checkpoint = str(folder / best)
        self.dropped = []

    def _finish_killed_save(self, trainer: "Trainer") -> None:
        """Removes and copies what a killed run was about to."""
        folder, names = _directory(trainer), [name for _, name in self.kept]
        for path in folder.glob("epoch*-step*.ckpt"):
            step = path.stem.partition("-step")[2]
            is_past = step.isdigit() and int(step) <= trainer.global_step  # else another run's
            if is_past and path.name not in names:
                path.unlink(missing_ok=True)
        if names and (folder / names[0]).is_file():  # the best one, under the name of its step
            first, best = folder / names[0], folder / BEST
            if files.flaw(best) or files.step_of(best) < files.step_of(first):
                checkpoint.copy(first, best)


def _refuse_less(key: str, value: float | None, least: float, valid: str) -> None:
    if value is not None and not value >= least:  # written so that NaN is refused, too
        raise UserError(f"callbacks.checkpoint.{key}={value}; set {valid}")


def _is_kept(pair: Any) -> bool:
    if not (isinstance(pair, list) and len(pair) == 2 and hasattr(pair[0], "__float__")):
        return False
    return re.fullmatch(r"epoch[0-9]{4,}-step[0-9]+\.ckpt", str(pair[1])) is not None


def _directory(trainer: "Trainer") -> Path:
    return Path(trainer.run.directory) / "checkpoints"
