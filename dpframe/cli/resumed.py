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
    taken = {*map(_key, overrides), *OF_ONE_START, *OF_ITS_OWNER}
    kept = [o for o in saved if _key(o) not in taken and not _key(o).startswith("hydra")]
    return [*kept, *overrides]


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
