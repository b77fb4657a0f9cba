"""What `plan.*` may be; conf/config.yaml explains each key."""

from dataclasses import dataclass

from dpframe.errors import UserError


@dataclass
class PlanSettings:
    bandwidth: float = 1.25e9  # bytes a second
    latency: float = 50e-6  # seconds
    max_replicas: int = 4096
    least_gain: float = 0.1
    steps: int = 10

    def __post_init__(self) -> None:
        for key, is_sane, wanted in (  # NaN is not sane
            ("bandwidth", self.bandwidth > 0, "more than 0 bytes a second"),
            ("latency", self.latency >= 0, "0 seconds or more"),
            ("max_replicas", 1 <= self.max_replicas <= 2**20, "1 to 1048576"),
            ("least_gain", 0 <= self.least_gain < 1, "0 or more, and less than 1"),
            ("steps", self.steps >= 1, "1 or more"),
        ):
            if not is_sane:
                raise UserError(f"plan.{key}={getattr(self, key)} is out of range; use {wanted}")
