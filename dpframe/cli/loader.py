"""Loads configs as Hydra does, and refuses what a config file must not say of Hydra or of trust."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from dpframe.errors import UserError

PLUGINS = ("hydra_plugins.", "hydra._internal.core_plugins.")
PARTS = ("optuna.samplers.", "optuna.pruners.")  # of its Optuna sweeper


class Loader(ConfigLoaderImpl):
    """Every config passes here: a run's, a sweep's, and each point that a sweeper draws."""

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
        return config


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
