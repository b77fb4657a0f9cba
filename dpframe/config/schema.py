"""The keys of a config and their types, which Hydra checks every file and override against."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from dpframe.config import modes
from dpframe.data.settings import DataSettings
from dpframe.errors import UserError, not_one_of, suggestion
from dpframe.schedules import check_schedule, is_ours
from dpframe.trainer.checks.keywords import ELSEWHERE_NAMES
from dpframe.trainer.settings import TrainerSettings, check_seed, scale_settings
from dpframe.util.files import refuse_url
from dpframe.values import refuse_below, shown

CONFIG_NAME = "dpframe"  # in Hydra's ConfigStore: `Schema`
NONE = "none"  # for `checkpoint`: no weights are loaded, and that is meant
PARTS = ("task", "data", "strategy")
OF_EVERY_DATA = ("drop_last", "eval_batch_size", "persistent_workers", "pin_memory", "input")
SWITCHED = ("callbacks", "logger")  # groups whose parts are switched off, e.g. callbacks.ema=false
OFF = ("false", "null")
OPEN = (*SWITCHED, "vars")  # a user adds keys
OF_THE_SWEEP = ("sweep.jobs", "sweep.resume")  # no run has a use for them
OF_ITS_TABLE = ("sweep.over", "sweep.compare")  # nor for these, which a later start may change


@dataclass
class SweepSettings:
    """The keys `sweep.…`."""

    jobs: int = 1
    resume: str | None = None
    metric: str | None = None
    mode: str | None = None
    over: Any = "seed"  # or a list of keys
    compare: str | None = None

    def __post_init__(self) -> None:
        refuse_below("sweep.jobs", self.jobs)
        if not all(type(key) is str and key for key in self.averaged):
            raise UserError(
                f"sweep.over={shown(self.over)} is neither a key nor a list of keys; use e.g. "
                "sweep.over=[seed,data.fold]"
            )
        if self.compare == "":
            raise UserError("sweep.compare= names no key; use e.g. sweep.compare=task.optimizer.lr")
        if self.compare in self.averaged:
            others = ",".join(key for key in self.averaged if key != self.compare)
            raise UserError(
                f"sweep.compare={self.compare}: means are taken over it; compare another key, or "
                f"set sweep.over=[{others}]"
            )
        if self.mode not in (None, "min", "max"):
            raise not_one_of("sweep.mode", self.mode, ("min", "max"))
        if self.mode is not None and self.metric is None:
            raise UserError(
                f"sweep.mode={self.mode} goes with sweep.metric=NAME; set both, or neither"
            )

    @property
    def averaged(self) -> list[Any]:
        """The keys of `over`."""
        return _listed(self.over)


TYPED: dict[str, type[Any]] = {"trainer": TrainerSettings, "sweep": SweepSettings}
Group = dict[Any, Any]  # a user adds keys


@dataclass
class RunSettings:
    """The keys at the top of a config."""

    recipe: str = "unnamed"
    task: Group = field(default_factory=dict)
    data: Group = field(default_factory=dict)
    strategy: Group = field(default_factory=dict)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    callbacks: Group = field(default_factory=dict)
    logger: Group = field(default_factory=dict)
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    mode: str = "fit"
    seed: int = 0
    checkpoint: str | None = None
    checkpoint_skip: Any = None  # or a pattern of weights' names, or a list of these
    resume: str | None = None
    resume_anyway: bool = False
    test_after_fit: bool = False
    sweep: SweepSettings = field(default_factory=SweepSettings)
    vars: Group = field(default_factory=dict)
    modes: dict[str, Any] = field(  # the settings of each, by its name
        default_factory=dict, metadata={"omegaconf_ignore": True}
    )

    def __post_init__(self) -> None:
        modes.refuse_unknown(self.mode)
        check_seed(self.seed)
        if not (self.name or "").isprintable():
            raise UserError(f"name={self.name!r} is not one line of text; notes=… may have several")
        if comma := next((tag for tag in self.tags if "," in tag), None):
            raise UserError(f"tags: {comma!r} has a comma, which ends a tag; use tags=[a,b]")
        if self.resume is not None and self.mode != "fit":
            raise UserError(
                f"resume={self.resume} continues a training, but mode={self.mode}; "
                "use checkpoint=FILE"
            )
        patterns = self.skipped
        if not all(type(pattern) is str for pattern in patterns):
            raise UserError(
                f"checkpoint_skip={self.checkpoint_skip} is neither null nor names of weights or "
                "modules; use e.g. checkpoint_skip=[net.fc]"
            )
        if patterns and self.mode == "fit" and self.checkpoint is None and self.resume is None:
            raise UserError(
                f"checkpoint_skip=[{','.join(patterns)}] leaves out weights of a checkpoint, and "
                "there is none; use checkpoint=FILE, or checkpoint_skip=null"
            )
        if self.mode in ("validate", "test") and self.checkpoint is None:
            raise UserError(
                f"mode={self.mode} without a checkpoint measures untrained weights; add "
                "checkpoint=best, of the newest run, or checkpoint=FILE; checkpoint=none measures "
                "the task as it is built, e.g. with pretrained weights"
            )

    @property
    def skipped(self) -> list[Any]:
        """The patterns of `checkpoint_skip`."""
        return _listed(self.checkpoint_skip)


TOP_LEVEL = tuple(f.name for f in fields(RunSettings) if f.name != "modes")
WHOLE = {  # what to type for the last part of a key, or for its name in other frameworks
    **{f.name: f"trainer.{f.name}" for f in fields(TrainerSettings)},
    **{name: f"trainer.{meant}" for name, meant in ELSEWHERE_NAMES.items()},
    "num_workers": "data.workers",
    "ckpt_path": "checkpoint",
    **{name: f"data.{name}" for name in ("batch_size", "workers", "shuffle")},
    **{name: f"task.{name}" for name in ("optimizer", "optimizers", "scheduler", "net")},
    **dict.fromkeys(("lr", "learning_rate"), "task.optimizer.lr"),
    **{name: f"task.optimizer.{name}" for name in ("weight_decay", "momentum", "betas")},
    **dict.fromkeys(
        ("schedule", "lr_schedule", "lr_scheduler_type"), "task/schedule=warmup_cosine"
    ),
    "warmup_ratio": "task.schedule.warmup",
    **dict.fromkeys(("nodes", "num_nodes", "nnodes"), "strategy=ddp, started by torchrun"),
    "model": "task",
    "fast_dev_run": "experiment=debug",
    "overfit_batches": "experiment=overfit",
    **{f"optimized_{name}": f"sweep.{name}" for name in ("metric", "mode")},  # theirs
}
FLAGS = {  # what to type for an option of other programs that has not the name of a key
    **dict.fromkeys(("model", "dataset", "config_name"), "recipe"),
    **dict.fromkeys(("output_dir", "out_dir", "log_dir", "logdir", "save_dir"), "hydra.run.dir"),
    **dict.fromkeys(("resume_from", "resume_from_checkpoint"), "resume"),
    **dict.fromkeys(("opt", "optimizer"), "task.optimizer._target_"),
    **dict.fromkeys(("fp16", "amp"), "trainer.precision=fp16"),
    "bf16": "trainer.precision=bf16",
    **dict.fromkeys(("cuda", "gpu"), "trainer.accelerator=cuda"),
    **dict.fromkeys(("cpu", "no_cuda"), "strategy=cpu"),
    **{name: f"mode={name}" for name in ("fit", "validate", "test", "predict")},
    **{name: f"mode={meant}" for name, meant in modes.MEANT.items()},
    "debug": "experiment=debug",
}
SWITCHES = {**FLAGS, "train": "mode=fit", "test": "test_after_fit=true"}  # keys of other programs


def _listed(value: Any) -> list[Any]:
    """Of one value, a list or null."""
    return list(value) if isinstance(value, list | tuple) else [value] * (value is not None)


@cache
def groups() -> dict[str, type[Any]]:
    """The groups of settings, each with its type."""
    kinds = {**TYPED}
    for name in modes.names():
        with suppress(UserError):  # a package that is broken is told when its mode is asked for
            if (kind := modes.settings(name)) is not None:
                kinds[name] = kind
    return kinds


@cache
def register() -> None:
    """Tells Hydra what to compose: these types first, then conf/config.yaml with its groups."""
    more: list[Any] = [(name, kind, field(default_factory=kind)) for name, kind in groups().items()]
    more += [("defaults", list[Any], field(default_factory=lambda: ["_self_", "config"]))]
    schema = make_dataclass("Schema", more, bases=(RunSettings,))
    ConfigStore.instance().store(name=CONFIG_NAME, node=schema)


def defaults() -> dict[str, Any]:
    """The config without any file."""
    register()
    plain: Any = OmegaConf.to_container(ConfigStore.instance().load(f"{CONFIG_NAME}.yaml").node)
    return {name: value for name, value in plain.items() if name != "defaults"}


def read_settings(config: Mapping[str, Any]) -> RunSettings:
    """The settings of a config whose types Hydra has checked."""
    for name in PARTS:
        node = config.get(name)
        if not isinstance(node, Mapping) or not node.get("_target_"):
            raise UserError(f"{name} has no _target_; a recipe names the class of its {name}")
    _check_data(config["data"], config.get("mode", "fit"))
    if (given := config["task"].get("scale_lr")) is not None:
        scale_settings(given)
    schedule = config["task"].get("schedule")
    if isinstance(schedule, Mapping) and is_ours(schedule):
        check_schedule(schedule)
    _refuse_unknown(config, [*TOP_LEVEL, *groups()])
    made = {name: _make(name, kind, config.get(name)) for name, kind in groups().items()}
    own = {name: made.pop(name) for name in modes.names() if name in made}
    made |= {name: config.get(name) or {} for name in OPEN}
    rest = {name: value for name, value in config.items() if name in TOP_LEVEL}
    return RunSettings(**{**rest, **made, "modes": own})


def _make(group: str, kind: type[Any], values: Mapping[str, Any] | None) -> Any:
    _refuse_unknown(values or {}, [each.name for each in fields(kind)], f"{group}.")
    return kind(**values or {})


def _refuse_unknown(values: Iterable[str], known: Iterable[str], prefix: str = "") -> None:
    """What was added by a +, which Hydra then takes."""
    for name in values:
        if name not in known:
            near = suggestion(name, known).replace("mean ", f"mean {prefix}")
            meant = WHOLE.get(name) or (not prefix and SWITCHES.get(name))
            near = f"did you mean {meant}?" if meant else near
            raise UserError(f"there is no key {prefix}{name}; {near}")


def type_of(key: str) -> Any:
    """The annotation of a key; None for one of a part."""
    group, _, name = key.partition(".")
    kind = groups().get(group)
    if name:
        return get_type_hints(kind).get(name) if kind else None
    return kind or get_type_hints(RunSettings).get(group)


def is_off(node: Any) -> bool:
    """Whether a callback or logger is switched off: false or null, or without a class, whatever
    else a recipe sets of it."""
    has_no_class = isinstance(node, Mapping) and node.get("_target_", "") is None
    return node is None or node is False or has_no_class


def _check_data(data: Mapping[str, Any], mode: Any) -> None:
    """The keys that every DataModule has, before torch is imported to find the class."""
    DataSettings(
        **{key: data[key] for key in ("batch_size", "workers", *OF_EVERY_DATA) if key in data}
    )
    if (name := data.get("input")) is not None and mode not in ("predict", "export"):
        raise UserError(
            f"data.input={name} is what to predict on, but mode={mode}; use mode=predict"
        )
    refuse_url("data.input", name or "")
