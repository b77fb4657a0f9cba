"""`--help TOPIC`: the settings of a group, of an option or below a key, with their comments."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from dpframe.config import modes, plugins
from dpframe.config.help import first_comment
from dpframe.config.hints import parameters_of_node
from dpframe.config.locate import see_own_folders
from dpframe.config.schema import shown
from dpframe.config.search import Configs
from dpframe.config.start import key_of
from dpframe.errors import UserError, first_line, suggestion

WIDEST = 44  # columns of a setting, for the comments to begin in one
UNTOLD = ("defaults", "_partial_")
OF_KEYS = ("trainer", "callbacks", "logger", "strategy")  # groups in which a key is looked up


class Setting(NamedTuple):
    key: str
    value: str  # as the file has it; "" for a part of the config
    comment: str

    @property
    def text(self) -> str:
        """The setting as typed; a group of keys has only its name."""
        return f"{self.key}={self.value}" if self.value else self.key


class Option(NamedTuple):
    comment: str  # the first one of its file
    settings: list[Setting]
    more: dict[str, list[str]]  # what the classes of its parts take besides


def settings_of(topic: str, configs: Configs) -> str:
    """The help of e.g. `trainer`, `strategy`, `strategy=ddp`, `ddp`, `trainer.gpus` or `seed`."""
    groups = configs.groups()
    group, _, option = topic.partition("=")
    if group in groups and option:
        if option not in configs.options(group):
            near = suggestion(option, configs.options(group))
            raise UserError(f"--help {topic}: there is no such {group}; {near}")
        return _option(group, option, configs)
    if group == "recipe":
        recipes = [_headed(group, each, configs) for each in configs.options(group)]
        return "\n".join([*recipes, "", "dpframe --help recipe=NAME shows the settings of one"])
    if group in groups:
        return "\n\n".join(_option(group, each, configs) for each in configs.options(group))
    of = {option: group for group in reversed(groups) for option in configs.options(group)}
    if topic in of:
        return _option(of[topic], topic, configs)
    key, settings = key_of(topic), _all(configs)
    below = [each for name, each in settings.items() if f"{name}.".startswith(f"{key}.")]
    if not below:
        near = suggestion(key, {*groups, *of, *settings})
        there = near if near.startswith("did") else f"there is: {', '.join(groups)}"
        raise UserError(f"--help {topic}: there is no such group, option or key; {there}")
    return _lines(below)


def option_of(group: str, option: str, configs: Configs) -> Option:
    text, prefix = _text(group, option, configs)
    more = {}
    for where, node in _parts(yaml.safe_load(text) or {}, prefix):
        see_own_folders(str(node["_target_"]).split(".")[0], configs.folder)
        more[where] = [name for name in parameters_of_node(node)[0] if name not in node]
    return Option(first_comment(text), list(_settings(text, prefix)), more)


def top_level() -> list[Setting]:
    """The settings of conf/config.yaml, which belong to no group."""
    text = files("dpframe.conf").joinpath("config.yaml").read_text(encoding="utf-8")
    return list(_settings(text, ""))


def _of_packages() -> Iterator[Setting]:
    """The settings of the modes of packages."""
    for mode in filter(modes.of_package, modes.names()):
        yield Setting(mode, "", modes.about(mode))
        with suppress(UserError):  # it is broken
            for name, default, comment in modes.described(mode):
                yield Setting(f"{mode}.{name}", shown(default), comment)


def _option(group: str, option: str, configs: Configs) -> str:
    found = option_of(group, option, configs)
    lines = [_headed(group, option, configs), _lines(found.settings)]
    lines += [f"  {part} also takes {', '.join(more)}" for part, more in found.more.items() if more]
    return "\n".join(filter(None, lines))


def _headed(group: str, option: str, configs: Configs) -> str:
    first = first_comment(_text(group, option, configs)[0])
    return f"{group}={option}  {first}".rstrip()


def _all(configs: Configs) -> dict[str, Setting]:
    settings = [*top_level(), *_of_packages()]
    for group in OF_KEYS:
        for option in configs.options(group):
            settings += _settings(*_text(group, option, configs))
    found: dict[str, Setting] = {}
    for setting in settings:
        found.setdefault(setting.key, setting)
    return found


def _text(group: str, option: str, configs: Configs) -> tuple[str, str]:
    """The text of an option's file, and the prefix of its keys in the config."""
    path = plugins.files_of(group, option, configs.folder)[0][1]
    text = path.read_text(encoding="utf-8", errors="replace")
    is_global = re.search(r"^# *@package +_global_ *$", text, re.MULTILINE)
    return text, "" if is_global else f"{group.replace('/', '.')}."


def _settings(text: str, prefix: str) -> Iterator[Setting]:
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(f"broken YAML: {first_line(error)}") from None
    if isinstance(root, yaml.MappingNode):
        yield from _below(root, prefix, text)


def _below(node: yaml.MappingNode, prefix: str, text: str) -> Iterator[Setting]:
    for name, value in node.value:
        if name.value in UNTOLD:
            continue
        key = f"{prefix}{name.value}"
        if isinstance(value, yaml.MappingNode) and not value.flow_style and value.value:
            if comment := _comment(text, name.end_mark):
                yield Setting(key, "", comment)
            yield from _below(value, f"{key}.", text)
            continue
        source = text[value.start_mark.index : value.end_mark.index].strip()
        is_long = "\n" in source
        comment = _comment(text, name.end_mark if is_long else value.end_mark)
        yield Setting(key, "[…]" if is_long else source or "null", comment)


def _comment(text: str, mark: Any) -> str:
    """The comment at the end of the line of `mark`."""
    found = re.search(r"(?:^|\s)#\s*(.*)", text[mark.index :].partition("\n")[0])
    return found[1].strip() if found else ""


def _parts(node: Any, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(node, dict):
        return
    if isinstance(node.get("_target_"), str):
        yield prefix.rstrip("."), node
    for name, value in node.items():
        yield from _parts(value, f"{prefix}{name}.")


def _lines(settings: Iterable[Setting]) -> str:
    settings = list(settings)
    width = max((len(each.text) for each in settings if len(each.text) <= WIDEST), default=0)
    return "\n".join(f"  {each.text:<{width}}  {each.comment}".rstrip() for each in settings)
