"""Stops when a metric has not got better for some time."""

from typing import TYPE_CHECKING, Any

from dpframe.callbacks.monitor import Monitor, count_in
from dpframe.trainer.callback import Callback
from dpframe.values import refuse_below

if TYPE_CHECKING:
    from dpframe.trainer import Trainer


class EarlyStopping(Callback):
    """`patience` counts validations, or epochs where `monitor` is a train/ metric.

    A validation that happens only because training ends does not count: the run may be extended.
    It stops nothing before `trainer.min_epochs` epochs and `trainer.min_steps` steps are done.
    """

    reads_metrics = True

    def __init__(
        self,
        monitor: str = "val/loss",
        mode: str = "min",
        patience: int = 10,
        min_delta: float = 0.0,
    ) -> None:
        refuse_below("callbacks.early_stopping.patience", patience)
        self.monitor = Monitor(monitor, mode, key="callbacks.early_stopping", min_delta=min_delta)
        self.watches = self.monitor.watched
        self.patience = patience
        self.reset()

    def reset(self) -> None:
        self.monitor.reset()
        self.times_without_progress = 0

    @property
    def is_due(self) -> bool:
        return self.times_without_progress >= self.patience

    def monitored(self) -> list[tuple[str, str]]:
        return [(f"{self.monitor.key}.monitor", self.monitor.name)]

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.monitor.warn_of_mode(trainer)
        self._stop_if_due(trainer)  # a resumed run may have stopped already

    def on_validation_end(self, trainer: "Trainer") -> None:
        is_scheduled = trainer.mode == "fit" and not trainer.is_extra_validation
        if self.monitor.is_of_validation and is_scheduled:
            self._judge(trainer)

    def on_epoch_end(self, trainer: "Trainer") -> None:
        is_whole = trainer.progress.batches_done == 0
        if is_whole and not (self.monitor.is_of_validation and trainer.feed.validation):
            self._judge(trainer)

    def _judge(self, trainer: "Trainer") -> None:
        is_better = self.monitor.is_better(self.monitor.value(trainer.metrics))
        self.times_without_progress = 0 if is_better else self.times_without_progress + 1
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: "Trainer") -> None:
        has_done_least = trainer.settings.has_done_least(trainer.epoch, trainer.global_step)
        if self.is_due and has_done_least:
            best = "NaN" if self.monitor.best is None else f"{self.monitor.best:.6g}"
            times = "validation" if self.monitor.is_of_validation else "epoch"
            times = f"{self.patience} {times}{'s' * (self.patience != 1)}"
            trainer.stop(f"{self.monitor.name} has not got better than {best} for {times}")

    def state_dict(self) -> dict[str, Any]:
        times = {"times_without_progress": self.times_without_progress}
        return {**self.monitor.state_dict(), **times}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.monitor.load_state_dict(state)
        name = "times_without_progress"
        self.times_without_progress = count_in(state, name, self.monitor.key)
