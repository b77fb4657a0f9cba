"""The top-level keys of a config, and the check that nothing else is there."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpframe.errors import UserError, suggestion
from dpframe.plan.settings import PlanSettings
from dpframe.trainer.settings import TrainerSettings

# Of a recipe: it is the name of a folder too. A recipe in a folder of others has a slash.
NAME = r"\w[\w .,+=@-]*(/\w[\w .,+=@-]*)*"
MODES = ("fit", "validate", "test", "predict", "verify", "plan")
EVALUATIONS = ("validate", "test", "predict")


@dataclass
class RunSettings:
    recipe: str
    task: dict[str, Any]
    data: dict[str, Any]
    strategy: dict[str, Any]
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    mode: str = "fit"
    seed: int = 0
    checkpoint: str | None = None
    resume: str | None = None
    resume_anyway: bool = False
    vars: dict[str, Any] = field(default_factory=dict)
    trusted_modules: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(
                f"mode={self.mode} is not one of {', '.join(MODES)}; {suggestion(self.mode, MODES)}"
            )
        if not re.fullmatch(NAME, self.recipe):
            raise no_plain_name(self.recipe)
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} is out of range; give 0 to 2**63 - 1")
        if self.resume is not None and self.mode != "fit":
            raise UserError(
                f"resume={self.resume} goes on with training, but mode={self.mode}; "
                "use checkpoint=FILE"
            )
        for name in self.trusted_modules:
            if not all(part.isidentifier() for part in name.split(".")):
                raise UserError(
                    f"trusted_modules={shown(name)} is no dotted name; give modules or functions, "
                    "as trusted_modules=[torchvision,mine.make]"
                )


def no_plain_name(recipe: Any) -> UserError:
    return UserError(
        f"recipe={recipe} is no plain name, though it names the folder of its runs; "
        "give letters, digits, - and _"
    )


TOP_LEVEL = tuple(f.name for f in fields(RunSettings))


def checked(config: Mapping[str, Any]) -> RunSettings:
    """The config as settings; a key or a type that does not fit is refused by its name."""
    _refuse_unknown("", config, RunSettings)
    for name in ("task", "data", "strategy"):
        node = config.get(name)
        if not isinstance(node, Mapping) or not node.get("_target_"):
            raise UserError(f"{name} has no _target_; a recipe names the class of its {name}")
    parts: dict[str, Any] = {
        name: _mapping(name, config.get(name)) for name in ("callbacks", "logger", "vars")
    }
    _check_data(config["data"])
    trainer = _typed("trainer", _mapping("trainer", config.get("trainer")), TrainerSettings)
    plan = _typed("plan", _mapping("plan", config.get("plan")), PlanSettings)
    plain = _typed("", {k: v for k, v in config.items() if k in vars(_Plain())}, _Plain)
    rest: dict[str, Any] = {name: config[name] for name in ("task", "data", "strategy")}
    return RunSettings(trainer=trainer, plan=plan, **rest, **parts, **vars(plain))


def refuse_values(config: Any) -> None:
    """A group that is one value makes every reference into it fail: say so first."""
    for name in ("trainer", "plan", "callbacks", "logger", "vars"):
        if not str(config.get(name)).startswith("${"):
            _mapping(name, config.get(name))


@dataclass
class _Plain:
    recipe: str = "unnamed"
    mode: str = "fit"
    seed: int = 0
    checkpoint: str | None = None
    resume: str | None = None
    resume_anyway: bool = False
    trusted_modules: list[str] = field(default_factory=list)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    """A group that is null or `~` deleted is an empty one."""
    if not isinstance(value, Mapping | None):
        raise UserError(f"{name}={value} is one value; give its keys, as {name}.KEY=VALUE")
    return dict(value or {})


def _check_data(data: Mapping[str, Any]) -> None:
    """The keys that every DataModule has, before torch is imported to find the class."""
    for key, least in (("batch_size", 1), ("workers", 0)):
        value = data.get(key, least)
        choice = " or auto" if key == "workers" else ""
        if choice and value == "auto":
            continue
        if type(value) is not int:
            raise UserError(
                f"data.{key}={shown(value)} is {kind_of(value)}; give a whole number{choice}"
            )
        if value < least:
            raise UserError(f"data.{key}={value} is out of range; give {least} or more")


def _typed(prefix: str, given: Mapping[str, Any], kind: type) -> Any:
    _refuse_unknown(prefix, given, kind)
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), literal(given)))
    except OmegaConfBaseException as error:
        name = (error.full_key or "").split(".")[0]
        key, value = (f"{prefix}.{name}" if prefix else name), given.get(name)
        wanted = {f.name: f.type for f in fields(kind)}.get(name)
        spoken = _spoken(getattr(wanted, "__name__", None) or str(wanted))
        raise UserError(f"{key}={shown(value)} is {kind_of(value)}; give {spoken}") from None


def literal(value: Any) -> Any:
    """As OmegaConf reads it back: a ${ that is left in a resolved config, a path's say, is text."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: literal(part) for key, part in value.items()}
    return [literal(part) for part in value] if isinstance(value, list) else value


def _refuse_unknown(prefix: str, given: Mapping[str, Any], kind: type) -> None:
    valid = [f.name for f in fields(kind)]
    for key in given:
        if key not in valid:
            where = f"{prefix}.{key}" if prefix else str(key)
            near = suggestion(str(key), valid)
            near = near.replace("mean ", f"mean {prefix}.") if prefix else near
            raise UserError(f"{where} is not a key of the config; {near}")


def shown(value: Any) -> str:
    """A value as it is typed."""
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def kind_of(value: Any) -> str:
    kinds = {bool: "a truth value", int: "a whole number", float: "a fraction", str: "text"}
    more = {type(None): "nothing", list: "a list", dict: "a group of keys"}
    return (kinds | more).get(type(value)) or f"a {type(value).__name__}"


def _spoken(type_name: str) -> str:
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    words["list[str]"] = words["list"] = "a list of names, as [torchvision]"
    parts = [part.strip() for part in type_name.split("|")]
    return " or ".join(words.get(part, "null" if part == "None" else part) for part in parts)
