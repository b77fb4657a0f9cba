"""What `trainer.*` may be; conf/trainer/default.yaml explains each key."""

from dataclasses import dataclass
from typing import Any

from dpframe.errors import UserError, suggestion

PRECISIONS = ("32", "64", "bf16", "fp16")
ACCELERATORS = ("auto", "cpu", "cuda")
INTERVALS = ("epoch", "step")
POSITIVE = ("max_seconds", "clip_norm", "clip_value", "grace_seconds", "data_timeout_seconds")
ON_NONFINITE = ("stop", "skip")


@dataclass
class TrainerSettings:
    max_epochs: int | None = 10
    max_steps: int | None = None
    max_seconds: float | None = None
    gpus: Any = None  # a count, a list of ids, or None
    accelerator: str = "auto"
    precision: str = "32"
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    scheduler_every: str = "epoch"
    plateau_monitor: str = "val/loss"
    validate_every_epochs: int = 1
    validate_every_steps: int | None = None
    on_nonfinite: str = "stop"
    log_every: int = 50
    limit_train_batches: int | None = None
    limit_eval_batches: int | None = None
    deterministic: bool = False
    compile: bool = False
    data_on_device: Any = "auto"  # or True, or False
    cuda_graph: Any = False  # or True, or "auto"
    lean: bool = True
    channels_last: bool = False
    profile: bool = False
    threads: int | None = None
    max_replicas_per_core: int = 8
    data_timeout_seconds: float = 600.0
    max_restarts: int = 0
    hang_seconds: float | None = 1800.0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        self._refuse_unknown("precision", PRECISIONS)
        self._refuse_unknown("accelerator", ACCELERATORS)
        self._refuse_unknown("scheduler_every", INTERVALS)
        self._refuse_unknown("on_nonfinite", ON_NONFINITE)
        for key in ("data_on_device", "cuda_graph"):
            given = getattr(self, key)
            if given != "auto" and not isinstance(given, bool):
                raise UserError(f"trainer.{key}={given} is not one of auto, true, false; try auto")
        for key in ("accumulate", "log_every", "max_replicas_per_core", "validate_every_epochs"):
            self._refuse_below(key, 1)
        for key in (
            "max_epochs",
            "max_steps",
            "validate_every_steps",
            "limit_train_batches",
            "threads",
            "limit_eval_batches",
        ):
            self._refuse_below(key, 1)
        self._refuse_below("max_restarts", 0)
        for key in (
            "max_seconds",
            "clip_norm",
            "clip_value",
            "hang_seconds",
            "grace_seconds",
            "data_timeout_seconds",
        ):
            self._refuse_nonpositive(key)
        self._check_gpus()
        if self.max_epochs is None and self.max_steps is None and self.max_seconds is None:
            raise UserError(
                "trainer.max_epochs, max_steps and max_seconds are all null: training would never "
                "end; set one of them"
            )

    def are_done(self, epochs: int, steps: int) -> bool:
        counts = (epochs, self.max_epochs), (steps, self.max_steps)
        return any(limit is not None and count >= limit for count, limit in counts)

    def _refuse_unknown(self, key: str, valid: tuple[str, ...]) -> None:
        given = getattr(self, key)
        if given not in valid:
            near = suggestion(given, valid)
            raise UserError(f"trainer.{key}={given} is not one of {', '.join(valid)}; {near}")

    def _refuse_below(self, key: str, least: int) -> None:
        given = getattr(self, key)
        if given is not None and given < least:
            raise UserError(f"trainer.{key}={given} is out of range; give {least} or more")

    def _refuse_nonpositive(self, key: str) -> None:
        given = getattr(self, key)
        if given is not None and not given > 0:
            raise UserError(f"trainer.{key}={given} is out of range; give more than 0")

    def _check_gpus(self) -> None:
        given = self.gpus
        if given == 0 and type(given) is int:
            raise UserError("trainer.gpus=0 is out of range; leave it out, and use strategy=cpu")
        ids = given if isinstance(given, list) else [given]
        whole = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
        if given is None or (whole and ids and len(set(ids)) == len(ids)):
            return
        raise UserError(
            f"trainer.gpus={given} is neither a count, a list of different ids nor null; "
            "use trainer.gpus=4 or trainer.gpus=[0,1,3]"
        )
