"""A metric that is watched and its best value, which `Best` keeps for the summary."""

import logging
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from dpframe.errors import UserError, metric_of, not_one_of
from dpframe.trainer.callback import Callback
from dpframe.values import check_type

if TYPE_CHECKING:
    from dpframe.trainer import Trainer


log = logging.getLogger("dpframe")
GROW = {  # words in names of metrics that are better when higher
    *("acc", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "iou", "miou", "precision"),
    *("psnr", "r2", "recall", "ssim"),
}
PRUNED = "pruned: "  # begins why a run has stopped that a sweep takes for a pruned one


def unfit_in_checkpoint(key: str, name: str, value: object) -> UserError:
    """A checkpoint is data, which a stranger may have written."""
    return UserError(f"resume: {key} had {name}={str(value)[:200]}; use another checkpoint")


def count_in(state: dict[str, Any], name: str, key: str) -> int:
    value = state.get(name)
    if type(value) is not int or value < 0:
        raise unfit_in_checkpoint(key, name, value)
    return value


class EpochRow(NamedTuple):
    """What it ended with."""

    number: int
    step: int
    metrics: dict[str, float]


class Monitor:
    """Knows the metric, which way is better, and the best value so far."""

    def __init__(self, name: str, mode: str, *, key: str, min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise not_one_of(f"{key}.mode", mode, ("min", "max"))
        if not isinstance(name, str):
            raise UserError(f"{key}.monitor={name} is not the name of a metric; use e.g. val/loss")
        check_type(f"{key}.min_delta", min_delta, float)
        self.name = name
        self.mode = mode
        self.key = key
        self.min_delta = min_delta
        self.sign = 1 if mode == "min" else -1  # a smaller `sign * value` is better
        self.is_of_validation = name.startswith("val/")
        self.watched = f"{mode} {name}"
        self.reset()

    def reset(self) -> None:
        self.best: float | None = None

    def warn_of_mode(self, trainer: "Trainer") -> None:
        """Where the metric's name says that more is better, and the mode that less is."""
        words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", self.name).lower()
        if self.mode == "min" and trainer.strategy.is_main and GROW & {*re.split(r"\W|_", words)}:
            log.warning(
                f"{self.key}.monitor={self.name} is best where it is lowest, by {self.key}.mode=min"
                f"; where more is better, set {self.key}.mode=max"
            )

    def value(self, metrics: dict[str, float]) -> float:
        return metric_of(f"{self.key}.monitor", self.name, metrics)

    def is_better(self, value: float) -> bool:
        """Whether `value` is the best so far; if so it is kept. NaN never is."""
        if math.isnan(value):
            return False
        if self.best is not None and self.sign * value >= self.sign * self.best - self.min_delta:
            return False
        self.best = value
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        best = state.get("best")
        if best is not None and not hasattr(best, "__float__"):
            raise unfit_in_checkpoint(self.key, "best", best)
        self.best = best


class Best(Callback):
    """The best value of a metric, for a run's summary; none if it is not measured."""

    reads_metrics = True

    def __init__(self, monitor: str, mode: str, key: str, *, is_needed: bool = False) -> None:
        self.monitor = Monitor(monitor, mode, key=key)
        self.watches = self.monitor.watched
        self.is_needed = is_needed
        self.reset()

    def reset(self) -> None:
        self.monitor.reset()
        self.epoch = self.step = 0  # after which it was measured
        self.metrics: dict[str, float] = {}  # of that epoch; of a step within one, the val/ numbers

    def monitored(self) -> list[tuple[str, str]]:
        return [(self.monitor.key, self.monitor.name)] if self.is_needed else []

    @property
    def value(self) -> dict[str, float]:
        return {} if self.monitor.best is None else {self.monitor.name: self.monitor.best}

    def on_validation_end(self, trainer: "Trainer") -> None:
        if trainer.mode == "fit":
            measured = {k: v for k, v in trainer.metrics.items() if not k.startswith("train/")}
            self._judge(trainer, measured)

    def on_epoch_end(self, trainer: "Trainer") -> None:
        self._judge(trainer, trainer.metrics)

    def _judge(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        name, step = self.monitor.name, trainer.global_step
        if name in metrics and self.monitor.is_better(metrics[name]):
            self.epoch, self.step = trainer.progress.current_epoch, step
        if self.step == step:
            self.metrics = {**metrics}

    def state_dict(self) -> dict[str, Any]:
        place = {"epoch": self.epoch, "step": self.step, "metrics": self.metrics}
        return {**self.monitor.state_dict(), **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from dpframe.metrics import is_number  # imports torch, and `dpframe runs` has no use for it

        self.monitor.load_state_dict(state)
        self.epoch, self.step = state.get("epoch", 0), state.get("step", 0)
        metrics = state.get("metrics", self.value)
        if not (isinstance(metrics, dict) and all(map(is_number, metrics.values()))):
            raise unfit_in_checkpoint(self.monitor.key, "metrics", metrics)
        self.metrics = metrics
