"""Loads configs as Hydra does, and refuses what a config file must not say of Hydra or of trust."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, reduce
from importlib.resources import files
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpframe.cli.resumed import key_of
from dpframe.cli.settings import NAME, no_plain_name
from dpframe.errors import UserError

TYPED: dict[str, Any] = {"resume": None, "resume_anyway": False, "trusted_modules": []}
NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
CODE = ("custom_search_space", "module", "function", "python", "command")
RESOURCES = (  # of a launcher, beside numbers
    *("name", "partition", "qos", "account", "constraint", "gres", "mem", "mem_per_cpu"),
    *("mem_per_gpu", "backend", "batch_size", "pre_dispatch"),
)
WORDS = r"[A-Za-z0-9_+-]*"
BASIC = (
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
)
PARTS = ("optuna.samplers.", "optuna.pruners.")  # of its Optuna sweeper
PLACES = ("run.dir", "sweep.dir", "sweep.subdir")  # where runs and sweeps are written
FIXED = ("output_subdir", "job.chdir")  # dpframe has no use for another


class Loader(ConfigLoaderImpl):
    """Every config passes here: a run's, a sweep's, and each point that a sweeper draws."""

    def __init__(self, path: ConfigSearchPath) -> None:
        super().__init__(path)
        self.repository = _Repository(path)
        self.typed: Sequence[str] | None = None  # of a sweep, whose points a sweeper may make up
        self._installed: dict[str, dict[str, Any]] = {}

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        config = super().load_configuration(
            config_name, overrides, run_mode, from_shell, validate_sweep_overrides
        )
        if config_name is not None:  # what is there to be run; else it is for --hydra-help
            _refuse_recipe(config)
            _refuse_given_overrides(config.hydra, overrides)
            _refuse_untyped(config, overrides if self.typed is None else self.typed)
            _refuse_calls(config.hydra)
            _refuse_places(config.hydra, overrides)
            self._refuse_commands(config.hydra)
        return config

    def _refuse_commands(self, hydra: DictConfig) -> None:
        """A file chooses an installed launcher or sweeper, how many of what, and where to search;
        what might name code or shell commands is typed."""
        for key, value in _leaves(_parts_of(hydra)):
            if not _is_harmless(key, value) and value != self._typed_value(key, hydra):
                name = re.sub(r"(\.\d+)+$", "", key)
                raise UserError(
                    f"a config file sets hydra.{name}, which only you can, as it may name code: if "
                    f"you know what it does, say hydra.{name}=… on the command line"
                )

    def _typed_value(self, key: str, hydra: DictConfig) -> Any:
        """What it would be without any config folder but ours and those of Hydra's plugins."""
        typed = list(hydra.overrides.hydra)
        for group in ("hydra/launcher", "hydra/sweeper"):
            if not any(override.startswith(group) for override in typed):
                typed.append(f"{group}={hydra.runtime.choices[group]}")
        known = "\n".join(typed)
        if known not in self._installed:
            ours = ConfigLoaderImpl(create_config_search_path("pkg://dpframe.conf"))
            try:
                config = ours.load_configuration("config", [*typed, "~recipe"], RunMode.RUN)
            except (HydraException, OmegaConfBaseException):
                return None  # a launcher that is not installed
            self._installed[known] = dict(_leaves(_parts_of(config.hydra)))
        return self._installed[known].get(key)


class _Repository(ConfigRepository):
    """The files of the config folders, and no other: a defaults list can name any path."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        path = os.path.normpath(config_path)
        if os.path.isabs(path) or path.split(os.sep)[0] == os.pardir:
            raise UserError(
                f"{config_path} is outside of the config folders; put it into one of them, or name "
                "its folder by --config-dir=DIR"
            )
        return super().load_config(config_path)


def _refuse_recipe(config: DictConfig) -> None:
    """It names the folder of its runs, in whatever config Hydra looks it up: so no reference."""
    for group in ("recipe", "experiment"):
        node = config._get_node(group, validate_access=False)
        if isinstance(node, DictConfig):
            option = config.hydra.runtime.choices.get(group)
            fault = "must begin with '# @package _global_'" if node else "has no keys in it"
            raise UserError(f"{group}={option}: its file {fault}")
    node = config._get_node("recipe", validate_access=False)
    if not isinstance(node, Node) or node._is_missing():
        return
    plain = OmegaConf.to_container(OmegaConf.masked_copy(config, "recipe"), resolve=False)
    assert isinstance(plain, dict)
    name = plain["recipe"]
    if not re.fullmatch(NAME, str(name)) or not isinstance(name, str | int | float):
        raise no_plain_name(name)


def _refuse_given_overrides(hydra: DictConfig, overrides: Sequence[str]) -> None:
    """Hydra adds what is typed to what a file has there, and we take both for what was typed."""
    listed = [*hydra.overrides.hydra._content, *hydra.overrides.task._content]
    if sorted(str(node._value()) for node in listed) != sorted(overrides):
        raise UserError("hydra.overrides: dpframe has no use for this; leave it out")


def _refuse_untyped(config: DictConfig, overrides: Sequence[str]) -> None:
    """A file that could trust itself would make the check worth nothing; one that could resume
    would write into another run."""
    typed = [key_of(override) for override in overrides]
    there = [key for key in TYPED if config._get_node(key, validate_access=False) is not None]
    plain = OmegaConf.to_container(OmegaConf.masked_copy(config, there), resolve=False)
    for key, value in dict(plain).items():  # type: ignore[arg-type]
        if key not in typed and value != TYPED[key]:
            raise UserError(
                f"a config file sets {key}, which only you can: if you know what it does, say "
                f"{key}={value} on the command line"
            )


def _refuse_calls(hydra: DictConfig) -> None:
    """What Hydra would call or set up in a sweep: plugins of its own, and nothing else."""
    plain: Any = OmegaConf.to_container(hydra, resolve=False)
    for key in ("callbacks", "job.env_set", "job.env_copy"):
        if reduce(lambda node, name: node[name], key.split("."), plain):
            raise UserError(f"hydra.{key}: dpframe has no use for this; leave it out")
    for key in ("job_logging", "hydra_logging"):
        if plain[key] != NO_LOGGING:
            raise UserError(f"hydra.{key}: dpframe does its own logging; leave it out")
    for key in ("sweeper", "launcher"):
        if not isinstance(plain[key], dict) or "_target_" not in plain[key]:
            raise UserError(
                f"hydra.{key} has no _target_; choose one by its name: hydra/{key}=NAME"
            )
        if wrong := {"_args_", "_partial_", "_recursive_"} & {str(name) for name in plain[key]}:
            raise UserError(f"hydra.{key}.{min(wrong)}: dpframe has no use for this; leave it out")
    for key in plain["sweeper"].get("params") or {}:
        if not re.fullmatch(r"\+*[\w./@-]+", str(key)) or re.split(r"\W", key.lstrip("+"))[0] in (
            *TYPED,
            "hydra",
        ):
            raise UserError(f"hydra.sweeper.params.{key}: give it on the command line")
    for where, target in _targets(hydra, "hydra"):
        if not _is_plugin(where, target):
            raise UserError(
                f"{where}._target_={target} is no plugin of Hydra's; choose one by its name, as "
                "hydra/launcher=NAME"
            )


def _refuse_places(hydra: DictConfig, overrides: Sequence[str]) -> None:
    """Where dpframe writes is said on the command line: a stranger's file could name any folder."""
    typed = {override.lstrip("+").partition("=")[0] for override in overrides}
    given = _values(hydra)
    for key, value in _values(_ours()).items():
        is_typed = any(
            name in (f"hydra.{key}", f"hydra.{key}".rpartition(".")[0]) for name in typed
        )
        if given[key] != value and key in FIXED:
            raise UserError(f"hydra.{key}: dpframe has no use for this; leave it out")
        if given[key] != value and not is_typed:
            raise UserError(
                f"a config file sets hydra.{key}, which only you can: if you want to write there, "
                f"say hydra.{key}={given[key]} on the command line"
            )


def _values(hydra: DictConfig) -> dict[str, Any]:
    """Where dpframe and Hydra write, as it stands in the files: with its `${…}`."""
    keys = [*PLACES, *FIXED]
    parts = OmegaConf.masked_copy(hydra, list({key.partition(".")[0] for key in keys}))
    plain = OmegaConf.to_container(parts, resolve=False)
    return {key: reduce(lambda node, name: node[name], key.split("."), plain) for key in keys}


@cache
def _ours() -> DictConfig:
    text = files("dpframe.conf").joinpath("hydra", "default.yaml").read_text(encoding="utf-8")
    return OmegaConf.create(yaml.safe_load(text))


def _is_plugin(where: str, target: str) -> bool:
    kind = {"hydra.sweeper": Sweeper, "hydra.launcher": Launcher}.get(where)
    if kind is not None:
        plugins = Plugins.instance().discover(kind)
        return target in [f"{plugin.__module__}.{plugin.__name__}" for plugin in plugins]
    is_part = where.startswith("hydra.sweeper.") and target.startswith(PARTS)
    return is_part and target.count(".") == 2


def _parts_of(hydra: DictConfig) -> Any:
    """With its `${…}` as they stand."""
    parts = OmegaConf.masked_copy(hydra, ["launcher", "sweeper", "job"])
    plain: Any = OmegaConf.to_container(parts, resolve=False)
    return plain | {"job": {"name": plain["job"]["name"]}}


def _leaves(node: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    names: Iterable[Any] = node if isinstance(node, dict) else range(len(node))
    for name in names:
        key = f"{where}.{name}" if where else str(name)
        if isinstance(node[name], dict | list) and node[name]:
            yield from _leaves(node[name], key)
        else:
            yield key, node[name]


def _is_harmless(key: str, value: Any) -> bool:
    part, name, *more = key.split(".")
    if part == "sweeper" and (name == "params" or more[-1:] == ["_target_"]):
        return True  # looked at by `_refuse_calls`
    if name == "_target_" and not more:
        return value in BASIC
    is_word = re.fullmatch(WORDS, key.replace(".", "")) and re.fullmatch(WORDS, str(value).lower())
    if not is_word or (more and part != "sweeper"):
        return isinstance(value, float) and not more
    return not isinstance(value, str) or (
        name not in CODE if part == "sweeper" else name in RESOURCES
    )


def _targets(node: Any, where: str) -> Iterator[tuple[str, str]]:
    """Every target below, through the nodes that a `${…}` stands for, too."""
    if node is not None and node._is_interpolation():
        node = node._maybe_dereference_node()
    if not isinstance(node, DictConfig | ListConfig) or node._is_none() or node._is_missing():
        return
    keys: Iterable[Any] = node.keys() if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        if key == "_target_":
            yield where, str(OmegaConf.select(node, "_target_", throw_on_missing=False))
        else:
            yield from _targets(node._get_node(key), f"{where}.{key}")
