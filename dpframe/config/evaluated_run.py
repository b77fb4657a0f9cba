"""Compares an evaluation with the run of its checkpoint: what differs is typed, or refused."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dpframe.config import modes
from dpframe.config.compose import Composed
from dpframe.config.earlier_run import LIMITS, refuse_recipe
from dpframe.config.overrides import key_of
from dpframe.config.schema import TOP_LEVEL
from dpframe.data import DataModule
from dpframe.errors import UserError
from dpframe.task import Task
from dpframe.trainer.resume import fingerprint
from dpframe.values import shown

OF_TRAINING = (  # no evaluation depends on these
    "task.optimizer",
    "task.optimizers",
    "task.scale_lr",
    "task.schedule",
    "task.scheduler",
    "data.batch_size",
    "data.drop_last",
    "data.eval_batch_size",
    "data.input",
    "data.length",
    "data.persistent_workers",
    "data.pin_memory",
    "data.shuffle",
    "data.workers",
)
OF_FIT = ("callbacks", "logger", "trainer.max_epochs", "trainer.max_steps", *LIMITS)
DECIDING = ("task", "data", "seed", "trainer.precision")


def describe_differences(
    job: Composed, state: Mapping[str, Any], *, task: Task, data: DataModule
) -> list[str]:
    """The lines to log: the run's overrides, and each value that is typed differently here."""
    what = f"checkpoint={job.start}"
    theirs = _fingerprint(what, state)
    if "task._target_" not in theirs:  # made from Python, without a config
        return []
    differences = find_differences(job, state, DECIDING)
    brought = " ".join(_brought(job))
    lines = [f"with its run's {brought}"] if brought else []
    lines += [
        f"its run had {key}={shown(then)}, this one has {key}={shown(now)}"
        for key, (then, now) in differences.items()
    ]
    codes = fingerprint.of_code(task, data)
    lines += [f"{key} has changed since its run" for key in codes if theirs.get(key) != codes[key]]
    return [f"{what}: {line}" for line in lines]


def find_differences(
    job: Composed, state: Mapping[str, Any], deciding: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    """The values of the run and of this one, where they differ below `deciding` keys.

    Refuses what was not typed here.
    """
    what = f"checkpoint={job.start}"
    theirs, ours = _fingerprint(what, state), fingerprint.leaves_of_config(job.config, job.public)
    if "task._target_" not in theirs:
        return {}
    if state.get("recipe") not in ("", None, job.settings.recipe):
        refuse_recipe(str(job.start), str(state["recipe"]), job.settings.recipe)
    ours |= {"seed": job.settings.seed, "trainer.precision": job.settings.trainer.precision}
    keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    keys = [key for key in keys if _is_below(key, deciding) and not _is_below(key, OF_TRAINING)]
    untyped = [key for key in keys if not _is_typed(key, theirs, ours, job)]
    if untyped:
        differences = "; ".join(
            f"{key}={shown(theirs.get(key))} there, {shown(ours.get(key))} here" for key in untyped
        )
        raise UserError(
            f"{what}: its run had another config: {differences}; type what it had, or what you "
            "want instead"
        )
    return {key: (theirs.get(key), ours.get(key)) for key in keys}


def _fingerprint(what: str, state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        fingerprint = json.loads(state.get("fingerprint", "{}"))
    except (TypeError, ValueError):
        fingerprint = None
    if not isinstance(fingerprint, dict):
        raise UserError(f"{what} is damaged: its fingerprint can't be read; use another one")
    return fingerprint


def _is_below(key: str, names: Sequence[str]) -> bool:
    return any(re.fullmatch(rf"{re.escape(name)}([.\[].*)?", key) for name in names)


def _is_typed(key: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], job: Composed) -> bool:
    """Itself or a part that it is in; or what others refer to: the seed, vars, a group of files.

    A value from the environment counts as typed.
    """
    if fingerprint.is_hidden(ours.get(key)):
        return True
    typed = [key_of(override) for override in job.typed]
    is_seed = all(key in run and run[key] == run.get("seed") for run in (theirs, ours))
    if _is_below(key, typed) or ("seed" in typed and is_seed):
        return True
    groups = [name for name in typed if "." not in name and name not in TOP_LEVEL]
    return bool(groups) or any(name.split(".")[0] == "vars" for name in typed)


def _brought(job: Composed) -> list[str]:
    """What of the run's own overrides an evaluation may depend on."""
    typed = {"recipe", *map(key_of, job.typed)}
    saved = [override for override in job.overrides if key_of(override) not in typed]
    return [o for o in saved if not _is_below(key_of(o), (*OF_TRAINING, *OF_FIT, *modes.names()))]
