"""Overrides as text: `trainer.gpus=4`."""

import re
from collections.abc import Sequence

import yaml

from dpframe.config.schema import OFF, SWITCHED

VALUES = ("null", "true", "false", "nan", "inf")  # words that Hydra takes for no text, in any case


def value_of(key: str, overrides: Sequence[str]) -> str | None:
    """What is typed for a key, without quotes; None: nothing, or null."""
    values = [o.partition("=")[2].strip("\"'") for o in overrides if key_of(o) == key]
    return values[-1] if values and values[-1] not in ("null", "") else None


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def is_switch(override: str) -> bool:
    """Whether it switches a callback or a logger off."""
    group, _, name = key_of(override).partition(".")
    is_off = override.partition("=")[2].lower() in OFF  # a sweep writes False
    return group in SWITCHED and bool(re.fullmatch(r"[\w-]+", name)) and is_off


def as_notes(overrides: Sequence[str]) -> str:
    """Overrides as Hydra writes them, but quoted where YAML would not read text."""
    return yaml.safe_dump(list(overrides), allow_unicode=True, width=float("inf"))
