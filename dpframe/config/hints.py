"""Where a key that is not in the config may be meant: a hint that leads somewhere."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpframe.config import modes
from dpframe.config.locate import parameters_of
from dpframe.config.schema import WHOLE
from dpframe.errors import nearest, suggestion
from dpframe.trainer.settings import ScaleSettings

PARTS = ("callbacks", "logger")  # of which each has a class
DONE_BY = {"fast_dev_run": "experiment=debug", "overfit_batches": "experiment=overfit"}
OPEN = ("task", "data", "callbacks", "logger", "strategy", "vars")  # where a user adds keys
SCALE = "task.scale_lr"  # no part, but it has keys, also while it is null
SCALE_KEYS = [field.name for field in fields(ScaleSettings)]
LATER = ("optimizer", "scheduler")  # what the Task makes of a part


def hint(config: Any, key: str, offers: Callable[[str], list[str]] | None = None) -> str:
    """'did you mean trainer.gpus?' for `trainer.gpu`; for a known part, what is in it.

    `offers` tells which options of a group bring a key, e.g. callbacks=early_stopping.
    """
    known, node = _known(config, key)
    here = ".".join(known)
    parts = key.split(".")
    if isinstance(node, list):
        return f"{here} is a list; set all of it, as {here}=[…]"
    if here == SCALE:
        return suggestion(parts[-1], SCALE_KEYS).replace("mean ", f"mean {SCALE}.")
    if known and node is None and parts[0] in OPEN and parts[-1] != "_target_":
        return _named(here, key)
    if known and not isinstance(node, dict) and node is not None:
        return f"{here} is one value, with nothing in it"
    options = [] if offers is None else offers(key)
    if brings_it := [each for each in options if each.endswith(f" {key}")]:
        return f"{brings_it[0].split()[0]} has it"
    if meant := elsewhere(config, parts[-1]):
        return f"did you mean {' or '.join(meant)}?"
    if parts[-1] in DONE_BY:
        return f"{DONE_BY[parts[-1]]} does that"
    if options:
        return " has ".join(options[0].split())
    node = node if isinstance(node, dict) else {}
    names, is_all = parameters_of_node(node)
    given, *below = parts[len(known) :] or parts[-1:]
    if below and given in names:
        return _named(f"{here}.{given}", key)
    there = [str(name) for name in node if name != "hydra" and str(name)[0] != "_"]
    if "_args_" in node and not {*there, *names}:
        return f"its parts are the list {here}._args_"
    near = suggestion(given, {*there, *names})
    head, name = parts[0], ".".join(parts[1:2])
    if not near.startswith("did") and head in OPEN:
        if head in PARTS and not OmegaConf.select(config, f"{head}.{name}"):
            return f"+{head}.{name}._target_=… adds it"
        if head == "vars" or not is_all:
            return f"+{key}=… adds it" + ("" if head == "vars" else ", if its class takes it")
    return near.replace("mean ", f"mean {here}." if here else "mean ")


def elsewhere(config: Any, name: str) -> list[str]:
    """The whole keys that are called so, or are a part's argument; those that are nearest to the
    top."""
    plain: Any = OmegaConf.to_container(config)
    if name.startswith("_"):
        return []
    whole = WHOLE.get(name, "")
    if whole and (has(config, whole) or is_taken(config, whole)):
        return [whole]
    last = whole.rpartition(".")[2] or name
    found = [key for key in _keys(plain, last) if not key.startswith("hydra.")]
    least = min((key.count(".") for key in found), default=0)
    return [key for key in found if key.count(".") == least][:3]


def similar(config: Any, name: str, heads: Iterable[str]) -> list[str]:
    """The whole keys whose last part, or which themselves, are spelt like this."""
    plain: Any = OmegaConf.to_container(config)
    names = {*WHOLE, *_names({key: value for key, value in plain.items() if key != "hydra"})}
    near = nearest(name, {*heads, *names}, cutoff=0.7)
    return [near] if near in heads else elsewhere(config, near) if near else []


def has(config: DictConfig, key: str) -> bool:
    """Whether there is such a key, even if it is null or ???."""
    return len(_known(config, key)[0]) == len(key.split("."))


def is_taken(config: DictConfig, key: str) -> bool:
    """Whether a part's class, or a package's mode, takes a key that no file sets."""
    if modes.of_package(key):
        return True
    above, _, name = key.rpartition(".")
    known, node = _known(config, above)
    names = SCALE_KEYS if above == SCALE else parameters_of_node(node)[0]
    return ".".join(known) == above and name in names


def parameters_of_node(node: Any) -> tuple[list[str], bool]:
    """The arguments that a part's class takes, as its source says, without those that it gets by
    position or later; and whether these are all."""
    path = node.get("_target_") if isinstance(node, Mapping) else None
    if not isinstance(path, str):
        return [], False
    names, is_all = parameters_of(path)
    if path.startswith("torch.optim.") and "lr" in names:
        names = [*names, "groups"]  # which the Task takes out
    return names[len(node.get("_args_") or ()) + bool(node.get("_partial_")) :], is_all


def _named(part: str, key: str) -> str:
    words = [f"+{part}._target_=…", f"+{key}=…"]
    words[1:1] = [f"+{part}._partial_=true"] * (part.rpartition(".")[2] in LATER)
    return f"{part} is null; name its class, too: {' '.join(words)}"


def _keys(node: Any, name: str, where: str = "") -> Iterator[str]:
    """The keys in a tree of dicts that end with this name; none in a list can be overridden."""
    if not isinstance(node, dict):
        return
    if where and name not in node and name in parameters_of_node(node)[0]:
        yield f"{where}{name}"
    for key, value in node.items():
        if key == name and where:
            yield f"{where}{key}"
        yield from _keys(value, name, f"{where}{key}.")


def _names(node: Any) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else ():
        yield str(key)
        yield from _names(value)


def _known(config: Any, key: str) -> tuple[list[str], Any]:
    """The longest existing prefix of the key, and its value."""
    node, known = OmegaConf.to_container(config), []
    for part in key.split("."):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            break
        known.append(part)
    return known, node
