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
        self._refuse_unless(self.bandwidth > 0, "bandwidth", "more than 0 bytes a second")
        self._refuse_unless(self.latency >= 0, "latency", "0 seconds or more")
        self._refuse_unless(1 <= self.max_replicas <= 2**20, "max_replicas", "1 to 1048576")
        self._refuse_unless(0 <= self.least_gain < 1, "least_gain", "0 or more, and less than 1")
        self._refuse_unless(self.steps >= 1, "steps", "1 or more")

    def _refuse_unless(self, is_sane: bool, key: str, wanted: str) -> None:
        if not is_sane:  # asked so that NaN is refused too
            raise UserError(f"plan.{key}={getattr(self, key)} is out of range; give {wanted}")
