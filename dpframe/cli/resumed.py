"""What goes on with a run, or evaluates it, has its overrides, below those that are typed now."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from dpframe.cli.settings import EVALUATIONS
from dpframe.cli.start import checkpoint_file, resumed_directory, resumed_file
from dpframe.errors import UserError

KEY = r"(\+\+?|~)?[A-Za-z_][^\s=]*(=|$)"
OF_ONE_START = ("resume", "resume_anyway", "checkpoint", "mode")
OF_ITS_OWNER = ("trusted_modules",)  # a directory from a stranger must not vouch for itself
OF_ITS_MACHINE = (  # an evaluation has the same numbers on another one
    "strategy",
    "trainer.gpus",
    "trainer.accelerator",
    "trainer.max_replicas_per_core",
    "trainer.max_restarts",
    "trainer.threads",
    "trainer.data_on_device",
)
LIMIT = "trainer.limit_eval_batches"  # a short run's; an evaluation is of all rows


def with_saved(overrides: Sequence[str], runs: Callable[[], Path]) -> list[str]:
    """`runs` tells where this recipe's runs are: it is asked only for `resume=last`."""
    resume, checkpoint = value_of("resume", overrides), value_of("checkpoint", overrides)
    if resume is not None:
        start = resumed_file(resume, runs() if resume == "last" else Path())
        saved = _saved(start)
        return [*(each for each in saved if _is_kept(each, saved, overrides)), *overrides]
    if checkpoint is not None and value_of("mode", overrides) in EVALUATIONS:
        return with_saved_of(checkpoint, overrides)
    return list(overrides)


def with_saved_of(checkpoint: str, overrides: Sequence[str]) -> list[str]:
    """An evaluation has the config of its checkpoint's run, but for where that ran."""
    saved = _saved(checkpoint_file(checkpoint))
    there, here = value_of("recipe", saved), value_of("recipe", overrides)
    if there is not None and here is not None and there != here:
        refuse_recipe(checkpoint, there, here)
    kept = [each for each in saved if _is_evaluated(each, saved, overrides)]
    if value_of("experiment", kept) is not None:  # which may set one: `experiment=debug` does
        kept.append(f"{LIMIT}=null")
    return [*kept, *overrides]


def refuse_recipe(checkpoint: str, there: str, here: str) -> NoReturn:
    raise UserError(
        f"checkpoint={checkpoint} is of a run with recipe={there}, not recipe={here}; "
        f"use recipe={there}, or name a checkpoint of recipe={here}"
    )


def value_of(key: str, overrides: Sequence[str]) -> str | None:
    """What is typed for a key, without quotes; None: nothing, or null."""
    values = [o.partition("=")[2].strip("\"'") for o in overrides if key_of(o) == key]
    return values[-1] if values and values[-1] not in ("null", "") else None


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _is_kept(override: str, saved: Sequence[str], typed: Sequence[str]) -> bool:
    key = key_of(override)
    if re.split(r"[^\w]", key)[0] in (*OF_ONE_START, *OF_ITS_OWNER, "hydra"):
        return False
    if key.startswith("strategy."):  # another strategy has other keys
        chosen = [o for o in typed if key_of(o) == "strategy"]
        return key not in map(key_of, typed) and all(o in saved for o in chosen)
    same = [o for o in typed if key_of(o) == key]
    is_added = override.startswith("+") and "." in key  # and is to be there for what changes it
    return not same or (is_added and not any(o.startswith("+") for o in same))


def _is_evaluated(override: str, saved: Sequence[str], typed: Sequence[str]) -> bool:
    key = key_of(override)
    group = key.partition(".")[0]
    if key in (*OF_ITS_MACHINE, LIMIT) or group == "strategy":
        return False
    is_of_other = group != key and group in map(key_of, typed)  # callbacks=none has other keys
    return not is_of_other and _is_kept(override, saved, typed)


def _saved(start: Path) -> list[str]:
    directory = resumed_directory(start)
    path = directory and directory / ".hydra" / "overrides.yaml"
    if path is None or not path.is_file():
        return []
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8", errors="surrogateescape")) or []
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} can't be read: {str(error).splitlines()[0]}") from None
    # Lists in lists could be made much of by a few bytes.
    if not isinstance(saved, list) or any(isinstance(each, list | dict) for each in saved):
        raise UserError(f"{path} is no list of overrides; fix it, or remove it")
    overrides = [str(override).strip() for override in saved]
    strange = next((each for each in overrides if not re.match(KEY, each)), None)
    if strange is not None:
        raise UserError(f"{path}: {strange!r} is no override; fix it, or remove the file")
    return overrides
