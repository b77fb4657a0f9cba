"""Overrides as text: `trainer.gpus=4`."""

from collections.abc import Sequence

import yaml


def value_of(key: str, overrides: Sequence[str]) -> str | None:
    """What is typed for a key, without quotes; None: nothing, or null."""
    values = [o.partition("=")[2].strip("\"'") for o in overrides if key_of(o) == key]
    return values[-1] if values and values[-1] not in ("null", "") else None


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def as_notes(overrides: Sequence[str]) -> str:
    """Overrides as Hydra writes them, but quoted where YAML would not read text."""
    return yaml.safe_dump(list(overrides), allow_unicode=True, width=float("inf"))
