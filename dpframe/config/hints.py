"""Where a key that is not in the config may be meant: a hint that leads somewhere.

Configs are plain containers here, and no class is asked what it takes: that would import torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpframe.config import modes
from dpframe.config.keys import SCALE, SCALE_KEYS, at, has, known_part
from dpframe.config.schema import OPEN, PARTS, SWITCHED, SWITCHES, WHOLE
from dpframe.errors import nearest, suggestion

LATER = ("optimizer", "scheduler")  # what the Task makes of a part
TABLES = ("task.metrics", "task.optimizer.groups")  # of what a user names, with no class themselves


def hint(
    config: Mapping[str, Any], key: str, offers: Sequence[str] = (), parts: Sequence[str] = ()
) -> str:
    """'did you mean trainer.gpus?' for `trainer.gpu`; for a known part, what is in it.

    `offers` are the options that bring a key so named, e.g. callbacks=early_stopping; `parts` are
    the callbacks or loggers that options bring, for a key of these groups.
    """
    if "/" in key:  # which is for groups
        dotted = key.replace("/", ".")
        return f"did you mean {dotted}?" if has(config, dotted) else hint(config, dotted, offers)
    group, _, name = key.partition(".")
    if name in parts:
        return f"{group}={name} brings it, and {key}=false switches it off"
    known, node = known_part(config, key)
    if not isinstance(node, dict) or ".".join(known) == SCALE:
        return _without_keys(".".join(known), node, key)
    if place := _in_other_places(config, key, known, offers):
        return place
    return _in_group(node, key, known, parts) if known else _at_the_top(config, key)


def _without_keys(here: str, node: Any, key: str) -> str:
    """`here` is a value, and the key would be below it."""
    if isinstance(node, list):
        return f"{here} is a list; set all of it, as {here}=[…]"
    if here == SCALE:
        return suggestion(key.rpartition(".")[2], SCALE_KEYS).replace("mean ", f"mean {here}.")
    if node is not None:
        return f"{here} is one value, with nothing in it"
    if _is_open(key):
        return _class_first(here, key)
    return f"{here} is null; set all of it, as {here}=…"


def _in_other_places(
    config: Mapping[str, Any], key: str, known: list[str], offers: Sequence[str]
) -> str:
    """Where such a name is: in this config, or with another option."""
    head, name = key.split(".")[0], key.rpartition(".")[2]
    if brings_it := [each for each in offers if each.endswith(f" {key}")]:
        return f"{brings_it[0].split()[0]} has it"
    meant = [] if name == "_target_" else elsewhere(config, name)  # which each part has
    if meant := meant or ([] if known else elsewhere(config, head)):
        return f"did you mean {' or '.join(meant)}?"
    if known == ["trainer"] and name in config:  # e.g. strategy, an argument of other Trainers
        return f"did you mean {name}?"
    return " has ".join(offers[0].split()) if offers else ""


def _in_group(node: dict[str, Any], key: str, known: list[str], parts: Sequence[str]) -> str:
    """The nearest name in the group that is `known`, or how a key is added to it."""
    here = ".".join(known)
    given, *below = key.split(".")[len(known) :] or [key.rpartition(".")[2]]
    there = [str(each) for each in node if str(each)[0] != "_"]
    there += [part for part in parts if here in SWITCHED and not below]
    if "_args_" in node and not there:
        return f"its parts are the list {here}._args_"
    near = suggestion(given, there).replace("mean ", f"mean {here}.")
    if near.startswith("did") or not _is_open(key):
        return near
    if here in SWITCHED:
        return f"+{here}.{given}._target_=… adds it"
    if not below:
        return f"+{key}=… adds it" + (", if its class takes it" if "_target_" in node else "")
    return _class_first(f"{here}.{given}", key)


def elsewhere(config: Mapping[str, Any], name: str) -> list[str]:
    """The whole keys that end so; those that are nearest to the top."""
    whole = WHOLE.get(name, "")
    if "=" in whole or (whole and isinstance(at(config, whole.rpartition(".")[0]), dict)):
        return [whole]
    last = whole.rpartition(".")[2] or name
    found = [f"{where}{last}" for where, node in _groups(config) if where and last in node]
    least = min((key.count(".") for key in found), default=0)
    return [key for key in found if key.count(".") == least][:3]


def _is_open(key: str) -> bool:
    """Whether a user adds keys there."""
    return key.split(".")[0] in (*PARTS, *OPEN)


def _at_the_top(config: Mapping[str, Any], key: str) -> str:
    """None of its parts is there; the last one may be that of another group."""
    head, name = key.split(".")[0], key.rpartition(".")[2]
    if head in modes.UNINSTALLED and head not in modes.names():
        return modes.UNINSTALLED[head]
    if name in WHOLE:
        return f"nothing in this config has {name}"
    if head in SWITCHES:
        return f"did you mean {SWITCHES[head]}?"
    names = {*config, *WHOLE, *(str(key) for _, node in _groups(config) for key in node)}
    for word in dict.fromkeys((head, name)):
        near = nearest(word, names, cutoff=0.7)
        if meant := [near] if near in config else elsewhere(config, near):
            return f"did you mean {' or '.join(meant)}?"
    return f"there is: {', '.join(sorted(config))}"


def _class_first(part: str, key: str) -> str:
    if part in TABLES:
        return f"+{key}=… adds it"
    words = [f"+{part}._target_=…", f"+{key}=…"]
    words[1:1] = [f"+{part}._partial_=true"] * (part.rpartition(".")[2] in LATER)
    return f"{part} has no class; name it, too: {' '.join(dict.fromkeys(words))}"


def _groups(node: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each group of keys with its prefix, but for Hydra's; none in a list can be overridden."""
    if isinstance(node, dict) and where != "hydra.":
        yield where, node
        for key, value in node.items():
            yield from _groups(value, f"{where}{key}.")
