"""The top-level keys of a config, and the check that nothing else is there."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpframe.errors import UserError, suggestion
from dpframe.trainer.settings import TrainerSettings

MODES = ("fit", "validate", "test", "predict")


@dataclass
class RunSettings:
    recipe: str
    task: dict[str, Any]
    data: dict[str, Any]
    strategy: dict[str, Any]
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    mode: str = "fit"
    seed: int = 0
    checkpoint: str | None = None
    resume: str | None = None
    vars: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(
                f"mode={self.mode} is not one of {', '.join(MODES)}; {suggestion(self.mode, MODES)}"
            )
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} is out of range; give 0 to 2**63 - 1")
        if self.resume is not None and self.mode != "fit":
            raise UserError(
                f"resume={self.resume} goes on with training, but mode={self.mode}; "
                "use checkpoint=FILE"
            )


TOP_LEVEL = tuple(f.name for f in fields(RunSettings))


def checked(config: Mapping[str, Any]) -> RunSettings:
    """The config as settings; a key or a type that does not fit is refused by its name."""
    _refuse_unknown("", config, RunSettings)
    for name in ("task", "data", "strategy"):
        if not isinstance(config.get(name), Mapping) or "_target_" not in config[name]:
            raise UserError(f"{name} has no _target_; a recipe names the class of its {name}")
    trainer = _typed("trainer", config.get("trainer") or {}, TrainerSettings)
    plain = {name: value for name, value in config.items() if name in ("mode", "seed")}
    _typed("", plain, _Plain)
    rest = {name: value for name, value in config.items() if name != "trainer"}
    return RunSettings(trainer=trainer, **rest)


@dataclass
class _Plain:
    mode: str = "fit"
    seed: int = 0


def _typed(prefix: str, given: Mapping[str, Any], kind: type) -> Any:
    _refuse_unknown(prefix, given, kind)
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), dict(given)))
    except OmegaConfBaseException as error:
        key = ".".join(part for part in (prefix, error.full_key) if part)
        value = given.get((error.full_key or "").split(".")[0])
        wanted = {f.name: f.type for f in fields(kind)}.get(error.full_key or "")
        name = getattr(wanted, "__name__", None) or str(wanted)
        raise UserError(
            f"{key}={value} is a {type(value).__name__}; give {_spoken(name)}"
        ) from None


def _refuse_unknown(prefix: str, given: Mapping[str, Any], kind: type) -> None:
    valid = [f.name for f in fields(kind)]
    for key in given:
        if key not in valid:
            where = f"{prefix}.{key}" if prefix else str(key)
            raise UserError(f"{where} is not a key of the config; {suggestion(str(key), valid)}")


def _spoken(type_name: str) -> str:
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    parts = [part.strip() for part in type_name.split("|")]
    return " or ".join(words.get(part, "null" if part == "None" else part) for part in parts)
