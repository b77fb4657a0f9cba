"""What `plan.*` may be: what a plan assumes, and how much it measures."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

from dpframe import UserError


def _key(default: Any, about: str) -> Any:
    return field(default=default, metadata={"help": about})


@dataclass
class Settings:
    bandwidth: float = _key(1.25e9, "bytes a second, from one replica to the next: 10 Gbit/s")
    latency: float = _key(50e-6, "seconds until the first byte arrives")
    per_node: int = _key(8, "replicas of a machine")
    node_bandwidth: float | None = _key(None, "from one machine to the next; null: plan.bandwidth")
    node_latency: float | None = _key(None, "between machines; null: plan.latency")
    disk_bandwidth: float | None = _key(
        None, "bytes a second that a machine writes; null: as one save takes here"
    )
    node_mtbf_hours: float | None = _key(
        None, "mean time between failures of one machine; null: nothing fails"
    )
    restart_seconds: float = _key(60.0, "from a failure to the first step after it")
    max_replicas: int = _key(4096, "where the table ends")
    least_gain: float = _key(
        0.1, "the share of an epoch's time that a doubling must save to be worth it"
    )
    steps: int = _key(10, "measured for each of four shares of a batch")

    def __post_init__(self) -> None:
        a_second, seconds = "more than 0 bytes a second", "0 seconds or more"
        for key, is_sane, wanted in (  # NaN is not sane
            ("bandwidth", self.bandwidth > 0, a_second),
            ("latency", 0 <= self.latency < inf, seconds),
            ("per_node", self.per_node >= 1, "1 or more replicas"),
            ("node_bandwidth", _is_above_0(self.node_bandwidth), f"{a_second}, or null"),
            ("node_latency", 0 <= (self.node_latency or 0) < inf, f"{seconds}, or null"),
            ("disk_bandwidth", _is_above_0(self.disk_bandwidth), f"{a_second}, or null"),
            ("node_mtbf_hours", _is_above_0(self.node_mtbf_hours), "more than 0 hours, or null"),
            ("restart_seconds", 0 <= self.restart_seconds < inf, seconds),
            ("max_replicas", 1 <= self.max_replicas <= 2**20, "1 to 1048576"),
            ("least_gain", 0 <= self.least_gain < 1, "0 or more, and less than 1"),
            ("steps", self.steps >= 1, "1 or more"),
        ):
            if not is_sane:
                raise UserError(f"plan.{key}={getattr(self, key)} is out of range; use {wanted}")


def _is_above_0(value: float | None) -> bool:
    return value is None or value > 0
