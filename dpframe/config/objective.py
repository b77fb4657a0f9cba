"""What a run is compared by: the best value of the metric by which `best.ckpt` is chosen."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dpframe.errors import UserError

CHOSEN = "sweep.metric"


class Objective(NamedTuple):
    """The metric and the direction that a run is compared by."""

    metric: str = "val/loss"
    mode: str = "min"
    key: str = ""  # of the callback that monitors it, or `sweep.metric`

    @property
    def mode_key(self) -> str:
        return "sweep.mode" if self.key == CHOSEN else f"{self.key}.mode" if self.key else ""


def objective_of(config: Mapping[str, Any]) -> Objective:
    """`sweep.metric`, or what the checkpoint monitors, or early stopping."""
    monitors = _monitors(config.get("callbacks") or {})
    sweep = config.get("sweep") or {}
    metric, mode = sweep.get("metric"), sweep.get("mode")
    if metric is not None:
        mode = mode or next((each.mode for each in monitors if each.metric == metric), None)
        if mode is None:
            raise UserError(
                f"{CHOSEN}={metric}: no callback monitors it, so nothing says in which "
                "direction it gets better; add sweep.mode=min or sweep.mode=max"
            )
        return Objective(str(metric), str(mode), CHOSEN)
    keys = ("callbacks.checkpoint", "callbacks.early_stopping")
    objective = next((each for key in keys for each in monitors if each.key == key), Objective())
    if config.get("mode") == "test":  # which measures no val/
        tested = re.sub("^val/", "test/", objective.metric)
        return objective._replace(metric=tested)
    return objective


def _monitors(callbacks: Mapping[str, Any]) -> list[Objective]:
    return [
        Objective(_metric(node["monitor"]), str(node.get("mode", "min")), f"callbacks.{name}")
        for name, node in callbacks.items()
        if isinstance(node, Mapping) and node.get("monitor")
    ]


def _metric(monitor: Any) -> str:
    return Objective().metric if monitor == "auto" else str(monitor)
