"""The top-level keys of a config, and the check that nothing else is there."""

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpframe.config import modes
from dpframe.errors import UserError, not_one_of, refuse_below, suggestion
from dpframe.files import refuse_url
from dpframe.trainer.settings import TrainerSettings, scale_settings, several_machines

EVALUATIONS = ("validate", "test", "predict", "export")
NONE = "none"  # for `checkpoint`: no weights are loaded, and that is meant
PARTS = ("task", "data", "strategy")
OPEN = ("callbacks", "logger", "vars")  # a user adds keys


@dataclass
class SweepSettings:
    jobs: int = 1
    resume: str | None = None
    metric: str | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        refuse_below("sweep.jobs", self.jobs)
        if self.mode not in (None, "min", "max"):
            raise not_one_of("sweep.mode", self.mode, ("min", "max"))
        if self.mode is not None and self.metric is None:
            raise UserError(
                f"sweep.mode={self.mode} goes with sweep.metric=NAME; set both, or neither"
            )


TYPED = {"trainer": TrainerSettings, "sweep": SweepSettings}


@dataclass
class RunSettings:
    recipe: str = "unnamed"
    task: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    sweep: SweepSettings = field(default_factory=SweepSettings)
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    mode: str = "fit"
    seed: int = 0
    checkpoint: str | None = None
    resume: str | None = None
    resume_anyway: bool = False
    test_after_fit: bool = False
    vars: dict[str, Any] = field(default_factory=dict)
    trusted_modules: list[str] = field(default_factory=list)
    modes: dict[str, Any] = field(  # the settings of each, by its name
        default_factory=dict, metadata={"omegaconf_ignore": True}
    )

    def __post_init__(self) -> None:
        if self.mode not in modes.names():
            meant = "fit" if self.mode == "train" else None
            raise not_one_of("mode", self.mode, modes.names(), meant=meant)
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} is out of range; use 0 to 2**63 - 1")
        if self.resume is not None and self.mode != "fit":
            raise UserError(
                f"resume={self.resume} continues a training, but mode={self.mode}; "
                "use checkpoint=FILE"
            )
        if self.mode in ("validate", "test") and self.checkpoint is None:
            raise UserError(
                f"mode={self.mode} without a checkpoint measures untrained weights; add "
                "checkpoint=best, of the newest run, or checkpoint=FILE; checkpoint=none measures "
                "the task as it is built, e.g. with pretrained weights"
            )


TOP_LEVEL = tuple(f.name for f in fields(RunSettings) if f.name != "modes")
WHOLE = {  # whole keys by their last part, or by their name in other frameworks
    **{f.name: f"trainer.{f.name}" for f in fields(TrainerSettings)},
    **dict.fromkeys(("devices", "num_devices", "num_processes"), "trainer.gpus"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "trainer.max_epochs"),
    "mixed_precision": "trainer.precision",
    "accumulate_grad_batches": "trainer.accumulate",
    "gradient_accumulation_steps": "trainer.accumulate",
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm"), "trainer.clip_norm"),
    "val_check_interval": "trainer.validate_every_steps",
    "num_sanity_val_steps": "trainer.sanity_batches",
    "log_every_n_steps": "trainer.log_every",
    "num_workers": "data.workers",
    "ckpt_path": "checkpoint",
    **{name: f"data.{name}" for name in ("batch_size", "workers", "shuffle")},
    **{name: f"task.{name}" for name in ("optimizer", "optimizers", "scheduler", "net")},
    **dict.fromkeys(("lr", "learning_rate"), "task.optimizer.lr"),
    "model": "task",
    "lean": "trainer.skip_dynamo_import",  # its name before
    **{f"optimized_{name}": f"sweep.{name}" for name in ("metric", "mode")},  # theirs
}


def checked(config: Mapping[str, Any]) -> RunSettings:
    """The config as settings; a key or a type that doesn't fit is refused by its name."""
    for name in PARTS:
        node = config.get(name)
        if not isinstance(node, Mapping) or not node.get("_target_"):
            raise UserError(f"{name} has no _target_; a recipe names the class of its {name}")
    of_modes = [name for name in modes.with_settings() if name in (*config, config.get("mode"))]
    groups = {name: _mapping(name, config.get(name)) for name in (*TYPED, *OPEN, *of_modes)}
    _check_data(config["data"], config.get("mode", "fit"))
    if config["task"].get("scale_lr") is not None:
        scale_settings(config["task"]["scale_lr"])
    untyped = {name: groups.get(name, config.get(name)) for name in (*PARTS, *OPEN)}
    own = {name: _own_settings(name, groups[name]) for name in of_modes}
    typed = {k: groups.get(k, v) for k, v in config.items() if k not in (*untyped, *own)}
    try:
        schema = OmegaConf.structured(RunSettings)
        settings: Any = OmegaConf.to_object(OmegaConf.merge(schema, literal(typed)))
    except OmegaConfBaseException as error:
        raise _refusal(error.full_key or "", typed) from None
    return replace(settings, modes=own, **untyped)


def sweep_settings(node: Any) -> SweepSettings:
    """The same of a sweep, before there is a config of one of its runs."""
    settings: SweepSettings = _group_settings("sweep", SweepSettings, node)
    return settings


def _own_settings(mode: str, node: dict[str, Any]) -> Any:
    kind = modes.settings(mode)
    if kind is None:
        raise UserError(f"{mode} is not a key of the config; mode={mode} has no settings")
    return _group_settings(mode, kind, literal(node))


def _group_settings(group: str, kind: type[Any], node: Any) -> Any:
    try:
        return OmegaConf.to_object(OmegaConf.merge(kind, node))
    except OmegaConfBaseException as error:
        raise _refusal(f"{group}.{error.full_key}", {group: node}, kind) from None


def is_off(node: Any) -> bool:
    """Whether a callback or logger is switched off: null, or without a class, whatever else a
    recipe sets of it."""
    return node is None or (isinstance(node, Mapping) and node.get("_target_", "") is None)


def literal(value: Any) -> Any:
    """Escapes each ${ that is left in a resolved config, e.g. in a path, for OmegaConf."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: literal(part) for key, part in value.items()}
    return [literal(part) for part in value] if isinstance(value, list) else value


def shown(value: Any) -> str:
    """A value as it is typed."""
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def unfit(key: str, value: Any, hint: Any, choice: str = "") -> UserError:
    """`hint` is the annotation of what the key takes."""
    if hint == list[str]:
        choice = f", e.g. [{value if isinstance(value, str) else 'NAME'}]"
    return UserError(f"{key}={shown(value)} is {kind_of(value)}; use {spoken(hint)}{choice}")


def kind_of(value: Any) -> str:
    kinds = {bool: "a truth value", int: "a whole number", float: "a fraction", str: "text"}
    more = {type(None): "nothing", list: "a list", dict: "a group of keys"}
    return (kinds | more).get(type(value)) or f"a {type(value).__name__}"


def spoken(hint: Any) -> str:
    """A type annotation in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    words |= {list: "a list", type(None): "null", list[str]: "a list of names"}
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        options = get_args(hint)
        return " or ".join(
            spoken(each) for each in options if each is not int or float not in options
        )
    return words.get(hint) or str(getattr(hint, "__name__", hint))


def _mapping(name: str, value: Any) -> dict[str, Any]:
    """A group that is null or deleted by `~` is an empty one."""
    if not isinstance(value, Mapping | None):
        raise UserError(f"{name}={value} is one value; set its keys, as {name}.KEY=VALUE")
    return dict(value or {})


OR = {"workers": " or auto", "eval_batch_size": " or null"}


def _check_data(data: Mapping[str, Any], mode: Any) -> None:
    """The keys that every DataModule has, before torch is imported to find the class."""
    if (name := data.get("input")) is not None and mode not in ("predict", "export"):
        raise UserError(
            f"data.input={name} is what to predict on, but mode={mode}; use mode=predict"
        )
    refuse_url("data.input", name or "")
    if type(is_dropped := data.get("drop_last", False)) is not bool:
        raise unfit("data.drop_last", is_dropped, bool)
    for key, least in (("batch_size", 1), ("eval_batch_size", 1), ("workers", 0)):
        value = data.get(key, least)
        if (key, value) in (("workers", "auto"), ("eval_batch_size", None)):
            continue
        if type(value) is not int:
            raise unfit(f"data.{key}", value, int, OR.get(key, ""))
        refuse_below(f"data.{key}", value, least)


def _refusal(full_key: str, config: Mapping[str, Any], kind: type[Any] | None = None) -> UserError:
    """A key that is not there, or whose value can't be converted to its type; an item of a list is
    its list's."""
    key = re.split(r"\[", full_key)[0]
    if key in ("trainer.nodes", "trainer.rendezvous"):
        given = config["trainer"]
        return several_machines(given.get("nodes"), given.get("rendezvous"))
    group, _, name = key.partition(".")
    kind = kind or (TYPED[group] if name else RunSettings)
    hints, prefix = get_type_hints(kind), f"{group}." * bool(name)
    hints = {key: hint for key, hint in hints.items() if name or key in TOP_LEVEL}
    if (name or group) not in hints:
        near = suggestion(name or group, hints).replace("mean ", f"mean {prefix}")
        if name in WHOLE:
            near = f"did you mean {WHOLE[name]}?"
        return UserError(f"{key} is not a key of the config; {near}")
    return unfit(key, config[group][name] if name else config[group], hints[name or group])
