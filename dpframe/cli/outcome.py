"""What one run of a sweep came to."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpframe.callbacks.monitor import PRUNED
from dpframe.config.overrides import key_of

DONE = ("finished", "pruned")
STATES = ("missing", "running", *DONE, "failed", "interrupted")


@dataclass
class Result:
    """One run of a sweep; `number` counts from 1: Hydra's job.num + 1."""

    number: int
    overrides: list[str]
    directory: str = ""  # its name in the sweep's
    status: str = "missing"
    value: float | None = None  # the best of the metric
    seconds: float | None = None
    reason: str = ""  # why it has failed

    @property
    def values(self) -> dict[str, str]:
        return {key_of(override): override.partition("=")[2] for override in self.overrides}

    @property
    def is_done(self) -> bool:
        return self.status in DONE

    @property
    def is_measured(self) -> bool:
        """Whether a mean counts it."""
        return self.status == "finished" and self.value is not None and math.isfinite(self.value)


class Outcome(NamedTuple):
    """What one run came to."""

    status: str
    value: float | None = None
    reason: str = ""


def outcome_of(summary: dict[str, Any], metric: str) -> Outcome:
    """A run has failed if what it is compared by is not finite: it has diverged, and -inf would be
    the best of all. Some modes measure nothing."""
    if summary.get("status") in ("failed", "interrupted"):
        return Outcome(summary["status"], reason=summary["reason"])
    measured = summary.get("metrics", {}) | summary.get("best", {})
    value = measured.get(metric)
    if metric in measured and (value is None or not math.isfinite(value)):
        shown = "not finite" if value is None else value  # a file has no such number
        return Outcome("failed", reason=f"{metric} is {shown}")
    is_pruned = summary.get("stopped", "").startswith(PRUNED)
    return Outcome("pruned" if is_pruned else "finished", value)
