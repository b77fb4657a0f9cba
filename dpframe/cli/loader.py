"""Loads configs as Hydra does, and refuses what a config file must not say of Hydra or of trust."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, reduce
from importlib.resources import files
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from dpframe.errors import UserError

PLUGINS = ("hydra_plugins.", "hydra._internal.core_plugins.")
PARTS = ("optuna.samplers.", "optuna.pruners.")  # of its Optuna sweeper
PLACES = ("run.dir", "sweep.dir", "sweep.subdir")  # where runs and sweeps are written
FIXED = ("output_subdir", "job.chdir")  # dpframe has no use for another


class Loader(ConfigLoaderImpl):
    """Every config passes here: a run's, a sweep's, and each point that a sweeper draws."""

    def __init__(self, path: ConfigSearchPath) -> None:
        super().__init__(path)
        self.repository = _Repository(path)

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
            _refuse_vouching(config, overrides)
            _refuse_calls(config.hydra)
            _refuse_places(config.hydra, overrides)
        return config


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


def _refuse_vouching(config: DictConfig, overrides: Sequence[str]) -> None:
    """A file that could trust itself would make the check worth nothing."""
    node = config._get_node("trusted_modules", validate_access=False)
    typed = [override.lstrip("+").partition("=")[0] for override in overrides]
    if node is not None and node != [] and "trusted_modules" not in typed:
        raise UserError(
            "a config file sets trusted_modules, which only you can: if you know what these are, "
            f"say trusted_modules={node} on the command line"
        )


def _refuse_calls(hydra: DictConfig) -> None:
    """What Hydra would call or set up in a sweep: plugins of its own, and nothing else."""
    for key in ("callbacks", "job.env_set", "job.env_copy"):
        if OmegaConf.select(hydra, key):
            raise UserError(f"hydra.{key}: dpframe has no use for this; leave it out")
    for key in ("job_logging", "hydra_logging"):
        if OmegaConf.select(hydra, f"{key}.root") is not None:
            raise UserError(f"hydra.{key}: dpframe does its own logging; leave it out")
    for key in OmegaConf.select(hydra, "sweeper.params") or {}:
        if "trusted_modules" in str(key):
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
    if where in ("hydra.sweeper", "hydra.launcher"):
        return target.startswith(PLUGINS)
    is_part = where.startswith("hydra.sweeper.") and target.startswith(PARTS)
    return is_part and target.count(".") == 2


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
