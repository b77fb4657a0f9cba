"""A run's config: composed and checked before torch is imported."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
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
from dpframe.config.earlier_run import WORDS, newest_file, start_file, with_saved
from dpframe.config.errors import explain
from dpframe.config.loader import ConfigLoader, quoted, register_resolver
from dpframe.config.objective import Objective, objective_of
from dpframe.config.overrides import as_notes, key_of, value_of
from dpframe.config.schema import RunSettings, read_settings
from dpframe.config.untrusted import refuse_calls_by_reference
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
    hydra: dict[str, Any]  # Hydra's own keys, of which a `${…}` is not filled in
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

    @cached_property
    def text(self) -> str:
        return yaml.safe_dump(self.public, sort_keys=False, allow_unicode=True)

    @property
    def notes(self) -> dict[str, str]:
        """The files of `.hydra/`."""
        hydra = OmegaConf.to_yaml(OmegaConf.create({"hydra": self.hydra}))
        texts = {"config.yaml": self.text, "hydra.yaml": hydra}
        return texts | {"overrides.yaml": as_notes(self.overrides)}


def composed(overrides: Sequence[str], *, config_dir: str | None = None) -> Composed:
    """The checked config, or a UserError."""
    return from_hydra(compose(ConfigLoader(config_dir), overrides), overrides)


def compose(configs: ConfigLoader, typed: Sequence[str]) -> DictConfig:
    """Composes the config, with the overrides of the run that is resumed or evaluated."""

    def runs() -> Path:
        of_one_start = ("hydra.run.dir", "mode")  # the runs are trainings
        config = configs.compose([o for o in typed if key_of(o) not in of_one_start])
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
            refuse_calls_by_reference(config, _fill_references(config), texts, values, start)
        except OmegaConfBaseException as error:
            raise explain(error, config=_plain(config)) from None
    return config


def from_hydra(config: DictConfig, typed: Sequence[str]) -> Composed:
    """Splits what Hydra composed into the run's config and Hydra's own."""
    try:
        plain, public, hydra = resolve(config)
        _refuse_objects(plain)
        settings = read_settings(plain)
        given = str(config.hydra.run.dir)
        run_dir = str(files.local_path("hydra.run.dir", given))
    except OmegaConfBaseException as error:
        raise explain(error, config=_plain(config)) from None
    if not given.strip():
        raise UserError("hydra.run.dir is empty; name a directory")
    objective_of(plain)  # refuses a metric without a direction
    folder = _own_folder(hydra)
    return Composed(
        config=plain,
        public=public,
        settings=settings,
        hydra=hydra,
        overrides=list(hydra["overrides"]["task"]),
        typed=list(typed),
        run_dir=run_dir,
        is_run_dir_given=any(o.startswith("hydra.run.dir=") for o in hydra["overrides"]["hydra"]),
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


def resolve(config: DictConfig) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The run's config, and as it is written down: what is in the environment may be a secret. And
    Hydra's own keys."""
    filled, unfilled = _fill_references(config), _plain(config)
    is_of_environment = "oc." in str(unfilled)
    hydra = unfilled.pop("hydra")
    if not is_of_environment:
        return filled, deepcopy(filled), hydra
    try:
        register_resolver("oc.env", _as_written, replace=True)
        if "oc.env" in str(unfilled):
            config = OmegaConf.create(unfilled)  # without types: text stands there for a number
        return filled, _fill_references(config), hydra
    except OmegaConfBaseException:  # e.g. it is a part of another name
        return filled, unfilled, hydra
    finally:
        register_resolver("oc.env", oc.env, replace=True)


def _fill_references(config: DictConfig) -> dict[str, Any]:
    """With what each `${…}` stands for, and without Hydra's own keys, which may have no value."""
    parts = {str(key): config[key] for key in config if key != "hydra"}
    return {k: _plain(v, fill=True) if OmegaConf.is_config(v) else v for k, v in parts.items()}


def _plain(node: Any, *, fill: bool = False) -> Any:
    return OmegaConf.to_container(node, resolve=fill, throw_on_missing=fill, enum_to_str=True)


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


def _own_folder(hydra: dict[str, Any]) -> Path | None:
    """`--config-dir`."""
    sources = hydra["runtime"]["config_sources"]  # a path with ${ is no reference
    own = [each["path"] for each in sources if each["provider"] == "--config-dir"]
    return Path(own[0]) if own else None
