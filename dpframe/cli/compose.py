"""Composes a run's config with Hydra, and says what is wrong with it in one line."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from dpframe.cli.settings import TOP_LEVEL, RunSettings, checked
from dpframe.errors import UserError, suggestion

CONFIG_NAME = "config"
GROUPS = ("recipe", "strategy", "trainer", "callbacks", "logger", "experiment")


@dataclass
class Composed:
    """A config ready to run: as plain containers, as settings, and as the texts to write down."""

    config: dict[str, Any]
    settings: RunSettings
    text: str
    hydra_text: str
    overrides: list[str]
    run_dir: str
    is_run_dir_given: bool


@contextmanager
def hydra_over(config_dir: str | None) -> Iterator[Any]:
    """Hydra with our configs and the user's folder on its search path."""
    if config_dir is not None and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir={config_dir} is not a directory")
    GlobalHydra.instance().clear()
    with initialize_config_module("dpframe.conf", version_base="1.3", job_name="dpframe"):
        yield GlobalHydra.instance().hydra


def search_path(config_dir: str | None) -> list[str]:
    """The override that puts a user's folder on Hydra's search path."""
    if config_dir is None:
        return []
    return [f"hydra.searchpath=[file://{os.path.abspath(config_dir)}]"]


def composed(overrides: Sequence[str], *, config_dir: str | None = None) -> Composed:
    """The checked config, or a UserError. Torch is not imported."""
    with hydra_over(config_dir):
        config = raw(overrides, config_dir=config_dir)
        HydraConfig.instance().set_config(config)
        return from_hydra(config)


def from_hydra(config: DictConfig) -> Composed:
    """Splits what Hydra composed into the run's config and Hydra's own."""
    try:
        run_dir = str(config.hydra.run.dir)
        hydra_text = OmegaConf.to_yaml(OmegaConf.masked_copy(config, ["hydra"]))
        overrides = list(config.hydra.overrides.task)
        job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        plain = OmegaConf.to_container(job, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error)) from None
    assert isinstance(plain, dict)
    named: dict[str, Any] = {str(key): value for key, value in plain.items()}
    given = any(override.startswith("hydra.run.dir=") for override in config.hydra.overrides.hydra)
    return Composed(
        config=named,
        settings=checked(named),
        text=yaml.safe_dump(named, sort_keys=False, allow_unicode=True),
        hydra_text=hydra_text,
        overrides=overrides,
        run_dir=run_dir,
        is_run_dir_given=given,
    )


def raw(overrides: Sequence[str], *, config_dir: str | None) -> DictConfig:
    """What Hydra composes, hydra's own node included; its errors as one line."""
    _check_heads(overrides)
    try:
        return compose(
            CONFIG_NAME, [*search_path(config_dir), *overrides], return_hydra_config=True
        )
    except MissingConfigException as error:
        raise _unknown_option(error, overrides) from None
    except ConfigCompositionException as error:
        raise _unknown_key(error, overrides, config_dir) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_first_line(error)) from None
    except yaml.YAMLError as error:
        raise UserError(_yaml_line(error)) from None


def job_only(config: DictConfig) -> DictConfig:
    with open_dict(config):
        del config["hydra"]
    return config


def _check_heads(overrides: Sequence[str]) -> None:
    """The first word of every override, before Hydra asks for something else that is missing."""
    for override in overrides:
        match = re.match(r"^(?:\+\+?|~)?([^=@]+)", override)
        if match is None or ("=" not in override and not override.startswith("~")):
            raise UserError(f"'{override}' is not an override; write key=value, as trainer.gpus=2")
        head = re.split(r"[./]", match.group(1))[0]
        if head not in (*TOP_LEVEL, *GROUPS, "hydra"):
            raise UserError(
                f"{override}: there is no key '{head}'; {suggestion(head, [*TOP_LEVEL, *GROUPS])}"
            )


def _unknown_option(error: MissingConfigException, overrides: Sequence[str]) -> UserError:
    missing = error.missing_cfg_file or ""
    group, _, option = missing.rpartition("/")
    options = list(error.options or [])
    if not options:
        return UserError(_first_line(error))
    given = next((o for o in overrides if o.endswith(f"{group}={option}")), f"{group}={option}")
    near = suggestion(option, options)
    there = f" (there is: {', '.join(options)})" if near.startswith("did") else ""
    return UserError(f"{given}: there is no such {group}; {near}{there}")


def _unknown_key(error: Exception, overrides: Sequence[str], config_dir: str | None) -> UserError:
    text = str(error)
    if match := re.search(r"[Yy]ou must specify '(\w+)'", text):
        return UserError(
            f"{match[1]} is not given; say {match[1]}=NAME, one of: "
            f"{', '.join(options_of(match[1], config_dir))} (see --help)"
        )
    match = re.search(r"Could not (?:override|append|delete)[^']*'([^'\n]+)'", text)
    key = match[1] if match else ""
    given = next((o for o in overrides if o.lstrip("+~").split("=")[0] == key), key)
    groups = [o for o in overrides if o.split("=")[0] in GROUPS]
    if not key or given in groups:
        return UserError(_first_line(error))
    node: Any = raw(groups, config_dir=config_dir)
    *parents, leaf = key.split(".")
    for depth, part in enumerate(parents):
        if not isinstance(node, DictConfig) or part not in node:
            where = ".".join(parents[: depth + 1])
            return UserError(
                f"{given}: there is no key {where}; {_near(node, part, parents[:depth])}"
            )
        node = node[part]
    if isinstance(node, DictConfig) and leaf in node:
        return UserError(f"{given}: {_first_line(error.__cause__ or error)}")
    return UserError(f"{given}: there is no key {key}; {_near(node, leaf, parents)}")


def _near(node: Any, name: str, parents: list[str]) -> str:
    keys = [str(k) for k in node if k != "hydra"] if isinstance(node, DictConfig) else []
    found = suggestion(name, keys)
    prefix = ".".join(parents)
    return found.replace("mean ", f"mean {prefix}.") if prefix and "mean" in found else found


def options_of(group: str, config_dir: str | None) -> list[str]:
    """The options of a group, in our configs and the user's folder."""
    loader = GlobalHydra.instance().config_loader()
    found = set(loader.get_group_options(group))
    if config_dir is not None:
        found |= {path.stem for path in Path(config_dir, group).glob("*.yaml")}
    return sorted(found)


def _yaml_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{mark.name}, line {mark.line + 1}: {problem}" if mark else f"broken YAML: {problem}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2]) if lines else type(error).__name__
