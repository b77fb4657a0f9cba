"""A metric that is watched, and the best it has been."""

import math
from typing import Any

from dpframe.errors import UserError, suggestion


class Monitor:
    def __init__(self, name: str, mode: str, *, key: str, min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise UserError(f"{key}.mode={mode} is not one of min, max")
        self.name = name
        self.mode = mode
        self.key = key
        self.min_delta = min_delta
        self.best: float | None = None
        self.is_of_validation = name.startswith("val/")

    @property
    def watched(self) -> str:
        return f"{self.mode} {self.name}"

    def load_best(self, best: Any) -> None:
        """As a checkpoint has it, which may be anybody's."""
        if best is not None and not hasattr(best, "__float__"):
            raise UserError(
                f"resume: {self.key} had {str(best)[:200]} for its best {self.name}; "
                "use another checkpoint"
            )
        self.best = best

    def value(self, metrics: dict[str, float]) -> float:
        if self.name not in metrics:
            raise UserError(
                f"{self.key}.monitor={self.name} is not measured; {suggestion(self.name, metrics)}"
            )
        return metrics[self.name]

    def is_better(self, value: float) -> bool:
        """Whether `value` is the best so far; if so it is kept. NaN never is."""
        if math.isnan(value):
            return False
        sign = 1 if self.mode == "min" else -1
        if self.best is not None and sign * value >= sign * self.best - self.min_delta:
            return False
        self.best = value
        return True
