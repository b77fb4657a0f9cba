"""A resumed run has the overrides that it was begun with, below those that are given now."""

from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from dpframe.cli.start import resumed_directory, resumed_file
from dpframe.errors import UserError

OF_ONE_START = ("resume", "resume_anyway", "checkpoint", "mode")
OF_ITS_OWNER = ("trusted_modules",)  # a directory from a stranger must not vouch for itself


def with_saved(overrides: Sequence[str], runs: Callable[[], Path]) -> list[str]:
    """`runs` tells where this recipe's runs are: it is asked only for `resume=last`."""
    resume = next((o.partition("=")[2] for o in overrides if _key(o) == "resume"), "null")
    resume = resume.strip("\"'")
    if resume in ("null", ""):
        return list(overrides)
    start = resumed_file(resume, runs() if resume == "last" else Path())
    directory = resumed_directory(start)
    saved = _saved(directory / ".hydra" / "overrides.yaml") if directory else []
    return [*(override for override in saved if _is_kept(override, saved, overrides)), *overrides]


def _is_kept(override: str, saved: Sequence[str], given: Sequence[str]) -> bool:
    key = _key(override)
    if key in (*OF_ONE_START, *OF_ITS_OWNER) or key.startswith("hydra"):
        return False
    if key.startswith("strategy."):  # another strategy has other keys
        chosen = [o for o in given if _key(o) == "strategy"]
        return key not in map(_key, given) and all(o in saved for o in chosen)
    same = [o for o in given if _key(o) == key]
    is_added = override.startswith("+") and "." in key  # and is to be there for what changes it
    return not same or (is_added and not any(o.startswith("+") for o in same))


def _saved(path: Path) -> list[str]:
    if not path.is_file():
        return []
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8", errors="surrogateescape")) or []
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path} can't be read: {str(error).splitlines()[0]}") from None
    if not isinstance(saved, list):
        raise UserError(f"{path} is no list of overrides; mend it, or remove it")
    return [str(override) for override in saved]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
