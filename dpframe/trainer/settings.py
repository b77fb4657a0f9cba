"""What `trainer.*` may be; conf/trainer/default.yaml explains each key."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from dpframe.errors import LACKING, UserError, not_one_of, suggestion
from dpframe.values import ABOVE_0, check_gpus, check_type, check_types, fits, refuse_below

CHOICES = {
    "precision": ("32", "64", "bf16", "fp16", "bf16-true", "16-true"),
    "matmul_precision": ("highest", "high", "medium"),
    "accelerator": ("auto", "cpu", "cuda", "mps", "xpu"),
    "scheduler_every": ("epoch", "step"),
    "on_nonfinite": ("stop", "skip"),
    "share_check": ("on", "strict", "warn", "off"),
    "batch_norm": ("global", "replica"),
    "dropout": ("row", "replica"),
}
ELSEWHERE = {  # names in other frameworks
    "16": "fp16",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
    "32-true": "32",
    "fp32": "32",
    "64-true": "64",
    "gpu": "cuda",
}
LEAST = {
    "max_epochs": 1,
    "max_steps": 1,
    "min_epochs": 1,
    "min_steps": 1,
    "accumulate": 1,
    "micro_batch": 1,
    "validate_every_steps": 1,
    "sanity_batches": 0,
    "max_skipped_steps": 1,
    "log_every": 1,
    "threads": 1,
    "logical_replicas": 1,
    "max_restarts": 0,
}
OF_PLUGINS = ("logical_replicas",)  # keys that a plugin carries out, where they are not null
SHARES = (  # whole numbers, or below 1 a share of the epoch or its batches
    "validate_every_epochs",
    *(f"limit_{kind}_batches" for kind in ("train", "eval", "val", "test", "predict")),
)
POSITIVE = (
    "max_seconds",
    "hang_seconds",
    "grace_seconds",
    "data_timeout_seconds",
)
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
BY_SPEED = "kernels that are chosen by their speed differ from run to run"
COMPILE_MODES = ("default", *CUDA_GRAPH_MODES, "max-autotune-no-cudagraphs")
COMPILE_OPTIONS: dict[str, Any] = {"mode": None, "dynamic": None, "fullgraph": False}


@dataclass
class TrainerSettings:
    """The keys of `trainer.*`, with the same defaults."""

    # A config's types are checked by these annotations, values below, numbers by `LEAST` and
    # `POSITIVE`. A new key is in conf/trainer/default.yaml and `keywords.SettingsByName`, too. Who
    # else may have to know it: `fingerprint.DECIDING`, if a run can't go on with another value, or
    # else `FREE` of tests/test_prepare.py; `recorder.TELLING`, if runs are compared by it;
    # plugins/verify/course.py and modes/measure.py, if theirs do without it; `ByHand`, where it
    # does nothing; `OF_PLUGINS`, if a plugin carries it out; `keywords.ELSEWHERE_NAMES`;
    # calendar.py, if it says when, and callbacks/progress.py; of a limit of training `reached`
    # below, `TrainingData.total_steps`, `modes.ending._longer`, and `OF_FIT` of
    # config/evaluated_run.py.
    # test_conf, test_names, test_prepare and test_arguments tell what was forgotten.

    max_epochs: int | None = 10
    max_steps: int | None = None
    max_seconds: float | None = None
    min_epochs: int | None = None
    min_steps: int | None = None
    gpus: Any = None  # a count, a list of ids, all, or auto and None
    accelerator: str = "auto"
    precision: str = "32"
    matmul_precision: str | None = None
    accumulate: int = 1
    micro_batch: int | None = None  # rows of a replica that are computed at once
    clip_norm: Any = None  # a number, or one by the name of an optimizer
    clip_value: Any = None
    scheduler_every: str = "epoch"
    plateau_monitor: str = "val/loss"
    validate_every_epochs: int | float = 1
    validate_every_steps: int | None = None
    sanity_batches: int = 2
    share_check: str = "on"
    exact_layers: bool = False  # both of the next
    batch_norm: str | None = None
    dropout: str | None = None
    on_nonfinite: str = "stop"
    max_skipped_steps: int | None = 10
    log_every: int = 50
    limit_train_batches: int | float | None = None
    limit_eval_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    logical_replicas: int | None = None  # shares of each batch: the same bits on 1 to so many
    deterministic: bool = False
    compile: Any = False  # or True, a mode of torch.compile, or a dict of COMPILE_OPTIONS
    checkpoint_activations: Any = None  # or True, a pattern of modules' names, or a list of these
    data_on_device: Any = "auto"  # or True, or False
    skip_dynamo_import: bool = True
    channels_last: bool = False
    cudnn_benchmark: bool | None = None
    profile: bool = False
    threads: int | None = None
    data_timeout_seconds: float = 600.0
    max_restarts: int = 0
    hang_seconds: float | None = 1800.0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        self.precision = str(self.precision)  # 32 and 64 may be given as numbers
        # In YAML, on and off without quotes are truth values.
        self.share_check = {"True": "on", "False": "off"}.get(
            str(self.share_check), self.share_check
        )
        for key, choices in CHOICES.items():
            value = getattr(self, key)
            if value not in choices and value != getattr(TrainerSettings, key):
                meant = ELSEWHERE.get(str(value))
                if meant not in choices:
                    meant = None
                raise not_one_of(f"trainer.{key}", value, choices, meant=meant)
        check_types(self, "trainer")
        for key, least in LEAST.items():
            refuse_below(f"trainer.{key}", getattr(self, key), least)
        for key in SHARES:
            value = getattr(self, key)
            is_count = value is None or (value >= 1 and float(value).is_integer())
            if not is_count and not 0 < value < 1:
                raise UserError(
                    f"trainer.{key}={value} is out of range; use a whole number, or a share such "
                    "as 0.25"
                )
        for key in POSITIVE:
            refuse_below(f"trainer.{key}", getattr(self, key), ABOVE_0, "more than 0")
        if self.deterministic and self.cudnn_benchmark:
            raise UserError(
                f"trainer.deterministic=true with trainer.cudnn_benchmark=true: {BY_SPEED}; set "
                "one of them to false"
            )
        self._check_clipping()
        for key in OF_PLUGINS:
            if getattr(self, key) is not None:
                plugin(key).settle(self)
        if self.data_on_device != "auto" and not isinstance(self.data_on_device, bool):
            raise not_one_of(
                "trainer.data_on_device", self.data_on_device, ("auto", "true", "false")
            )
        self._check_compile()
        self._check_activations()
        check_gpus(self.gpus)
        if self.max_epochs is None and self.max_steps is None and self.max_seconds is None:
            raise UserError(
                "trainer.max_epochs, max_steps and max_seconds are all null: training would never "
                "end; set one of them"
            )

    @property
    def compile_mode(self) -> str | None:
        """The mode of torch.compile; None: nothing is compiled."""
        mode = self.compile_options["mode"]
        return "default" if mode is True else mode or None

    @property
    def compile_options(self) -> dict[str, Any]:
        """What torch.compile takes, but for a mode that is true or false."""
        given = self.compile if isinstance(self.compile, dict) else {"mode": self.compile}
        return COMPILE_OPTIONS | given

    @property
    def has_global_batch_norm(self) -> bool:
        return (self.batch_norm or ("global" if self.exact_layers else "replica")) == "global"

    @property
    def drops_by_row(self) -> bool:
        return (self.dropout or ("row" if self.exact_layers else "replica")) == "row"

    def limit(self, kind: str, batches: int | None) -> int | None:
        """How many of an epoch's `train`, `val`, `test` or `predict` batches are read; None: all.

        1.0 is all of them, and 1 is one."""
        key = f"limit_{kind}_batches"
        if kind != "train" and getattr(self, key) is None:
            key = "limit_eval_batches"
        value = getattr(self, key)
        if not isinstance(value, float) or value > 1:
            return None if value is None else int(value)
        if value == 1:
            return None
        if batches is None:
            raise UserError(
                f"trainer.{key}={value} is a share of the batches, and a stream has no known "
                "length; use a whole number"
            )
        return max(1, round(value * batches))

    def has_done_least(self, epochs: int, steps: int) -> bool:
        """Whether early stopping may end training."""
        return epochs >= (self.min_epochs or 0) and steps >= (self.min_steps or 0)

    def reached(self, epochs: int, steps: int) -> list[str]:
        """The limits that a run of this length has come to, as they are typed."""
        counts = ("max_epochs", epochs, self.max_epochs), ("max_steps", steps, self.max_steps)
        return [
            f"trainer.{key}={limit}"
            for key, count, limit in counts
            if limit is not None and count >= limit
        ]

    def _check_clipping(self) -> None:
        for key in ("clip_norm", "clip_value"):
            value = getattr(self, key)
            limits = value if isinstance(value, dict) else {"": value}
            for name, limit in limits.items():
                if limit is not None and not (fits(limit, float) and limit > 0):
                    where = f"trainer.{key}.{name}".rstrip(".")
                    raise UserError(f"{where}={limit} is out of range; use a number above 0")

    def check_compiled_parts(self, strategy: str) -> None:
        """Where weights are gathered block by block, which no graph can hold."""
        mode, fullgraph = self.compile_mode, self.compile_options["fullgraph"]
        if mode in CUDA_GRAPH_MODES:
            raise UserError(
                f"trainer.compile.mode={mode} records where weights are in memory, and {strategy} "
                "gathers them elsewhere in each step; use trainer.compile.mode=default"
            )
        if mode is not None and fullgraph:
            raise UserError(
                f"trainer.compile.fullgraph=true wants one graph, and {strategy} gathers weights "
                "between its blocks; leave it out"
            )

    def check_compiled_layers(self, *, gathers: bool, drops_by_row: bool) -> None:
        if gathers and self.compile_options["fullgraph"]:
            raise UserError(
                "trainer.compile.fullgraph=true wants one graph, and a BatchNorm of the global "
                "batch gathers between two; leave it out, or use trainer.batch_norm=replica"
            )
        if drops_by_row and self.checkpoint_activations:
            raise UserError(
                "trainer.dropout=row can't count its masks in blocks that a graph computes again; "
                f"leave out trainer.checkpoint_activations={self.checkpoint_activations}, or use "
                "trainer.dropout=replica or trainer.compile.mode=null"
            )

    def _check_compile(self) -> None:
        key, is_group = "trainer.compile", isinstance(self.compile, dict)
        for name in self.compile if is_group else ():
            if name not in COMPILE_OPTIONS:
                near = suggestion(name, COMPILE_OPTIONS)
                raise UserError(f"{key}.{name} is not an option of torch.compile here; {near}")
        options = self.compile_options
        mode = options.pop("mode")
        if mode is not None and not isinstance(mode, bool) and mode not in COMPILE_MODES:
            raise not_one_of(f"{key}.mode" if is_group else key, mode, COMPILE_MODES)
        for name, value in options.items():
            if not isinstance(value, bool) and value is not COMPILE_OPTIONS[name]:
                choices = ("true", "false", "null") if name == "dynamic" else ("true", "false")
                raise not_one_of(f"{key}.{name}", value, choices)
            if self.compile_mode is None and value is not COMPILE_OPTIONS[name]:
                shown = str(value).lower()
                raise UserError(
                    f"{key}.{name}={shown} but {key}.mode is null, so nothing is compiled; set "
                    f"{key}.mode=default"
                )

    def _check_activations(self) -> None:
        value = self.checkpoint_activations
        patterns = value if isinstance(value, list | tuple) else [value]
        if not (value is None or isinstance(value, bool) or all(type(p) is str for p in patterns)):
            raise UserError(
                f"trainer.checkpoint_activations={value} is neither true, null nor names of "
                "modules; use e.g. trainer.checkpoint_activations=[net.layers.*]"
            )


@cache
def plugin(key: str) -> Any:
    """The module that carries out this key: `settle` checks the settings, and sets what follows
    from the key; `put_around` puts a strategy around the one that was chosen."""
    from dpframe.util import entry_points  # which few programs need

    points = (point for _, point in entry_points.found() if point.group == entry_points.SETTINGS)
    found = next((point for point in points if point.name == key), None)
    if found is None:
        raise UserError(f"trainer.{key} is not installed; {LACKING}")
    return found.load()


def check_seed(seed: Any) -> None:
    check_type("seed", seed, int)
    if not 0 <= seed < 2**63:
        raise UserError(f"seed={seed} is out of range; use 0 to 2**63 - 1")


@dataclass
class ScaleSettings:
    """What `task.scale_lr` may be."""

    batch_size: int  # the rows of an update that the rates are for
    factor: float = 2.0  # for twice as many
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_types(self, "task.scale_lr")
        for key, least in (("batch_size", 1), ("factor", 1.0), ("warmup_steps", 0)):
            refuse_below(f"task.scale_lr.{key}", getattr(self, key), least)

    def scale(self, rows: int) -> float:
        return float(self.factor ** math.log2(rows / self.batch_size))


def scale_settings(given: Any) -> ScaleSettings:
    known = [field.name for field in fields(ScaleSettings)]
    for name in given if isinstance(given, Mapping) else ():
        if name not in known:
            raise UserError(
                f"task.scale_lr.{name}: there is no such key; {suggestion(name, known)}"
            )
    if not isinstance(given, Mapping) or given.get("batch_size") is None:
        raise UserError(
            f"task.scale_lr={given} does not say for which batch the learning rates are; use e.g. "
            "task.scale_lr={batch_size:128}"
        )
    return ScaleSettings(**given)
