"""The configs of dpframe, of plugins and of a user's folder, as Hydra composes them.

A file may not set the run to resume, where a run meets others, nor Hydra's commands and
directories: they come from the command line alone. A file may choose an installed launcher or
sweeper, numbers and plain words for them, and the search space.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import hydra
import omegaconf
import yaml
from hydra import initialize_config_module
from hydra.core.config_loader import ConfigLoader as HydraLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ValidationError

from dpframe.config import plugins
from dpframe.config.errors import OUTSIDE, explain
from dpframe.config.keys import dotted, has, may_take
from dpframe.config.overrides import is_switch, key_of
from dpframe.config.schema import CONFIG_NAME, register
from dpframe.errors import UserError
from dpframe.util.files import is_url

GROUPS = ("recipe", "strategy", "trainer", "callbacks", "logger", "task/schedule", "experiment")
# Hydra 1.3 has the defaults of 1.1 unless told; 1.4 has its own alone.
BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
# Each of OmegaConf 2.3 and 2.4 deprecates the other's name.
register_resolver: Any = (
    OmegaConf.register_new_resolver
    if omegaconf.__version__.startswith("2.3.")
    else OmegaConf.register_resolver
)
LONGEST_NAME = 200  # bytes of a sweep's directory name; file systems end at 255
OF_ITS_FILE = "${hydra:runtime.choices.recipe}"
# A recipe's name is also the name of a folder. A recipe in a folder of others has a slash.
NAME = r"\w[\w .,+=@-]*(/\w[\w .,+=@-]*)*"
TYPED: dict[str, Any] = {
    "resume": None,
    "resume_anyway": False,
    "strategy.storage": None,
    "sweep.resume": None,
}
NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
UNUSED = (  # Hydra's keys without a use in dpframe
    *("callbacks", "output_subdir", "job_logging", "hydra_logging"),
    *("job.chdir", "job.env_set", "job.env_copy"),
)
# What may name directories, commands and code
GUARDED = (*UNUSED, "run", "sweep", "launcher", "sweeper", "job.name")
CODE = {"custom_search_space", "module", "function", "python", "command"}  # of a sweeper
RESOURCES = {  # of a launcher
    *("name", "partition", "qos", "account", "constraint", "gres", "mem", "mem_per_cpu"),
    *("mem_per_gpu", "backend", "batch_size", "pre_dispatch"),
}


class ConfigLoader:
    """Hydra's loader over our folders, which refuses what a file may not set.

    A sweeper and its launcher compose through it, too: `typed` are the overrides of their sweep.
    """

    taken: Sequence[str] = ()  # overrides of an earlier sweep, whose directory is data

    def __init__(self, config_dir: str | None, *, typed: Sequence[str] | None = None) -> None:
        self.folder = None if config_dir is None else _readable(config_dir)
        self.typed = typed
        folders = [] if self.folder is None else [("--config-dir", str(self.folder))]
        folders += [(p.package, str(p.folder)) for p in plugins.installed()]
        self.loader = _loader(folders)
        self.composed: dict[tuple[str, ...], dict[str, Any]] = {}  # for hints
        self.listed: dict[str, list[str]] = {}  # the options of each group that was asked for

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The config, `hydra` included; an error of Hydra's is a UserError."""
        for override in overrides:
            if several := re.match(r"(recipe|strategy)=\[(.*,.*)\]", override):
                group, names = several.groups()
                raise UserError(f"{override}: a run has one {group}; -m {group}={names} runs each")
        with self.explained(overrides):
            words = [with_path_quoted(override) for override in overrides]
            config = self.load_configuration(CONFIG_NAME, words, RunMode.RUN)
        choices = config.hydra.runtime.choices
        for group, option in choices.items():
            plugins.refuse_shadowed(str(group), option, self.folder)
        if "recipe" in choices and OmegaConf.is_interpolation(config, "recipe"):
            config.recipe = choices["recipe"]  # what conf/config.yaml refers to
        return config

    @contextmanager
    def explained(self, overrides: Sequence[str]) -> Iterator[None]:
        """Turns what Hydra refuses inside into a UserError."""
        try:
            yield
        except Exception as error:
            raise explain(error, overrides, self) from None

    def base(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The config with those of the overrides whose keys there are, as plain containers."""
        heads = {*self.groups(), "hydra"}
        first = [
            o
            for o in map(self._without_plus, overrides)
            if o[:1] == "+" or {key_of(o).split("@")[0], re.split("[/@]", key_of(o))[0]} & heads
        ]
        base = self._plain(first)
        right = [each for each in overrides if each in first or has(base, key_of(each))]
        if right != first:
            with suppress(ConfigCompositionException):  # of a key in a value, e.g. in {lr:0.1}
                base = self._plain(right)
        return dict.fromkeys(self.groups()) | base

    def options(self, group: str) -> list[str]:
        if group not in self.listed:  # Hydra reads all folders again
            self.listed[group] = sorted(set(self.get_group_options(group)))
        return self.listed[group]

    def parts(self, group: str) -> list[str]:
        """The callbacks or loggers that an option brings: it has the name of its own."""
        return [each for each in self.options(group) if each not in ("default", "none")]

    def groups(self) -> list[str]:
        """Ours in our order, then the user's."""
        names = set(self.list_groups("")) - {"hydra", *GROUPS}
        return [*GROUPS, *sorted(each for each in names if each != "task" or self.options(each))]

    def offers(self, key: str) -> list[str]:
        """The options that bring a key of this last part, each with the whole key."""
        name, found = key.rpartition(".")[2], list[str]()
        if name.startswith("_"):
            return []
        for group in ("callbacks", "logger", "strategy", "task/schedule"):
            for option in self.options(group):
                for _, path in plugins.files_of(group, option, self.folder)[:1]:
                    with suppress(yaml.YAMLError, OSError):
                        where = group.replace("/", ".")
                        node = {where: yaml.safe_load(path.read_text(encoding="utf-8"))}
                        keys = (k for k, _ in dotted(node) if k.rpartition(".")[2] == name)
                        found += [f"{group}={option} {whole}" for whole in keys]
        return found

    # What Hydra asks of a loader

    def load_configuration(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, **options: Any
    ) -> DictConfig:
        def load(words: list[str]) -> DictConfig:
            return self.loader.load_configuration(config_name, words, run_mode, **options)

        return self._loaded(load, overrides, [])

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        def load(words: list[str]) -> DictConfig:
            return self.loader.load_sweep_config(master_config, words)

        shared: Any = OmegaConf.to_container(master_config.hydra.overrides, resolve=False)
        return self._loaded(load, sweep_overrides, shared["hydra"])

    def _loaded(
        self, load: Callable[[list[str]], DictConfig], overrides: list[str], shared: list[str]
    ) -> DictConfig:
        register()
        overrides = ["callbacks=none" if each == "callbacks=[]" else each for each in overrides]
        overrides = [self._without_plus(each) for each in overrides]
        try:
            config = load(overrides)
        except ConfigCompositionException as error:
            if isinstance(error.__cause__, ValidationError):  # of a value
                raise
            added = self._with_arguments(overrides)
            if added == list(overrides):
                raise
            config, overrides = load(added), added
        typed = [*shared, *overrides]
        _refuse(config, typed, typed if self.typed is None else self.typed)
        return config

    def _with_arguments(self, overrides: Sequence[str]) -> list[str]:
        """Adds ++ to keys that a part's class may take and no file sets."""
        try:
            base = self.base(overrides)
        except Exception:  # another of the overrides is wrong, too
            return list(overrides)
        keys = {each: key_of(each) for each in overrides if each[:1] not in "+~"}
        missing = {each: key for each, key in keys.items() if not has(base, key)}
        added = {
            each for each, key in missing.items() if may_take(base, key) or self._is_switch(each)
        }
        return [f"++{each}" if each in added else each for each in overrides]

    def _is_switch(self, override: str) -> bool:
        """Whether it switches off what its group has, e.g. callbacks.early_stopping=false."""
        group, _, name = key_of(override).partition(".")
        return is_switch(override) and name in self.parts(group)

    def _without_plus(self, override: str) -> str:
        """What switches off a name that no option has, as if it were not to be added: where no file
        has it either, Hydra refuses it."""
        is_known = not is_switch(override) or self._is_switch(override)
        return override if is_known else override.lstrip("+")

    def _plain(self, overrides: Sequence[str]) -> dict[str, Any]:
        register()
        words = tuple(overrides)
        if words not in self.composed:
            config = self.loader.load_configuration(CONFIG_NAME, list(words), RunMode.RUN)
            plain: Any = OmegaConf.to_container(config, enum_to_str=True)
            self.composed[words] = plain
        return self.composed[words]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is unpickled, as by a launcher
            raise AttributeError(name)
        return getattr(self.loader, name)


def with_path_quoted(override: str) -> str:
    """An existing file, or an address, needs no quotes, though Hydra's grammar wants them round a
    = or a space."""
    key, _, value = override.partition("=")
    is_plain = re.fullmatch(r"[\w./:+-]*", value, re.ASCII)
    is_file = os.path.lexists(value) or (is_url(value) and not re.search(r",|\$\{", value))
    return f"{key}={quoted(value)}" if is_file and not is_plain else override


def quoted(text: str) -> str:
    """Quotes text for Hydra, where a backslash only escapes before a quote or a ${."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    text = re.sub(r"(\\+)\Z", r"\1\1", text)
    return f"'{text}'"


def mode_folder(mode: str) -> str:
    """Of the runs that are no training: those do not lie between trainings."""
    return "" if mode == "fit" else f"{mode}/"


def directory_name(overrides: str | None) -> str:
    """A run's name, or what it differs by, at the end of the name of a directory: no slashes, and
    not too long."""
    if not overrides:
        return ""
    name = re.sub(r"(?<![^,])\+\+", "", overrides).replace("/", "_").encode()
    if len(name) > LONGEST_NAME:
        name = name[:LONGEST_NAME] + "…".encode()
    return f"_{name.decode(errors='ignore')}"


class Folders(SearchPathPlugin):
    """Adds `added` to the search path of the loader that is being made, after dpframe's configs."""

    added: ClassVar[Sequence[tuple[str, str]] | None] = None  # None: another program's Hydra

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.added is not None:
            search_path.prepend("dpframe", "inside://")
            for owner, folder in self.added:
                search_path.append(owner, f"file://{folder}")


class Inside(ConfigSource):
    """First on the search path and always empty: refuses a path that leads out of the folders.

    A defaults list can name any file, e.g. `//home/you/secret`.
    """

    @staticmethod
    def scheme() -> str:
        return "inside"

    def is_config(self, config_path: str) -> bool:
        path = os.path.normpath(config_path)
        if os.path.isabs(path) or path.split(os.sep)[0] == os.pardir:
            raise UserError(OUTSIDE.format(config_path))
        return False

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        raise ConfigLoadError(config_path)


def _loader(folders: Iterable[tuple[str, str]]) -> HydraLoader:
    """Hydra's own, over dpframe's configs and these folders."""
    for plugin in (Folders, Inside):
        Plugins.instance().register(plugin)
    register_resolver("dirname", directory_name, replace=True)
    register_resolver("mode_folder", mode_folder, replace=True)
    GlobalHydra.instance().clear()
    Folders.added = list(folders)
    try:
        with initialize_config_module("dpframe.conf", job_name="dpframe", **BASE):
            return GlobalHydra.instance().config_loader()
    finally:
        Folders.added = None


def _readable(config_dir: str) -> Path:
    try:
        os.listdir(config_dir)
    except OSError as error:
        raise UserError(
            f"--config-dir={config_dir} can't be read: {error.strerror}; name a folder"
        ) from None
    return Path(os.path.abspath(config_dir))


# What a file may not set


def _refuse(config: DictConfig, overrides: Sequence[str], typed: Sequence[str]) -> None:
    """Refuses what was composed from `overrides` where a file sets what only `typed` ones may."""
    plain: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    hydra = plain["hydra"]
    _refuse_recipe(plain)
    if sorted(hydra["overrides"]["hydra"] + hydra["overrides"]["task"]) != sorted(overrides):
        raise _unused("overrides")
    set_here = dict(dotted(plain))
    for key, default in TYPED.items():
        group = key.partition(".")[0]  # which may be a reference to one with that key
        value = set_here.get(key, set_here.get(group, default))
        if value not in (default, {}) and key not in map(key_of, typed):
            raise _only_typed(key, value)
    for key in ("launcher", "sweeper"):
        if not isinstance(hydra[key], dict) or "_target_" not in hydra[key]:
            raise UserError(f"hydra.{key} has no _target_; choose one by its name: hydra/{key}=…")
    for key in hydra["sweeper"].get("params") or {}:
        name = str(key).lstrip("+")
        is_typed = name in TYPED or re.split(r"\W", name)[0] in (*TYPED, "sweep", "hydra")
        if not re.fullmatch(r"\+*[\w./@-]+", str(key)) or is_typed:
            raise UserError(f"hydra.sweeper.params.{key}: set it on the command line")
    _refuse_settings(config.hydra, hydra, overrides)


def _refuse_recipe(plain: Mapping[str, Any]) -> None:
    """A recipe's name is a folder of its runs wherever Hydra looks it up, so it is plain text."""
    name = plain.get("recipe", "???")
    if name not in ("???", OF_ITS_FILE) and not re.fullmatch(NAME, name):
        raise UserError(
            f"recipe={name} is not a plain name, but it names the folder of its runs; "
            "use letters, digits, - and _"
        )


def _refuse_settings(hydra: DictConfig, plain: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """A guarded value is typed, harmless, dpframe's own, or what an installed plugin has there."""
    typed = _typed(overrides)
    installed = [*_ours(), *_installed("hydra/launcher"), *_installed("hydra/sweeper")]
    for key, value in dotted(plain):
        if (key, value) in installed or not _is_in(key, GUARDED):
            continue
        if "._" in key or _is_in(key, UNUSED):
            raise _unused(key)
        if key not in typed and not _is_harmless(key, value):
            raise _only_typed(f"hydra.{key}", value)
        node = OmegaConf.select(hydra, key, throw_on_resolution_failure=False)
        if OmegaConf.is_config(node) and isinstance(value, str):
            raise UserError(f"hydra.{key}={value} is a group of keys; write them out")


def _typed(overrides: Sequence[str]) -> set[str]:
    words = [o for o in overrides if re.match(r"hydra\b(?!/)", key_of(o))]
    parsed = OverridesParser.create().parse_overrides(words)
    leaves = [leaf for o in parsed for leaf in dotted({o.key_or_group: o.value()})]
    return {key.removeprefix("hydra.") for key, _ in leaves}


@cache
def _ours() -> list[tuple[str, Any]]:
    text = files("dpframe.conf").joinpath("hydra", "default.yaml").read_text(encoding="utf-8")
    logging = {"job_logging": NO_LOGGING, "hydra_logging": NO_LOGGING}
    job = {"name": "dpframe", "env_set": {}, "env_copy": []}
    return [*dotted(yaml.safe_load(text)), *dotted({**logging, "callbacks": {}, "job": job})]


def _is_in(key: str, groups: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{group}.") for group in groups)


def _installed(group: str) -> Iterator[tuple[str, Any]]:
    """The values of all options that installed packages have in one of Hydra's groups."""
    store = ConfigStore.instance()
    for name in store.list(group):
        if name.endswith(".yaml"):
            node: Any = OmegaConf.to_container(store.load(f"{group}/{name}").node, enum_to_str=True)
            where = group.removeprefix("hydra/").replace("/", ".")
            yield from dotted({where: node})
        else:
            yield from _installed(f"{group}/{name}")


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
