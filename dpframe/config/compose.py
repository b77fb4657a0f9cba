"""A run's config: composed and checked before torch is imported."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from dpframe.config import modes
from dpframe.config.earlier_run import (
    WORDS,
    as_notes,
    key_of,
    newest_file,
    refuse_brought,
    start_file,
    value_of,
    with_saved,
)
from dpframe.config.errors import explain
from dpframe.config.loader import ConfigLoader, quoted, register_resolver
from dpframe.config.objective import Objective, objective_of
from dpframe.config.schema import RunSettings, read_settings
from dpframe.errors import UserError
from dpframe.util import files
from dpframe.values import shown

PLAIN = (type(None), bool, int, float, str)


@dataclass
class Composed:
    """A config ready to run: as plain containers, as settings, and as the texts to write down."""

    config: dict[str, Any]
    public: dict[str, Any]  # the same, with `${oc.env:…}` for what comes from the environment
    settings: RunSettings
    text: str
    hydra_text: str
    overrides: list[str]
    typed: list[str]  # of these; the others are those of the run that is resumed or evaluated
    run_dir: str
    is_run_dir_given: bool
    start: Path | None  # the checkpoint to begin with
    config_dir: Path | None = None
    number: int | None = None  # of a sweep's run
    is_repeated: bool = False  # from its beginning, as its ranks failed before a checkpoint
    history: Any = None  # a History, of a run from Python

    @property
    def objective(self) -> Objective:
        return objective_of(self.config)

    @property
    def notes(self) -> dict[str, str]:
        """The files of `.hydra/`."""
        texts = {"config.yaml": self.text, "hydra.yaml": self.hydra_text}
        return texts | {"overrides.yaml": as_notes(self.overrides)}


def composed(overrides: Sequence[str], *, config_dir: str | None = None) -> Composed:
    """The checked config, or a UserError."""
    return from_hydra(compose(ConfigLoader(config_dir), overrides), overrides)


def compose(configs: ConfigLoader, typed: Sequence[str]) -> DictConfig:
    """Composes the config, with the overrides of the run that is resumed or evaluated."""

    def runs() -> Path:
        config = configs.compose([o for o in typed if key_of(o) != "hydra.run.dir"])
        HydraConfig.instance().set_config(config)
        return Path(str(config.hydra.run.dir)).parent

    mode = value_of("mode", typed) or ""
    if re.fullmatch(r"\w+", mode):  # not a reference or a list: a mode's keys are there with it
        modes.refuse_unknown(mode)
    overrides = list(typed)
    if value_of("recipe", typed) is None and not modes.needs_recipe(value_of("mode", typed)):
        overrides.append("recipe=boston")  # which is not run
    if (name := value_of("checkpoint", typed)) in WORDS:
        file = newest_file(name, runs())
        others = [each for each in typed if key_of(each) != "checkpoint"]
        overrides = [*others, f"checkpoint={quoted(str(file))}"]
    own = overrides
    overrides = with_saved(own, runs)
    try:
        config = configs.compose(overrides)
    except UserError as error:
        if any(str(error).startswith(saved) for saved in overrides if saved not in typed):
            raise UserError(
                f"{error} (an override that the run was started with; "
                "if that had a --config-dir, pass it again)"
            ) from None
        raise
    HydraConfig.instance().set_config(config)  # what `${hydra:…}` refers to
    taken = [*configs.taken, *(each for each in overrides if each not in own)]
    if taken:
        start = next((o for o in own if key_of(o) in ("resume", "checkpoint")), "sweep.resume")
        values = [key_of(o) for o in taken if "{" in o or not configs.options(key_of(o))]
        try:
            texts = _plain(without_hydra(config))
            refuse_brought(config, _fill_references(config), texts, values, start)
        except OmegaConfBaseException as error:
            raise explain(error, config=_plain(config)) from None
    return config


def from_hydra(config: DictConfig, typed: Sequence[str]) -> Composed:
    """Splits what Hydra composed into the run's config and Hydra's own."""
    hydra = config.hydra
    try:
        plain, public = resolve(config)
        _refuse_objects(plain)
        settings = read_settings(plain)
        run_dir = str(files.local_path("hydra.run.dir", str(hydra.run.dir)))
        hydra_text = OmegaConf.to_yaml(OmegaConf.masked_copy(config, ["hydra"]))
    except OmegaConfBaseException as error:
        raise explain(error, config=_plain(config)) from None
    if not str(hydra.run.dir).strip():
        raise UserError("hydra.run.dir is empty; name a directory")
    objective_of(plain)  # refuses a metric without a direction
    folder = _own_folder(hydra)
    return Composed(
        config=plain,
        public=public,
        settings=settings,
        text=yaml.safe_dump(public, sort_keys=False, allow_unicode=True),
        hydra_text=hydra_text,
        overrides=overrides_of(config),
        typed=list(typed),
        run_dir=run_dir,
        is_run_dir_given=any(o.startswith("hydra.run.dir=") for o in hydra.overrides.hydra),
        start=start_file(settings, Path(run_dir).parent),
        config_dir=folder,
    )


@contextmanager
def hydra_kept() -> Iterator[None]:
    """A program of Hydra's, e.g. a `@hydra.main`, has its own again afterwards."""
    program, config = GlobalHydra.instance(), HydraConfig.instance()
    before = program.hydra, config.cfg
    runtime = JobRuntime.instance()
    name = runtime.get("name")  # a sweep's next job is composed with it
    try:
        yield
    finally:
        program.hydra, config.cfg = before
        runtime.set("name", name)


def without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def resolve(config: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run's config, and as it is written down: what is in the environment may be a secret."""
    filled, unfilled = _fill_references(config), _plain(config)
    del unfilled["hydra"]
    try:
        register_resolver("oc.env", _as_written, replace=True)
        if "oc.env" in str(unfilled):
            config = OmegaConf.create(unfilled)  # without types: text stands there for a number
        return filled, _fill_references(config)
    except OmegaConfBaseException:  # e.g. it is a part of another name
        return filled, unfilled
    finally:
        register_resolver("oc.env", oc.env, replace=True)


def overrides_of(config: DictConfig) -> list[str]:
    """The overrides as typed: `${…}` is not filled in."""
    overrides: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    return list(overrides["task"])


def _fill_references(config: DictConfig) -> dict[str, Any]:
    """With what each `${…}` stands for, and without Hydra's own keys, which may have no value."""
    parts = {str(key): config[key] for key in config if key != "hydra"}
    return {k: _plain(v, fill=True) if OmegaConf.is_config(v) else v for k, v in parts.items()}


def _plain(node: Any, *, fill: bool = False) -> Any:
    return OmegaConf.to_container(node, resolve=fill, throw_on_missing=fill)


def _as_written(*arguments: Any) -> str:
    return f"${{oc.env:{','.join(map(shown, arguments))}}}"


def _refuse_objects(node: Any, where: str = "") -> None:
    """YAML also makes dates and paths, which no config holds, and keys that no call can have."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            name = f"{where}.{key}" if where else str(key)
            if isinstance(node, dict) and "_target_" in node and not isinstance(key, str):
                raise UserError(f"{name}: its key is no text; put it in quotes")
            _refuse_objects(value, name)
    elif type(node) not in PLAIN:
        raise UserError(f"{where} is a {type(node).__name__}; use text, in quotes")


def _own_folder(hydra: DictConfig) -> Path | None:
    """`--config-dir`."""
    runtime: Any = OmegaConf.to_container(hydra.runtime)  # a path with ${ is no reference
    own = [s["path"] for s in runtime["config_sources"] if s["provider"] == "--config-dir"]
    return Path(own[0]) if own else None
