"""Keeps `last.ckpt`, and `best.ckpt` by a metric, in the run directory; or files by a pattern."""

import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dpframe import checkpoint
from dpframe.callbacks.monitor import Monitor, unfit_in_checkpoint
from dpframe.checkpoint import seal
from dpframe.checkpoint.plain import refuse_unplain
from dpframe.errors import Interrupted, UserError, suggestion
from dpframe.trainer.callback import Callback
from dpframe.util import files
from dpframe.values import ABOVE_0, refuse_below

if TYPE_CHECKING:
    from dpframe.strategies.sharding import Sharding
    from dpframe.trainer import Trainer

log = logging.getLogger("dpframe")
KEY = "callbacks.checkpoint"
LAST, BEST = "last.ckpt", "best.ckpt"
EPOCH = "epoch{epoch:04d}"
EXAMPLE = "f1-{epoch}-{val/f1:.3f}"
AUTO, USUAL = "auto", "val/loss"
PLAIN = "[A-Za-z0-9_.,=+@-]"  # a letter of a file's name


class Checkpoint(Callback):
    """`keep` is how many of the best are kept; the best of all is always `best.ckpt`.

    The best are judged at the epochs of `every_n_epochs`, at validations within an epoch, and at
    the end of training. Files are written on a thread of their own while training goes on, and
    `seconds_between` is the least time between two writes. An epoch that ends sooner after the last
    save is saved only if it is a best.

    `monitor="auto"` is val/loss where that is measured; else `last.ckpt` alone is kept.
    With a `file`, e.g. `f1-{epoch}-{val/f1:.3f}`, it keeps the best under names of that pattern and
    of their steps, and leaves `last.ckpt` and `best.ckpt` to another of these callbacks.
    """

    runs_last = True  # what the others decide at this hook belongs in the checkpoint
    needs_directory = True
    writer_type = checkpoint.Writer

    def __init__(
        self,
        monitor: str = USUAL,
        mode: str = "min",
        keep: int = 1,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
        seconds_between: float = 0.5,
        file: str | None = None,
    ) -> None:
        refuse_below(f"{KEY}.keep", keep, 0)
        refuse_below(f"{KEY}.every_n_epochs", every_n_epochs, use="1 or more, or null")
        refuse_below(f"{KEY}.every_n_steps", every_n_steps, use="1 or more, or null")
        refuse_below(f"{KEY}.every_n_minutes", every_n_minutes, ABOVE_0, "more than 0, or null")
        refuse_below(f"{KEY}.seconds_between", seconds_between, 0.0)
        if file is not None:
            refuse_below(f"{KEY}.keep", keep, use="1 or more where there is a file")
        self.is_chosen = monitor != AUTO
        self.monitor = Monitor(monitor if self.is_chosen else USUAL, mode, key=KEY)
        self.file = file
        self.watches = " ".join([self.monitor.watched, *([] if file is None else [file])])
        self.pattern = FilePattern(EPOCH if file is None else file)
        self.keep = keep
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.every_seconds = None if every_n_minutes is None else 60 * every_n_minutes
        self.seconds_between = seconds_between
        self.writer = self.writer_type(seconds_between)
        self.reset()

    def reset(self) -> None:
        self.monitor.reset()
        self.kept: list[tuple[float, str]] = []  # the best first; empty where keep is 1
        self.due: list[str] = []  # files to be written at this hook
        self.dropped: list[str] = []  # files that are no longer kept, which the next save removes
        self.removed: list[str] = []  # those that were removed, or about to be, since judged_step
        self.saved_step = -1
        self.saved_clock = 0.0
        self.judged_step = -1

    def monitored(self) -> list[tuple[str, str]]:
        is_needed = self.keep and self.is_chosen
        return [(f"{self.monitor.key}.monitor", self.monitor.name)] if is_needed else []

    def on_fit_start(self, trainer: "Trainer") -> None:
        self._refuse_same_names(trainer)
        self.monitor.warn_of_mode(trainer)
        # What a checkpoint can't hold is told before the first step.
        state = trainer.state_dict(whole=_sharding(trainer) is None)
        if trainer.strategy.is_main:
            refuse_unplain(state)
            _directory(trainer).mkdir(parents=True, exist_ok=True)
            files.remove_leftovers(_directory(trainer))
            self._finish_killed_save(trainer)
            seal.remove_parts(_directory(trainer))
        if (sharding := _sharding(trainer)) is not None:
            sharding.check_folder(_directory(trainer))

    def on_step_end(self, trainer: "Trainer") -> None:
        is_due = self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        # The clock is the same in all processes.
        since = trainer.clock - self.saved_clock
        if is_due or (self.every_seconds is not None and since >= self.every_seconds):
            self._save(trainer, [LAST])

    def on_validation_end(self, trainer: "Trainer") -> None:
        is_within_epoch = trainer.progress.batches_done > 0  # at its end, on_epoch_end knows more
        if is_within_epoch and trainer.mode == "fit":
            self._save(
                trainer, self._judge_all(trainer, lambda each: each.monitor.is_of_validation)
            )

    def on_epoch_end(self, trainer: "Trainer") -> None:
        names = self._judge_all(
            trainer, lambda each: not trainer.epoch % (each.every_n_epochs or 1)
        )
        if trainer.epoch % (self.every_n_epochs or 1):
            return
        since = trainer.clock - self.saved_clock
        if self.every_n_epochs and (names or self.saved_step < 0 or since >= self.seconds_between):
            names = [*names, LAST]
        elif self.every_n_epochs:  # the weights must not depend on a clock
            trainer.strategy.sync_weights(for_reading=True)
        self._save(trainer, names)

    def on_fit_end(self, trainer: "Trainer") -> None:
        names = self._judge_all(trainer, lambda each: True)
        if trainer.global_step != self.saved_step:
            names = [*names, LAST]
        self._save(trainer, names)
        self.writer.finish()
        is_gone = self.file is None and not (_directory(trainer) / BEST).is_file()
        if trainer.strategy.is_main and is_gone:
            trainer.checkpoint = str(_directory(trainer) / LAST)  # the best one was deleted
        # The others wait for the files, which their program may read next.
        trainer.checkpoint = trainer.strategy.collectives.broadcast(trainer.checkpoint)

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
        dropped = [*self.removed, *self.dropped]
        told = {"kept": kept, "dropped": dropped, "judged_step": self.judged_step}
        return {**self.monitor.state_dict(), **told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.monitor.load_state_dict(state)
        kept, dropped = state.get("kept"), state.get("dropped")
        if not (isinstance(kept, list) and all(map(self._is_kept, kept))):
            raise unfit_in_checkpoint(KEY, "kept", kept)  # names of files that may be removed later
        if not (isinstance(dropped, list) and all(map(self._is_own, dropped))):
            raise unfit_in_checkpoint(KEY, "dropped", dropped)
        self.kept, self.removed = [(value, name) for value, name in kept], list(dropped)
        judged = state.get("judged_step")
        self.judged_step = judged if type(judged) is int else -1

    def _is_kept(self, pair: Any) -> bool:
        if not (isinstance(pair, list) and len(pair) == 2 and hasattr(pair[0], "__float__")):
            return False
        return self._is_own(pair[1])

    def _is_own(self, name: Any) -> bool:
        return isinstance(name, str) and self.pattern.fits(name)

    def _refuse_same_names(self, trainer: "Trainer") -> None:
        for other in _checkpoints(trainer):
            if other is self:
                continue
            if self.file is None and other.file is None:
                raise UserError("two Checkpoints would write best.ckpt; give one of them a file")
            names = sorted([self.pattern.prefix, other.pattern.prefix])
            if names[1].startswith(names[0]):
                raise UserError(
                    f"{KEY}.file={other.pattern.text} of one Checkpoint and {self.pattern.text} "
                    "of another begin with the same text; begin them differently"
                )

    def _judge_all(self, trainer: "Trainer", judges: Callable[["Checkpoint"], bool]) -> list[str]:
        """The files that this step's state belongs in. All of these callbacks judge before one of
        them saves, so that its file holds what all of them keep."""
        for each in _checkpoints(trainer):
            if judges(each):
                each.due += each._judge(trainer)
        names, self.due = self.due, []
        return names

    def _judge(self, trainer: "Trainer") -> list[str]:
        """Judges a step once; files that it pushes out of `kept` are dropped."""
        step = trainer.global_step
        has_value = step == trainer.progress.validated_step or not self.monitor.is_of_validation
        if not self.keep or not has_value or step == self.judged_step:
            return []
        is_first, self.judged_step, self.removed = self.judged_step < 0, step, []
        if not self.is_chosen and self.monitor.name not in trainer.metrics:
            if is_first and trainer.strategy.is_main:
                log.warning(
                    "%s is not measured, so only %s is kept; set %s.monitor, there is: %s",
                    *(self.monitor.name, LAST, KEY, ", ".join(trainer.metrics) or "nothing"),
                )
            return []
        value = self.monitor.value(trainer.metrics)
        names = [BEST] if self.monitor.is_better(value) else []
        if (self.keep == 1 and self.file is None) or math.isnan(value):
            return names
        name = self.pattern.name({**trainer.metrics, "epoch": trainer.epoch, "step": step})
        ranked = sorted([*self.kept, (value, name)], key=lambda pair: self.monitor.sign * pair[0])
        self.kept = ranked[: self.keep]
        self.dropped += [old for _, old in ranked[self.keep :] if old != name]
        return [name, *names] if (value, name) in self.kept else names

    def _save(self, trainer: "Trainer", names: list[str]) -> None:
        if self.file is not None:
            names = [name for name in names if name not in (LAST, BEST)]
        if not names:
            return
        if LAST in names:
            self.saved_step, self.saved_clock = trainer.global_step, trainer.clock
        folder, sharding = _directory(trainer), _sharding(trainer)
        if sharding is not None:  # all processes write a state together: one after another
            for each in _checkpoints(trainer):
                each.writer.wait()
        is_main = trainer.strategy.is_main
        # In every process: each contributes its random state, and its shards.
        state = trainer.state_dict(whole=sharding is None)
        if is_main:
            trainer.recorder.flush()  # the curve goes as far as the checkpoint, whatever happens
        if is_main or sharding is not None:
            dropped = [folder / name for name in self.dropped if is_main]
            self.writer.save(state, [folder / n for n in names], dropped, sharding=sharding)
        if is_main:
            if self.file is None:
                best = LAST if self.monitor.best is None else BEST
                trainer.checkpoint = str(folder / best)
            elif trainer.checkpoint is None or self.pattern.fits(Path(trainer.checkpoint).name):
                trainer.checkpoint = str(folder / self.kept[0][1])  # no other one keeps a last.ckpt
        self.removed, self.dropped = [*self.removed, *self.dropped], []

    def _finish_killed_save(self, trainer: "Trainer") -> None:
        """Removes and copies what a killed run was about to, by its state."""
        folder, names = _directory(trainer), [name for _, name in self.kept]
        for name in self.removed:
            (folder / name).unlink(missing_ok=True)
        # The best one, under the name of its step.
        if self.file is None and names and (folder / names[0]).is_file():
            first, best = folder / names[0], folder / BEST
            if seal.damage(best) or seal.step_of(best) < seal.step_of(first):
                checkpoint.copy(first, best)


class FilePattern:
    """The names of a callback's files: text, the epoch, the step and metrics, and always the step.

    They begin with text that tells them from the files of other callbacks.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.prefix = text.partition("{")[0]
        try:
            example = text.format_map(defaultdict(int))
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise UserError(f"{KEY}.file={text}: {error}; use e.g. {EXAMPLE}") from None
        if not (re.match("[A-Za-z]", self.prefix) and re.fullmatch(f"{PLAIN}*", example)):
            raise UserError(
                f"{KEY}.file={text} is no plain file name that begins with a "
                f"letter; use e.g. {EXAMPLE}"
            )

    def name(self, values: dict[str, float]) -> str:
        try:
            name = self.text.format_map(values)
        except KeyError as error:
            field = error.args[0]
            raise UserError(
                f"{KEY}.file={self.text}: {field} is not measured; {suggestion(field, values)}"
            ) from None
        except ValueError as error:
            raise UserError(f"{KEY}.file={self.text}: {error}") from None
        return f"{name}-step{values['step']}.ckpt"

    def fits(self, name: str) -> bool:
        """Whether a file is one of these, and so may be removed."""
        return re.fullmatch(rf"{re.escape(self.prefix)}{PLAIN}*-step[0-9]+\.ckpt", name) is not None


def _sharding(trainer: "Trainer") -> "Sharding | None":
    """If each process writes its own shards."""
    sharding = trainer.strategy.sharding
    return cast("Sharding", sharding) if sharding.saves_shards else None


def _checkpoints(trainer: "Trainer") -> list[Checkpoint]:
    return [each for each in trainer.callbacks if isinstance(each, Checkpoint)]


def _directory(trainer: "Trainer") -> Path:
    return Path(trainer.run.directory) / "checkpoints"
