"""Keeps `last.ckpt`, and `best.ckpt` by a metric, in the run directory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpframe import checkpoint
from dpframe.callbacks.base import Callback
from dpframe.callbacks.monitor import Monitor
from dpframe.errors import UserError

if TYPE_CHECKING:
    from dpframe.trainer import Trainer


class Checkpoint(Callback):
    """`keep` is how many of the best are kept; the best of all is always `best.ckpt`.

    The best are judged at the epochs of `every_n_epochs`, at validations within an epoch, and at
    the end of training.
    """

    runs_last = True  # what the others decided at this hook belongs into the checkpoint

    def __init__(
        self,
        monitor: str = "val/loss",
        mode: str = "min",
        keep: int = 1,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
    ) -> None:
        for name, value in {
            "every_n_epochs": every_n_epochs,
            "every_n_steps": every_n_steps,
        }.items():
            if value is not None and value < 1:
                raise UserError(f"callbacks.checkpoint.{name}={value}; give 1 or more, or null")
        if keep < 0:
            raise UserError(f"callbacks.checkpoint.keep={keep}; give 0 or more")
        self.monitor = Monitor(monitor, mode, key="callbacks.checkpoint")
        self.keep = keep
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.kept: list[tuple[float, str]] = []  # the best first; empty where keep is 1
        self.saved_step = -1
        self.judged_step = -1

    def on_fit_start(self, trainer: "Trainer") -> None:
        if trainer.strategy.is_main:
            checkpoint.sweep(_directory(trainer))

    def on_step_end(self, trainer: "Trainer") -> None:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._save_last(trainer)

    def on_validation_end(self, trainer: "Trainer") -> None:
        is_within_epoch = trainer.batches_done > 0  # at its end, on_epoch_end knows more
        if is_within_epoch and trainer.mode == "fit" and self.monitor.is_of_validation:
            self._judge(trainer)

    def on_epoch_end(self, trainer: "Trainer") -> None:
        if trainer.epoch % (self.every_n_epochs or 1) == 0:
            self._judge(trainer)
            if self.every_n_epochs:
                self._save_last(trainer)

    def on_fit_end(self, trainer: "Trainer") -> None:
        self._judge(trainer)
        if trainer.global_step != self.saved_step:
            self._save_last(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.monitor.best, "kept": [list(pair) for pair in self.kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.monitor.best = state["best"]
        self.kept = [(value, name) for value, name in state["kept"]]

    def _save_last(self, trainer: "Trainer") -> None:
        self.saved_step = trainer.global_step
        self._save(trainer, "last.ckpt")

    def _judge(self, trainer: "Trainer") -> None:
        """Keeps this step's state if its metric is new and good."""
        step = trainer.global_step
        has_value = step == trainer.validated_step or not self.monitor.is_of_validation
        if not self.keep or not has_value or step == self.judged_step:
            return
        self.judged_step = step
        value = self.monitor.value(trainer.metrics)
        is_best = self.monitor.is_better(value)
        if self.keep > 1 and value == value:  # NaN is none of the best
            self._rank(trainer, value)
        if is_best:
            self._save(trainer, "best.ckpt")

    def _rank(self, trainer: "Trainer", value: float) -> None:
        sign = 1 if self.monitor.mode == "min" else -1
        name = f"epoch{trainer.epoch:04d}-step{trainer.global_step}.ckpt"
        ranked = sorted([*self.kept, (value, name)], key=lambda pair: sign * pair[0])
        self.kept, dropped = ranked[: self.keep], ranked[self.keep :]
        if (value, name) in self.kept:
            self._save(trainer, name)
        for _, old in dropped:
            if trainer.strategy.is_main:
                (_directory(trainer) / old).unlink(missing_ok=True)

    def _save(self, trainer: "Trainer", name: str) -> None:
        state = trainer.state_dict()  # in every process: each gives its random state
        if trainer.strategy.is_main:
            checkpoint.save(state, _directory(trainer) / name)
            best = "last.ckpt" if self.monitor.best is None else "best.ckpt"
            trainer.checkpoint = str(_directory(trainer) / best)


def _directory(trainer: "Trainer") -> Path:
    return Path(trainer.run.directory) / "checkpoints"
