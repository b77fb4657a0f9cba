"""Composes a run's config with Hydra, before torch is imported."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from dpframe.cli import plugins
from dpframe.cli.loader import Loader
from dpframe.cli.objective import Objective, objective_of
from dpframe.cli.refusal import one_line, unresolved
from dpframe.cli.resumed import with_saved, with_saved_of
from dpframe.cli.settings import (
    EVALUATIONS,
    TOP_LEVEL,
    RunSettings,
    checked,
    literal,
    refuse_values,
    shown,
)
from dpframe.cli.start import start_file
from dpframe.errors import UserError, suggestion

CONFIG_NAME = "config"
GROUPS = ("recipe", "strategy", "trainer", "callbacks", "logger", "experiment")
NOT_OURS = ("hydra.job.chdir", "hydra.job.env_set", "hydra.callbacks", "hydra.output_subdir")
PLAIN = (type(None), bool, int, float, str)
LONGEST_NUMBER = 1024  # bits
LONGEST_NAME = 200  # bytes of a sweep's directory name; file systems end at 255


@dataclass
class Composed:
    """A config ready to run: as plain containers, as settings, and as the texts to write down."""

    config: dict[str, Any]
    public: dict[str, Any]  # the same, with `${oc.env:…}` for what comes from the environment
    settings: RunSettings
    text: str
    hydra_text: str
    overrides: list[str]
    typed: list[str]  # of these; the others are those of the run that this one goes on with
    run_dir: str
    is_run_dir_given: bool
    start: Path | None  # the checkpoint to begin with
    plugins: list[str]  # the packages whose options are in it
    is_repeated: bool = False  # from its beginning, as its ranks failed before a checkpoint

    @property
    def objective(self) -> Objective:
        return objective_of(self.settings.callbacks)


@contextmanager
def hydra_over(config_dir: str | None) -> Iterator[Hydra]:
    """Hydra with our configs, the user's folder and the plugins' on its search path."""
    version.setbase("1.3")
    path = create_config_search_path("pkg://dpframe.conf")
    folders = [] if config_dir is None else [("--config-dir", _readable(config_dir))]
    folders += [(p.package, str(p.folder)) for p in plugins.installed() if p.folder is not None]
    for owner, folder in folders:
        path.prepend(owner, f"file://{folder}", anchor="schema")  # which has to be the last
    OmegaConf.register_new_resolver("dirname", directory_name, replace=True)
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra.create_main_hydra2("dpframe", path)
        hydra.config_loader = Loader(path)
        yield hydra
    finally:
        GlobalHydra.instance().clear()


def composed(overrides: Sequence[str], *, config_dir: str | None = None) -> Composed:
    """The checked config, or a UserError."""
    with hydra_over(config_dir):
        return from_hydra(raw_of_run(overrides, config_dir), overrides)


def raw_of_run(overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """What Hydra composes for one run."""
    _set(config := raw_with_saved(overrides, config_dir))
    return config


def raw_with_saved(overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """With the overrides of the run that it goes on with, or whose checkpoint it evaluates."""

    def runs() -> Path:
        _set(config := raw(overrides, config_dir=config_dir))
        return Path(str(config.hydra.run.dir)).parent

    merged = with_saved(overrides, runs)
    config = _raw_merged(merged, overrides, config_dir)
    if (checkpoint := _evaluated(config)) and merged == list(overrides):  # a file may name it
        merged = with_saved_of(checkpoint, overrides)
        if merged != list(overrides):
            config = _raw_merged(merged, overrides, config_dir)
    return config


def _raw_merged(merged: Sequence[str], typed: Sequence[str], config_dir: str | None) -> DictConfig:
    try:
        return raw(merged, config_dir=config_dir)
    except UserError as error:
        if any(str(error).startswith(saved) for saved in merged if saved not in typed):
            raise UserError(
                f"{error} (an override that the run was begun with; "
                "if that had a --config-dir, say it again)"
            ) from None
        raise


def _evaluated(config: DictConfig) -> str | None:
    try:
        is_evaluation = OmegaConf.select(config, "mode") in EVALUATIONS
        checkpoint = OmegaConf.select(config, "checkpoint")
    except OmegaConfBaseException:
        return None  # `from_hydra` tells it
    return str(checkpoint) if is_evaluation and checkpoint is not None else None


def from_hydra(config: DictConfig, typed: Sequence[str]) -> Composed:
    """Splits what Hydra composed into the run's config and Hydra's own."""
    try:
        named, public = resolved(job_only(config))
        _refuse_objects(named)
        settings = checked(named)
        run_dir = str(config.hydra.run.dir)
        hydra_text = OmegaConf.to_yaml(OmegaConf.masked_copy(config, ["hydra"]))
    except OmegaConfBaseException as error:
        refuse_values(OmegaConf.to_container(config, resolve=False))
        raise unresolved(error, config) from None
    given = any(override.startswith("hydra.run.dir=") for override in config.hydra.overrides.hydra)
    return Composed(
        config=named,
        public=public,
        settings=settings,
        text=yaml.safe_dump(public, sort_keys=False, allow_unicode=True),
        hydra_text=hydra_text,
        overrides=written_overrides(config),
        typed=list(typed),
        run_dir=run_dir,
        is_run_dir_given=given,
        start=start_file(settings, Path(run_dir).parent),
        plugins=plugins.selected(config.hydra.runtime.choices, _folders(config)),
    )


def _refuse_objects(node: Any, where: str = "") -> None:
    """YAML makes dates and paths, too, which no config holds, and keys that no call can have."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            name = f"{where}.{key}" if where else str(key)
            if isinstance(node, dict) and "_target_" in node and not isinstance(key, str):
                raise UserError(f"{name}: its key is no text; put it in quotes")
            _refuse_objects(value, name)
    elif type(node) is int and node.bit_length() > LONGEST_NUMBER:
        raise UserError(f"{where} has more than {LONGEST_NUMBER} bits; give a smaller number")
    elif type(node) not in PLAIN:
        raise UserError(f"{where} is a {type(node).__name__}; give text, in quotes")


def resolved(job: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config, and as it is written down: what is in the environment may be a secret."""
    is_read = False

    def read(*given: Any) -> Any:
        nonlocal is_read
        is_read = True
        return oc.env(*given)

    try:
        OmegaConf.register_new_resolver("oc.env", read, replace=True)
        config = public = _plain(job, resolve=True)
        if is_read:
            OmegaConf.register_new_resolver("oc.env", _as_written, replace=True)
            try:
                public = _plain(job, resolve=True)
            except OmegaConfBaseException:  # it is a part of another name, say
                public = _plain(job, resolve=False)
        return config, public
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _plain(job: DictConfig, *, resolve: bool) -> dict[str, Any]:
    plain = OmegaConf.to_container(job, resolve=resolve, throw_on_missing=resolve)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _as_written(*given: Any) -> str:
    return f"${{oc.env:{','.join(map(shown, given))}}}"


def written_overrides(config: DictConfig) -> list[str]:
    """As they were typed: who reads them one by one gets what their `${…}` stand for."""
    written: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    return list(written["task"])


def _folders(config: DictConfig) -> list[Path]:
    """Ours and the user's, which come before plugins'."""
    runtime = OmegaConf.to_container(config.hydra.runtime)  # a path with ${ is no reference
    assert isinstance(runtime, dict)
    own = [s["path"] for s in runtime["config_sources"] if s["provider"] == "--config-dir"]
    return [Path(str(files("dpframe.conf"))), *map(Path, own)]


def raw(
    overrides: Sequence[str], *, config_dir: str | None = None, mode: RunMode = RunMode.RUN
) -> DictConfig:
    """What Hydra composes, hydra's own node included; its errors as one line."""
    _check_heads(overrides)
    with explained(overrides):
        config = _hydra().compose_config(
            CONFIG_NAME, [with_path_quoted(override) for override in overrides], mode
        )
    if mode is RunMode.RUN:
        _refuse_shadowed(config, config_dir)
        _name_recipe(config)
    return config


def explained(overrides: Sequence[str]) -> Any:
    """What Hydra refuses inside is a UserError."""

    def compose(others: list[str]) -> DictConfig:
        return _hydra().compose_config(CONFIG_NAME, others, RunMode.RUN)

    return one_line(overrides, compose, options_of)


def _set(config: DictConfig) -> None:
    """What `${hydra:…}` and the run's directory refer to."""
    HydraConfig.instance().set_config(config)


def job_only(config: DictConfig) -> DictConfig:
    job = config.copy()
    with open_dict(job):
        del job["hydra"]
    job._set_parent(None)
    return job


def options_of(group: str) -> list[str]:
    """The options of a group, in our configs and the user's folder."""
    return sorted(set(_hydra().config_loader.get_group_options(group)))


def groups() -> list[str]:
    """Ours in our order, then the user's."""
    found = set(_hydra().config_loader.list_groups("")) - {"hydra"}
    return [*GROUPS, *sorted(found - set(GROUPS))]


def directory_name(overrides: str) -> str:
    """A sweep's overrides as the name of one directory: no slashes, and not too long."""
    name = overrides.replace("/", "_").encode()
    if len(name) > LONGEST_NAME:
        name = name[:LONGEST_NAME] + "…".encode()
    return name.decode(errors="ignore")


def with_path_quoted(override: str) -> str:
    """An existing file needs no quotes, though Hydra's grammar wants them round a = or a space."""
    key, equals, value = override.partition("=")
    if not equals or re.fullmatch(r"[\w./:+-]*", value, re.ASCII) or not _exists(value):
        return override
    return f"{key}={quoted(value)}"


def quoted(text: str) -> str:
    """As Hydra reads it back: in quotes, where a backslash counts before a quote or a ${ alone."""
    text = re.sub(r"(\\*)'", r"\1\1\\'", literal(text))
    text = re.sub(r"(\\+)\Z", r"\1\1", text)
    return f"'{text}'"


def _exists(path: str) -> bool:
    try:
        return os.path.lexists(path)
    except ValueError:
        return False


def _hydra() -> Hydra:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    return hydra


def _readable(config_dir: str) -> str:
    if not os.path.isdir(config_dir):
        raise UserError(f"--config-dir={config_dir} is not a directory")
    try:
        os.listdir(config_dir)
    except OSError as error:
        raise UserError(f"--config-dir={config_dir} can't be read: {error.strerror}") from None
    return os.path.abspath(config_dir)


def _check_heads(overrides: Sequence[str]) -> None:
    """The first word of every override, before Hydra asks for something else that is missing."""
    for override in overrides:
        match = re.match(r"^(?:\+\+?|~)?([^=@]+)", override)
        if match is None or ("=" not in override and not override.startswith("~")):
            raise UserError(f"'{override}' is not an override; write key=value, as trainer.gpus=2")
        head = re.split(r"[./]", match.group(1))[0]
        if head not in (*TOP_LEVEL, "hydra", *groups()):
            raise UserError(
                f"{override}: there is no key '{head}'; {suggestion(head, [*TOP_LEVEL, *groups()])}"
            )
        if re.match(r"(recipe|strategy)=\[.*,", override):
            raise UserError(f"{override}: a run has one {head}; -m {head}=ONE,OTHER runs each")
        if match.group(1).startswith(NOT_OURS):
            raise UserError(f"{override}: dpframe has no use for this; leave it out")


def _refuse_shadowed(config: DictConfig, config_dir: str | None) -> None:
    """Hydra takes the first file of a name, ours: a user's other one must not be passed over."""
    for group, option in config.hydra.runtime.choices.items():
        own = Path(config_dir, group, f"{option}.yaml") if config_dir is not None else Path()
        packaged = files("dpframe.conf").joinpath(group, f"{option}.yaml")
        if not own.is_file() and not packaged.is_file():
            plugins.refuse_shared(group, option)
        if own.is_file() and packaged.is_file() and own.read_bytes() != packaged.read_bytes():
            raise UserError(
                f"{group}={option} is both dpframe's and {own}; give yours a name of its own"
            )


def _name_recipe(config: DictConfig) -> None:
    """A recipe is called as its file where it doesn't say otherwise."""
    if "recipe" in config.hydra.runtime.choices and OmegaConf.is_missing(config, "recipe"):
        config.recipe = config.hydra.runtime.choices["recipe"]
