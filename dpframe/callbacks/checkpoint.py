"""Keeps `last.ckpt`, and `best.ckpt` by a metric, in the run directory."""

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpframe import checkpoint, files, seal
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
    the end of training. Files are written on a thread of their own while training goes on. Of
    epochs that are shorter than `seconds_between`, those that are no best are not all saved.
    """

    runs_last = True  # what the others decided at this hook belongs into the checkpoint
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
        for name, value in {
            "every_n_epochs": every_n_epochs,
            "every_n_steps": every_n_steps,
        }.items():
            if value is not None and value < 1:
                raise UserError(f"callbacks.checkpoint.{name}={value}; give 1 or more, or null")
        if every_n_minutes is not None and not every_n_minutes > 0:
            raise UserError(
                f"callbacks.checkpoint.every_n_minutes={every_n_minutes}; give more than 0, or null"
            )
        if not seconds_between >= 0:
            raise UserError(
                f"callbacks.checkpoint.seconds_between={seconds_between}; give 0 or more"
            )
        if keep < 0:
            raise UserError(f"callbacks.checkpoint.keep={keep}; give 0 or more")
        self.monitor = Monitor(monitor, mode, key="callbacks.checkpoint")
        self.keep = keep
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.every_seconds = None if every_n_minutes is None else 60 * every_n_minutes
        self.seconds_between = seconds_between
        self.kept: list[tuple[float, str]] = []  # the best first; empty where keep is 1
        self.saved_step = -1
        self.saved_clock = 0.0
        self.judged_step = -1
        self.writer = checkpoint.Writer(seconds_between)

    def on_fit_start(self, trainer: "Trainer") -> None:
        if trainer.strategy.is_main:
            files.sweep(_directory(trainer))
            self._drop_outranked(trainer)
            self._copy_best(trainer)

    def on_step_end(self, trainer: "Trainer") -> None:
        is_due = self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        if is_due or self._is_time(trainer):
            self._save(trainer, [LAST])

    def on_validation_end(self, trainer: "Trainer") -> None:
        is_within_epoch = trainer.batches_done > 0  # at its end, on_epoch_end knows more
        if is_within_epoch and trainer.mode == "fit" and self.monitor.is_of_validation:
            self._save(trainer, *self._judged(trainer))

    def on_epoch_end(self, trainer: "Trainer") -> None:
        if trainer.epoch % (self.every_n_epochs or 1) == 0:
            names, dropped = self._judged(trainer)
            if self.every_n_epochs and (names or not self._is_early(trainer)):
                names = [*names, LAST]
            elif self.every_n_epochs:  # what weights come of it is not to depend on a clock
                trainer.strategy.weight_sync(is_read=True)
            self._save(trainer, names, dropped)

    def on_fit_end(self, trainer: "Trainer") -> None:
        names, dropped = self._judged(trainer)
        self._save(
            trainer, names if trainer.global_step == self.saved_step else [*names, LAST], dropped
        )
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
        except Exception as second:  # not in the place of what ended the run
            log.warning("%s", second)

    def state_dict(self) -> dict[str, Any]:
        return {
            "watched": self.monitor.watched,
            "best": self.monitor.best,
            "kept": [list(pair) for pair in self.kept],
            "judged_step": self.judged_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("watched") != self.monitor.watched:
            return  # another metric's numbers say nothing about this one's
        self.monitor.load_best(state.get("best"))
        kept = state.get("kept")
        if not (isinstance(kept, list) and all(map(_is_kept, kept))):  # what falls out is removed
            raise UserError(
                f"resume: callbacks.checkpoint would have kept {str(kept)[:200]}, which are not "
                "its files; use another checkpoint"
            )
        self.kept = [(value, name) for value, name in kept]
        judged = state.get("judged_step")
        self.judged_step = judged if type(judged) is int else -1

    def _drop_outranked(self, trainer: "Trainer") -> None:
        """What a killed run was about to remove. Files of later steps are another try's: kept."""
        for path in _directory(trainer).glob("epoch*-step*.ckpt"):
            step = path.stem.partition("-step")[2]
            is_past = step.isdigit() and int(step) <= trainer.global_step
            if is_past and path.name not in [name for _, name in self.kept]:
                path.unlink(missing_ok=True)

    def _copy_best(self, trainer: "Trainer") -> None:
        """What a killed run was about to: the best has its own name already, where `keep` is 2."""
        if not self.kept:
            return
        own, best = (_directory(trainer) / name for name in (self.kept[0][1], BEST))
        if own.is_file() and (seal.flaw(best) or seal.step_of(best) < seal.step_of(own)):
            checkpoint.copy(own, best)

    def _is_early(self, trainer: "Trainer") -> bool:
        """Too soon after the last file to copy the state again."""
        is_first = self.saved_step < 0
        return not is_first and trainer.clock - self.saved_clock < self.seconds_between

    def _is_time(self, trainer: "Trainer") -> bool:
        """By a clock that is the same in all processes."""
        seconds = self.every_seconds
        return seconds is not None and trainer.clock - self.saved_clock >= seconds

    def _judged(self, trainer: "Trainer") -> tuple[list[str], list[str]]:
        """The files that this step's state belongs into, and those that it pushes out."""
        step = trainer.global_step
        has_value = step == trainer.validated_step or not self.monitor.is_of_validation
        if not self.keep or not has_value or step == self.judged_step:
            return [], []
        self.judged_step = step
        value = self.monitor.value(trainer.metrics)
        is_best = self.monitor.is_better(value)
        names, dropped = self._ranked(trainer, value)
        return ([*names, BEST] if is_best else names), dropped

    def _ranked(self, trainer: "Trainer", value: float) -> tuple[list[str], list[str]]:
        if self.keep == 1 or value != value:  # NaN is none of the best
            return [], []
        sign = 1 if self.monitor.mode == "min" else -1
        name = f"epoch{trainer.epoch:04d}-step{trainer.global_step}.ckpt"
        ranked = sorted([*self.kept, (value, name)], key=lambda pair: sign * pair[0])
        self.kept, out = ranked[: self.keep], [old for _, old in ranked[self.keep :]]
        return ([name] if name not in out else []), [old for old in out if old != name]

    def _save(self, trainer: "Trainer", names: list[str], dropped: list[str] | None = None) -> None:
        if not names:
            return
        if LAST in names:
            self.saved_step, self.saved_clock = trainer.global_step, trainer.clock
        state = trainer.state_dict()  # in every process: each gives its random state
        if trainer.strategy.is_main:
            trainer.report.flush()  # the curve goes as far as the checkpoint, whatever happens
            folder = _directory(trainer)
            if not folder.parent.is_dir():
                log.warning("%s was moved or deleted; what is saved goes on there", folder.parent)
            self.writer.save(
                state, [folder / name for name in names], [folder / old for old in dropped or []]
            )
            best = LAST if self.monitor.best is None else BEST
            trainer.checkpoint = str(folder / best)


def _is_kept(pair: Any) -> bool:
    if not (isinstance(pair, list) and len(pair) == 2 and hasattr(pair[0], "__float__")):
        return False
    return re.fullmatch(r"epoch[0-9]{4,}-step[0-9]+\.ckpt", str(pair[1])) is not None


def _directory(trainer: "Trainer") -> Path:
    return Path(trainer.run.directory) / "checkpoints"
