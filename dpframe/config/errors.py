"""Turns what Hydra, OmegaConf or YAML refuses into one line: what, what was given, what to do."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from dpframe.config import modes, plugins
from dpframe.config.hints import hint
from dpframe.config.overrides import VALUES, key_of, value_of
from dpframe.config.schema import (
    CONFIG_NAME,
    SWITCHED,
    SWITCHES,
    Group,
    defaults,
    groups,
    type_of,
)
from dpframe.errors import LACKING, UserError, first_line, nearest, suggestion
from dpframe.values import KINDS, describe_type


class Menu(Protocol):
    """Where the nearest name is looked for."""

    def base(self, overrides: Sequence[str]) -> Mapping[str, Any]:
        """The config with those overrides whose keys there are."""

    def groups(self) -> list[str]: ...

    def options(self, group: str) -> list[str]: ...

    def parts(self, group: str) -> list[str]:
        """The callbacks or loggers that options bring."""

    def offers(self, key: str) -> list[str]:
        """The options that bring a key."""


def explain(
    error: Exception,
    overrides: Sequence[str] = (),
    menu: Menu | None = None,
    config: Mapping[str, Any] | None = None,
) -> UserError:
    """`config` is what was composed of these overrides, if it was."""
    if isinstance(error, UserError):
        return error
    mistake = _Mistake(error, overrides, menu, config)
    for pattern, says in TEXTS:
        if found := re.search(pattern, mistake.text):
            line = says.format(*found.groups()) if isinstance(says, str) else says(mistake, found)
            if line:
                return UserError(mistake.place + line)
    return UserError(mistake.first_line)


@dataclass
class _Mistake:
    error: Exception
    overrides: Sequence[str]
    menu: Menu | None
    config: Mapping[str, Any] | None

    @property
    def text(self) -> str:
        return f"{type(self.error).__name__}: {self.error}\n{self.error.__cause__ or ''}"

    @property
    def place(self) -> str:
        """The file that it is in, unless it is in an override."""
        found = re.search(r": In '([^']+)'", self.text)
        return f"in {found[1]}.yaml, " if found and found[1] not in (CONFIG_NAME, "config") else ""

    @property
    def key(self) -> str:
        """That of the list, for an item of a list."""
        found = re.search(r"full_key: ([^\s\[]+)", self.text)
        return found[1] if found else ""

    @property
    def first_line(self) -> str:
        cause = self.error.__cause__ or self.error
        if isinstance(cause, OmegaConfBaseException):
            return f"{self.key}: " * bool(self.key) + first_line(cause)
        is_clear = isinstance(cause, HydraException)
        return "the config can't be composed: " * (not is_clear) + first_line(cause)

    # What TEXTS has for a pattern; "": a later row may know more.

    def yaml(self, _: re.Match[str]) -> str:
        if not isinstance(self.error, yaml.YAMLError):
            return ""
        mark = getattr(self.error, "problem_mark", None)
        problem = getattr(self.error, "problem", None) or first_line(self.error)
        return f"{mark.name}, line {mark.line + 1}: {problem}" if mark else f"YAML: {problem}"

    def unreadable(self, _: re.Match[str]) -> str:
        assert isinstance(self.error, OverrideParseException)
        override = str(self.error.override)
        key, equals, value = override.partition("=")
        if not equals:
            groups = self.menu.groups() if self.menu else []
            keys = ["mode"] * (override in modes.MEANT or override in modes.names())
            keys += [group for group in groups if override in self.options(group)]
            word = modes.MEANT.get(override, override)
            meant = [f"did you mean {key}={word}?" for key in keys]
            meant.append("write key=value, e.g. trainer.gpus=2, without spaces")
            return f"'{override}' is not an override; {meant[0]}"
        quote = f"if that is text, quote it: \"{key}='{value}'\""
        try_this = "check its quotes" if set(value) & set("\"'\\") else quote
        return f"{override}: can't be read; {try_this}"

    def no_option(self, _: re.Match[str]) -> str:
        assert isinstance(self.error, MissingConfigException)
        loaded = re.search(r"Could not load '([^']+)'", self.text)
        path = self.error.missing_cfg_file or (loaded[1] if loaded else "")
        group, _slash, option = path.rpartition("/")
        if path.replace("/", "=") in plugins.OPTIONS:
            return f"{group}={option} is not installed; {LACKING}"
        names = list(self.error.options or self.options(group))
        inner = group.partition("/")[2]
        if not names and self.options(inner):  # of defaults, which begin in the file's own group
            return f"there is no group {group}; write override /{inner}: {option}"
        if not names or not group:
            return ""
        near = ELSEWHERE.get(option) or suggestion(option, names)
        there = f" (there is: {', '.join(names)})" if near.startswith("did") else ""
        kind = group.rpartition("/")[2].removesuffix("s")
        return f"{group}={option}: there is no such {kind}; {near}{there}"

    def not_chosen(self, found: re.Match[str]) -> str:
        group = found[1]
        if near := nearest(group, map(key_of, self.overrides), cutoff=0.8):
            return f"there is no key {near}; did you mean {group}?"
        if newest := next((each for each in self.overrides if each in OF_A_RECIPE), None):
            return f"{newest}: of which recipe? add recipe=NAME, or name {OF_A_RECIPE[newest]}"
        there = ", ".join(self.options(group))
        return f"{group} is not set; set {group}=NAME, one of: {there} (see --help)"

    def no_name(self, _: re.Match[str]) -> str:
        """Of `strategy=null`, which the error does not name."""
        groups = self.menu.groups() if self.menu else ()
        for override in self.overrides:
            key, _equals, value = override.lstrip("+~").partition("=")
            is_name = re.search(r"[^\W\d]", value) and value.lower().lstrip("+-") not in VALUES
            if not is_name and (there := self.options(key)):
                return f"{override}: name one {key}; there is: {', '.join(there)}"
            if not is_name and key in (name.split("/")[0] for name in groups):
                return f"{override} is one value; set its keys, as {key}.KEY=VALUE"
        return ""

    def chosen_twice(self, found: re.Match[str]) -> str:
        """A group, which is chosen already, by a + or by the defaults of a file."""
        group, option = found.groups()
        if f"+{group}" in (override.partition("=")[0] for override in self.overrides):
            return TAKEN.format(group)
        names = [f"{key}/{value_of(key, self.overrides)}.yaml" for key in ("recipe", "experiment")]
        files = " or ".join(name for name in names if not name.endswith("/None.yaml"))
        return f"in {files}, {group} is chosen already; write override /{group}: {option}"

    def no_key(self, found: re.Match[str]) -> str:
        key = found[1]
        path = key.partition("@")[0]
        inner = path.partition("/")[2]  # of defaults, which begin in the file's own group
        if self.place and self.options(inner):
            return f"there is no group {path}; write override /{inner}: OPTION"
        if self.key.startswith(f"{key}."):  # in a value, e.g. in {lr:0.1}
            key = self.key
        elif self.menu and (near := nearest(path, self.menu.groups(), cutoff=0.9)):
            return f"there is no key {path}; did you mean {near}?"
        typed = [f"{o}: " for o in self.overrides if f"{key}.".startswith(f"{key_of(o)}.")]
        return max(typed, default="", key=key_of) + f"there is no key {key}; {self.hint(key)}"

    def no_such_reference(self, found: re.Match[str]) -> str:
        return f"{self.key}=${{{found[1]}}}: there is no key {found[1]}; {self.hint(found[1])}"

    def misfit(self, found: re.Match[str]) -> str:
        """A value that can't be converted to the type of its key."""
        said = {"kind": "NoneType", "value": None} | found.groupdict()
        kind, value = str(said["kind"]), said["value"] or value_of(self.key, self.overrides)
        value = "null" if kind == "NoneType" else value
        what, wanted = f"{self.key}={value}" if value else self.key, type_of(self.key)
        if wanted == Group or is_dataclass(wanted):
            return f"{what} is one value; set its keys, as {self.key}.KEY=VALUE"
        example = f", e.g. [{value or 'NAME'}]" if wanted == list[str] else ""
        use = f"; use {describe_type(wanted)}{example}" if wanted else ""
        return f"{what} is {KINDS.get(kind, kind)}{use}"

    def null_item(self, _: re.Match[str]) -> str:
        value, use = value_of(self.key, self.overrides), describe_type(type_of(self.key))
        what = f"{self.key}={value}" if value else self.key
        return f"{what}: an item of it is null; use {use}"

    def no_group(self, found: re.Match[str]) -> str:
        keys = [key for key, kind in groups().items() if kind.__name__ == found[1]]
        value = found[2].lower()  # of true, which Hydra shows as True
        typed = [key for key in keys if (value_of(key, self.overrides) or "").lower() == value]
        key = " or ".join(typed or keys)
        if value == "true" and key in SWITCHES:
            return f"{key}=true: did you mean {SWITCHES[key]}?"
        return f"{key}={found[2]} is one value; set its keys, as {key}.KEY=VALUE"

    # Where the nearest name is looked for

    def hint(self, key: str) -> str:
        config = self.config
        if config is None and self.menu is not None:
            with suppress(Exception):  # another of the overrides is wrong, too, or a file
                config = self.menu.base(self.overrides)
        known = defaults() if config is None else config
        if self.menu is None:
            return hint(known, key)
        group = key.partition(".")[0]
        parts = self.menu.parts(group) if group in SWITCHED else []
        return hint(known, key, self.menu.offers(key), parts)

    def options(self, group: str) -> list[str]:
        return self.menu.options(group) if self.menu and re.fullmatch(r"[\w/]+", group) else []


ELSEWHERE = {  # options of other frameworks
    "dp": "did you mean data_parallel?",
    "model_checkpoint": "callbacks.checkpoint.* is on by default",
    **dict.fromkeys(("lr_monitor", "learning_rate_monitor"), "step/lr is always logged"),
    **dict.fromkeys(
        ("model_summary", "rich_progress_bar", "tqdm_progress_bar"), "callbacks=default shows it"
    ),
}
OF_A_RECIPE = {  # of its newest run; what else one may type
    "resume=last": "a run: resume=DIR",
    "checkpoint=best": "a file: checkpoint=FILE",
    "checkpoint=last": "a file: checkpoint=FILE",
}
NO_PACKAGE = "its first line must be '# @package _global_'"
OUTSIDE = (
    "{0} is outside of the config folders; put it into one of them, or name its folder by "
    "--config-dir=DIR"
)
SET = "{0} is not set; set {0}=VALUE"
TAKEN = "{0} has a value already; write {0}=… without the +"
# What Hydra, OmegaConf or YAML says, after the type of the error, and what we say.
TEXTS: tuple[tuple[str, str | Callable[[_Mistake, re.Match[str]], str]], ...] = (
    ("^", _Mistake.yaml),
    (
        "^RecursionError",
        "the config files name each other in a circle; leave one out of the defaults",
    ),
    ("^OverrideParseException", _Mistake.unreadable),
    ("^MissingConfigException", _Mistake.no_option),
    (r"You must specify '([\w/@.]+)'", _Mistake.not_chosen),
    ("Config group override must be", _Mistake.no_name),
    (
        "Could not delete '(task|data)'",
        "~{0}: every recipe has one; set its keys, as {0}.KEY=VALUE",
    ),
    (
        "Ambiguous value for argument '(([^=]+)=(.+))'",
        "{0}: several values are a sweep, which needs -m; for one list write {1}=[{2}], for one "
        "text \"{1}='{2}'\"",
    ),
    ("already at '([^']+)'", TAKEN),
    (r"Multiple values for ([^.]+)\. .* 'override .*: (.*)'", _Mistake.chosen_twice),
    (r"Multiple values for ([^.]+)\.", TAKEN),
    (r"to string: '{}'\s+full_key: recipe", "there is no key in it"),
    (r"to string: '{.*\s+full_key: recipe", NO_PACKAGE),
    (r"In '(\w+)/.*\s+Key '\1' not in", NO_PACKAGE),
    (
        "Expected header format: .* got '@package'",
        "a config file has the line '# @package'; write '# @package _global_'",
    ),
    (r"(?:Could not (?:override|append to)|delete from config\.) '([^']+)'", _Mistake.no_key),
    (r"Key '.+' not in '\w+'.*\s+full_key: (\S+)", _Mistake.no_key),
    ("No earlier Group Default for '([^']+)'", _Mistake.no_key),
    (r"Parent traversal .* \('([^']+)'\)", OUTSIDE),
    ("Interpolation key '([^']+)' not found", _Mistake.no_such_reference),
    (r"while resolving.* Missing mandatory value: (\S+)", SET),
    (r"Missing mandatory value: .*\s+full_key: (\S+)", SET),
    (r"Value '{}' of type 'dict'.*\s+full_key: (\S+)", "{0} is one value, with nothing in it"),
    (r"list index out of range\s+full_key: ([^\s\[]+)", "{0} is a list; set all of it, as {0}=[…]"),
    ("Value '(?P<value>.*)' of type '(?P<kind>.+?)'", _Mistake.misfit),
    (r"Value '(?P<value>.*)' is not a valid bool \(type (?P<kind>\w+)\)", _Mistake.misfit),
    (r"Invalid value assigned: (?P<kind>\w+) is not a ListConfig", _Mistake.misfit),
    (r"Cannot convert '(?P<kind>\w+)' to string: '(?P<value>.*)'", _Mistake.misfit),
    (r"Cannot assign (?P<kind>\w+) to ", _Mistake.misfit),
    ("field '.*' is not Optional|Incompatible value 'None'", _Mistake.misfit),
    (r"NoneType is not a subclass of (?:str|int)\.", _Mistake.null_item),
    (r"is not a subclass of (\w+)\. value: (.*)", _Mistake.no_group),
)
