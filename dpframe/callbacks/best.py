"""The best value that a metric has had, for a run's summary."""

from typing import TYPE_CHECKING, Any

from dpframe.callbacks.base import Callback
from dpframe.callbacks.monitor import Monitor

if TYPE_CHECKING:
    from dpframe.trainer import Trainer


class Best(Callback):
    """A metric that is not measured is none of its business: `value` stays None."""

    def __init__(self, monitor: str, mode: str, key: str) -> None:
        self.monitor = Monitor(monitor, mode, key=key)

    @property
    def value(self) -> dict[str, float]:
        return {} if self.monitor.best is None else {self.monitor.name: self.monitor.best}

    def on_validation_end(self, trainer: "Trainer") -> None:
        if self.monitor.is_of_validation and trainer.mode == "fit":
            self._judge(trainer)

    def on_epoch_end(self, trainer: "Trainer") -> None:
        if not self.monitor.is_of_validation:
            self._judge(trainer)

    def _judge(self, trainer: "Trainer") -> None:
        if self.monitor.name in trainer.metrics:
            self.monitor.is_better(trainer.metrics[self.monitor.name])

    def state_dict(self) -> dict[str, Any]:
        return {"watched": self.monitor.watched, "best": self.monitor.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("watched") == self.monitor.watched:
            self.monitor.load_best(state.get("best"))
