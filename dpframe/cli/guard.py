"""What a config file may not set: trust, the run to resume, and Hydra's commands and directories.

They come from the command line alone. A file may choose an installed launcher or sweeper, numbers
and plain words for them, and the search space.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from dpframe.cli.resume import key_of
from dpframe.errors import UserError

# A recipe's name is also the name of a folder. A recipe in a folder of others has a slash.
NAME = r"\w[\w .,+=@-]*(/\w[\w .,+=@-]*)*"
TYPED: dict[str, Any] = {"resume": None, "resume_anyway": False, "trusted_modules": []}
NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
UNUSED: dict[str, Any] = {  # Hydra's keys without a use in dpframe, and their only value
    "callbacks": {},
    "output_subdir": ".hydra",
    "job_logging": NO_LOGGING,
    "hydra_logging": NO_LOGGING,
    "job.chdir": False,
    "job.env_set": {},
    "job.env_copy": [],
}
GUARDED = ("run", "sweep", "launcher", "sweeper")  # may name directories, commands and code
CODE = {"custom_search_space", "module", "function", "python", "command"}  # of a sweeper
RESOURCES = {  # of a launcher
    *("name", "partition", "qos", "account", "constraint", "gres", "mem", "mem_per_cpu"),
    *("mem_per_gpu", "backend", "batch_size", "pre_dispatch"),
}


def refuse(config: DictConfig, overrides: Sequence[str], typed: Sequence[str]) -> None:
    """Refuses what was composed from `overrides` where a file sets what only `typed` ones may."""
    plain: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    hydra = plain["hydra"]
    _refuse_recipe(plain)
    if sorted(hydra["overrides"]["hydra"] + hydra["overrides"]["task"]) != sorted(overrides):
        raise _unused("overrides")
    for key, default in TYPED.items():
        value = plain.get(key, default)
        if value != default and key not in map(key_of, typed):
            raise _only_typed(key, value)
    for key, only in UNUSED.items():
        part, _, name = key.partition(".")
        if (hydra[part][name] if name else hydra[part]) != only:
            raise _unused(key)
    for key in ("launcher", "sweeper"):
        if not isinstance(hydra[key], dict) or "_target_" not in hydra[key]:
            raise UserError(f"hydra.{key} has no _target_; choose one by its name: hydra/{key}=…")
    for key in hydra["sweeper"].get("params") or {}:
        head = re.split(r"\W", str(key).lstrip("+"))[0]
        if not re.fullmatch(r"\+*[\w./@-]+", str(key)) or head in (*TYPED, "hydra"):
            raise UserError(f"hydra.sweeper.params.{key}: set it on the command line")
    _refuse_settings(config.hydra, hydra, overrides)


def _refuse_recipe(plain: Mapping[str, Any]) -> None:
    """A recipe's name is a folder of its runs wherever Hydra looks it up, so it is plain text."""
    for group in ("recipe", "experiment"):
        if isinstance(node := plain.get(group), dict):
            option = plain["hydra"]["runtime"]["choices"].get(group)
            fault = "must begin with '# @package _global_'" if node else "has no keys in it"
            raise UserError(f"{group}={option}: its file {fault}")
    name = plain.get("recipe", "???")
    is_name = isinstance(name, str | int | float) and re.fullmatch(NAME, str(name))
    if name != "???" and not is_name:
        raise UserError(
            f"recipe={name} is not a plain name, but it names the folder of its runs; "
            "use letters, digits, - and _"
        )


def _refuse_settings(hydra: DictConfig, plain: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """A guarded value is typed, harmless, dpframe's own, or what an installed plugin has there."""
    guarded = {key: plain[key] for key in GUARDED} | {"job": {"name": plain["job"]["name"]}}
    typed = _typed(overrides)
    installed = [*_ours(), *_installed("hydra/launcher"), *_installed("hydra/sweeper")]
    for key, value in _leaves(guarded):
        if (key, value) in installed:
            continue
        if key.endswith("._target_"):
            raise UserError(
                f"hydra.{key}={value} is no plugin of Hydra's; choose one by its name, e.g. "
                "hydra/launcher=NAME"
            )
        if "._" in key:
            raise _unused(key)
        if key not in typed and not _is_harmless(key, value):
            raise _only_typed(f"hydra.{key}", value)
        if OmegaConf.is_config(OmegaConf.select(hydra, key)) and isinstance(value, str):
            raise UserError(f"hydra.{key}={value} is a group of keys; write them out")


def _typed(overrides: Sequence[str]) -> set[str]:
    words = [o for o in overrides if re.match(r"hydra\b(?!/)", key_of(o))]
    parsed = OverridesParser.create().parse_overrides(words)
    leaves = [leaf for o in parsed for leaf in _leaves({o.key_or_group: o.value()})]
    return {key.removeprefix("hydra.") for key, _ in leaves}


@cache
def _ours() -> list[tuple[str, Any]]:
    text = files("dpframe.conf").joinpath("hydra", "default.yaml").read_text(encoding="utf-8")
    return [*_leaves(yaml.safe_load(text)), ("job.name", "dpframe")]


def _installed(group: str) -> Iterator[tuple[str, Any]]:
    """The values of all options that installed packages have in one of Hydra's groups."""
    store = ConfigStore.instance()
    for name in store.list(group):
        if name.endswith(".yaml"):
            node: Any = OmegaConf.to_container(store.load(f"{group}/{name}").node, enum_to_str=True)
            where = group.removeprefix("hydra/").replace("/", ".")
            yield from _leaves({where: node})
        else:
            yield from _installed(f"{group}/{name}")


def _leaves(node: Mapping[Any, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Every value below a node with its dotted key; a list is one value, and so is `{}`."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


def _is_harmless(key: str, value: Any) -> bool:
    part, name, *below = key.split(".")
    if part == "sweeper" and name == "params":
        return True
    values = value if isinstance(value, list) else [] if value == {} else [value]
    words = [v for v in values if not isinstance(v, int | float | None)]
    if not all(isinstance(word, str) and re.fullmatch(r"[\w+-]*", word) for word in words):
        return False
    if part == "sweeper":
        return not CODE & {name, *below}
    return part == "launcher" and not below and (not words or name in RESOURCES)


def _unused(key: str) -> UserError:
    return UserError(f"hydra.{key}: dpframe has no use for this; leave it out")


def _only_typed(key: str, value: Any) -> UserError:
    return UserError(
        f"a config file sets {key}, which only you can: if you know what it does, pass "
        f"{key}={value} on the command line"
    )
