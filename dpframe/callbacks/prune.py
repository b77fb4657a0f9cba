"""Stops a run of a sweep that is worse than most of its finished runs were at that time."""

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpframe.callbacks.monitor import PRUNED, Monitor
from dpframe.trainer.callback import Callback
from dpframe.util import files
from dpframe.values import refuse_below

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

NAME = "curve.json"
SWEEP = "sweep.json"  # in the directory of a sweep, from its beginning on


class Prune(Callback):
    """As Optuna's MedianPruner, for every sweeper: after an epoch, a run stops if the best value so
    far is worse than the median of what the finished runs of its sweep had by then.

    No run is stopped in its first `warmup_epochs`, nor before `startup_runs` runs have finished.
    """

    reads_metrics = True
    needs_directory = True

    def __init__(
        self,
        monitor: str = "val/loss",
        mode: str = "min",
        warmup_epochs: int = 5,
        startup_runs: int = 3,
    ) -> None:
        refuse_below("callbacks.prune.warmup_epochs", warmup_epochs, 0)
        refuse_below("callbacks.prune.startup_runs", startup_runs)
        self.monitor = Monitor(monitor, mode, key="callbacks.prune")
        self.watches = self.monitor.watched
        self.warmup_epochs = warmup_epochs
        self.startup_runs = startup_runs
        self.reset()

    def reset(self) -> None:
        self.monitor.reset()
        self.curve: list[float] = []  # the best value by each epoch

    def monitored(self) -> list[tuple[str, str]]:
        return [(f"{self.monitor.key}.monitor", self.monitor.name)]

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.monitor.warn_of_mode(trainer)

    def on_epoch_end(self, trainer: "Trainer") -> None:
        if trainer.progress.batches_done or len(self.curve) >= trainer.epoch:
            return
        self.monitor.is_better(self.monitor.value(trainer.metrics))
        if self.monitor.best is None:  # NaN so far
            return
        best = self.monitor.best
        self.curve += [best] * (trainer.epoch - len(self.curve))
        if trainer.epoch <= self.warmup_epochs:
            return
        strategy = trainer.strategy
        median = strategy.collectives.broadcast(self._median(trainer) if strategy.is_main else None)
        if median is not None and self.monitor.sign * best > self.monitor.sign * median:
            trainer.stop(
                f"{PRUNED}{self.monitor.name} is {best:.6g} at its best, the median of "
                f"the sweep's runs was {median:.6g} by epoch {trainer.epoch}"
            )

    def on_fit_end(self, trainer: "Trainer") -> None:
        is_whole = not trainer.stop_reason.startswith(PRUNED)
        if trainer.strategy.is_main and is_whole:
            path = Path(trainer.run.directory) / NAME
            files.write_text(path, json.dumps({self.watches: self.curve}))

    def _median(self, trainer: "Trainer") -> float | None:
        """The median over the sweep's finished runs; a shorter run counts by its last value."""
        sweep = Path(trainer.run.directory).absolute().parent
        if not (sweep / SWEEP).is_file():  # a run on its own, among others
            return None
        curves = [_curve(path, self.watches) for path in sweep.glob(f"*/{NAME}")]
        known = [curve[: trainer.epoch][-1] for curve in curves if curve]
        return statistics.median(known) if len(known) >= self.startup_runs else None

    def state_dict(self) -> dict[str, Any]:
        return {**self.monitor.state_dict(), "curve": list(self.curve)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.monitor.load_state_dict(state)
        if isinstance(curve := state.get("curve"), list):
            self.curve = [float(value) for value in curve if hasattr(value, "__float__")]


def _curve(path: Path, watched: str) -> list[float]:
    try:
        curve = json.loads(path.read_text(encoding="utf-8"))[watched]
        return [float(value) for value in curve]
    except (OSError, ValueError, TypeError, KeyError):
        return []  # another metric's, or not what a run has written
