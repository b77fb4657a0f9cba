"""What a sweep optimises: the best value of the metric by which `best.ckpt` is chosen."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from dpframe.cli.resume import key_of
from dpframe.cli.settings import shown
from dpframe.errors import UserError

# A sweeper's key, and its values for the modes min, which is every sweeper's default, and max.
DIRECTIONS: dict[str, dict[str, Any]] = {
    "direction": {"min": "minimize", "max": "maximize"},  # Optuna's
    "optim.maximize": {"min": False, "max": True},  # Nevergrad's
    "ax_config.experiment.minimize": {"min": True, "max": False},
}


class Objective(NamedTuple):
    metric: str = "val/loss"
    mode: str = "min"
    key: str = ""  # of the callback that monitors it

    def value(self, summary: Mapping[str, Any]) -> float | None:
        best = summary.get("best", {}).get(self.metric)
        return summary["metrics"].get(self.metric) if best is None else best


def objective_of(callbacks: Mapping[str, Any]) -> Objective:
    for name in ("checkpoint", "early_stopping"):
        node = callbacks.get(name)
        if isinstance(node, Mapping) and node.get("monitor"):
            mode = str(node.get("mode", "min"))
            return Objective(str(node["monitor"]), mode, f"callbacks.{name}")
    return Objective()


def direction(sweeper: DictConfig, objective: Objective, overrides: Sequence[str]) -> list[str]:
    """The override that turns the sweeper to where the metric gets better, if it needs one."""
    for name, values in DIRECTIONS.items():
        node, better = OmegaConf.select(sweeper, name), values.get(objective.mode)
        if node is None or better is None:
            continue
        key = f"hydra.sweeper.{name}"
        directions = [_plain(value) for value in (node if OmegaConf.is_list(node) else [node])]
        if len(directions) != 1:
            raise UserError(
                f"{key}={directions}: a run has one objective, {objective.metric}; name one"
            )
        if directions[0] == better:
            return []
        if key in map(key_of, overrides) or directions[0] != values["min"]:
            where = f"{objective.key}.mode" if objective.key else "its mode"
            raise UserError(
                f"{key}={shown(directions[0])}, but the objective is {objective.metric}, where "
                f"{where} is {objective.mode}; leave one out, or change the other"
            )
        return [f"{key}={shown(better)}"]
    return []


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value
