"""What the overrides of a run directory may not do: call, send or read something.

A run directory is data, maybe a stranger's: its user types such overrides again.
"""

import copy
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpframe.config.overrides import is_switch, key_of
from dpframe.errors import UserError

TYPED_AGAIN = ("data.input", "strategy.storage")
LOCAL_LOGGERS = {"tensorboard", "csv", "none", "null"}  # which send nothing away


def refuse_calls(saved: Sequence[str], what: str) -> None:
    """`saved` are overrides of a directory, which are taken unless they are typed again."""
    if calls := [override for override in saved if must_be_typed(override)]:
        raise UserError(
            f"{what}: some of its overrides choose what code is called, or what is read, written "
            "or sent, and these are not taken from a run directory; if they are yours, type them "
            f"again: {shlex.join(calls)}"
        )


def must_be_typed(override: str) -> bool:
    """Whether an override of a directory may name something to call, or says where files or numbers
    go or what is read."""
    if re.search(r"_target_|_args_|[$@]", override):
        return True
    key, words = key_of(override), set(re.findall(r"\w+", override.partition("=")[2]))
    if key == "logger":
        return not words <= LOCAL_LOGGERS
    if key == "strategy":
        return "ray" in words
    group, _, below = key.partition(".")
    if group == "logger" and not is_switch(override):
        return below.partition(".")[0] not in LOCAL_LOGGERS
    return key in TYPED_AGAIN


def refuse_calls_by_reference(
    config: DictConfig, filled: Any, texts: Any, keys: Iterable[str], what: str
) -> None:
    """Refuses a `_target_` that a `${…}` in our own files takes from a directory's overrides: with
    their `keys` set to `???` it no longer resolves to the same.

    `filled` is the config with each `${…}` filled in, `texts` without.
    """
    there, written = calls_in(filled), calls_in(texts)
    by_reference = [key for key in there if there[key] != written.get(key)]
    if by_reference:
        config = copy.deepcopy(config)
        for key in sorted(keys, key=len, reverse=True):  # what is below another one first
            OmegaConf.update(config, key, "???", force_add=True)
    for key in by_reference:
        if OmegaConf.select(config, key, throw_on_resolution_failure=False) != there[key]:
            raise UserError(
                f"{what}: its overrides make {key}={there[key]}, which is not taken from a run "
                f"directory; if you mean it, type it: {key}={there[key]}"
            )


def calls_in(config: Any) -> dict[str, Any]:
    """Each `_target_` by its key."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        where, node = waiting.pop()
        if where.endswith("._target_"):
            found[where[1:]] = node
        elif isinstance(node, dict | list):
            pairs = node.items() if isinstance(node, dict) else enumerate(node)
            waiting += [(f"{where}.{name}", value) for name, value in pairs]
    return found
