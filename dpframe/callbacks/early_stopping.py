"""Stops when a metric has not got better for some epochs."""

from typing import TYPE_CHECKING, Any

from dpframe.callbacks.base import Callback
from dpframe.callbacks.monitor import Monitor

if TYPE_CHECKING:
    from dpframe.trainer import Trainer


class EarlyStopping(Callback):
    def __init__(
        self,
        monitor: str = "val/loss",
        mode: str = "min",
        patience: int = 10,
        min_delta: float = 0.0,
    ) -> None:
        self.monitor = Monitor(monitor, mode, key="callbacks.early_stopping", min_delta=min_delta)
        self.patience = patience
        self.epochs_without_progress = 0

    def on_epoch_end(self, trainer: "Trainer") -> None:
        if self.monitor.is_better(self.monitor.value(trainer.metrics)):
            self.epochs_without_progress = 0
            return
        self.epochs_without_progress += 1
        if self.epochs_without_progress >= self.patience:
            trainer.stop(
                f"{self.monitor.name} has not got better than {self.monitor.best:.6g} "
                f"for {self.patience} epochs"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.monitor.best,
            "epochs_without_progress": self.epochs_without_progress,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.monitor.best = state["best"]
        self.epochs_without_progress = state["epochs_without_progress"]
