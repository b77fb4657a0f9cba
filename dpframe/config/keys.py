"""Which keys a config has, and which its parts may take besides.

Configs are plain containers here, and no class is asked what it takes: that would import torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from dpframe.trainer.settings import ScaleSettings

SCALE = "task.scale_lr"  # no part, but it has keys, also while it is null
SCALE_KEYS = [field.name for field in fields(ScaleSettings)]
COMPLETE = tuple(  # files list all that these take
    f"dpframe.{part}." for part in ("strategies", "callbacks", "loggers", "schedules")
)


def has(config: Mapping[str, Any], key: str) -> bool:
    """Whether there is such a key, even if it is null or ???."""
    return len(known_part(config, key)[0]) == len(key.split("."))


def may_take(config: Mapping[str, Any], key: str) -> bool:
    """Whether a part's class may take a key that no file sets: it is asked when it is imported."""
    above, _, name = key.rpartition(".")
    if above == SCALE:
        return name in SCALE_KEYS
    node = at(config, above)
    path = node.get("_target_") if isinstance(node, dict) and "_args_" not in node else None
    return isinstance(path, str) and not path.startswith(COMPLETE)


def at(config: Mapping[str, Any], key: str) -> Any:
    """None where there is no such key."""
    return (known_part(config, key)[1] if has(config, key) else None) if key else config


def dotted(node: Mapping[Any, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Every value below a node with its dotted key; a list is one value, and so is `{}`."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from dotted(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


def known_part(config: Mapping[str, Any], key: str) -> tuple[list[str], Any]:
    """The longest existing prefix of the key, and its value."""
    node: Any = config
    there: list[str] = []
    for part in key.split("."):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            break
        there.append(part)
    return there, node
