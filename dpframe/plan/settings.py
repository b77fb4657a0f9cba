"""What `plan.*`, `tune.*` and `compare.*` may be; conf/config.yaml explains each key."""

from dataclasses import dataclass, field
from math import inf

from dpframe.errors import UserError, not_one_of, refuse_below

FOUND = ("batch_size", "lr")


@dataclass
class PlanSettings:
    bandwidth: float = 1.25e9  # bytes a second
    latency: float = 50e-6  # seconds
    per_node: int = 8
    node_bandwidth: float | None = None
    node_latency: float | None = None
    disk_bandwidth: float | None = None
    node_mtbf_hours: float | None = None
    restart_seconds: float = 60.0
    max_replicas: int = 4096
    least_gain: float = 0.1
    steps: int = 10

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


@dataclass
class TuneSettings:
    find: list[str] = field(default_factory=lambda: list(FOUND))
    memory: float | None = None  # bytes
    max_batch_size: int = 8192
    steps: int = 100
    min_lr: float = 1e-6
    max_lr: float = 10.0

    def __post_init__(self) -> None:
        for name in self.find:
            if name not in FOUND:
                raise not_one_of("tune.find", name, FOUND)
        for key, is_sane, wanted in (  # NaN is not sane
            ("memory", self.memory is None or self.memory > 0, "more than 0 bytes, or null"),
            ("max_batch_size", self.max_batch_size >= 1, "1 or more"),
            ("steps", self.steps >= 10, "10 or more"),
            ("min_lr", self.min_lr > 0, "more than 0"),
            ("max_lr", self.max_lr > self.min_lr, "more than tune.min_lr"),
        ):
            if not is_sane:
                raise UserError(f"tune.{key}={getattr(self, key)} is out of range; use {wanted}")


@dataclass
class CompareSettings:
    strategies: list[str] | None = None
    gpus: list[int] | None = None

    def __post_init__(self) -> None:
        for count in self.gpus or ():
            refuse_below("compare.gpus", count)
