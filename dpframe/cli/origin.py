"""What a checkpoint's own run had and its evaluation has not is typed, or refused."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dpframe.cli.compose import Composed, quoted
from dpframe.cli.resumed import LIMIT, key_of, refuse_recipe
from dpframe.cli.settings import TOP_LEVEL, shown
from dpframe.errors import UserError
from dpframe.trainer import Trainer, fingerprint

OF_TRAINING = (  # no evaluation depends on these
    "task.optimizer",
    "task.optimizers",
    "task.scheduler",
    "data.batch_size",
    "data.shuffle",
    "data.workers",
)
OF_FIT = ("callbacks", "logger", "plan", "trainer.max_epochs", "trainer.max_steps", LIMIT)
DECIDING = ("task", "data", "seed", "trainer.precision")


def compared(job: Composed, trainer: Trainer, state: Mapping[str, Any]) -> list[str]:
    """What to tell: the run's overrides, and all that is another value here because it is typed."""
    what = f"checkpoint={job.start}"
    there, here = _fingerprint(what, state), fingerprint.of_config(job.config, job.public)
    if "task._target_" not in there:  # made from Python, without a config
        return []
    if state.get("recipe") not in ("", None, job.settings.recipe):
        refuse_recipe(str(job.start), str(state["recipe"]), job.settings.recipe)
    here |= {"seed": job.settings.seed, "trainer.precision": job.settings.trainer.precision}
    keys = [key for key in {**there, **here} if _is_deciding(key)]
    others = [key for key in keys if there.get(key) != here.get(key)]
    untyped = [key for key in others if not _is_typed(key, there, here, job)]
    if untyped:
        differences = "; ".join(
            f"{key}={shown(there.get(key))} there, {shown(here.get(key))} here" for key in untyped
        )
        raise UserError(
            f"{what}: its run was another one: {differences}; type what it had"
            f"{_as_typed(there, here, untyped)}, or what you want instead"
        )
    brought = " ".join(_brought(job))
    told = [f"with its run's {brought}"] if brought else []
    told += [
        f"its run had {key}={shown(there.get(key))}, this one has {key}={shown(here.get(key))}"
        for key in others
    ]
    codes = fingerprint.of_code(trainer.task, trainer.data)
    told += [f"{key} has changed since its run" for key in codes if there.get(key) != codes[key]]
    return [f"{what}: {line}" for line in told]


def _fingerprint(what: str, state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(state.get("fingerprint", "{}"))
    except (TypeError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{what} is damaged: its fingerprint can't be read; use another one")
    return found


def _is_deciding(key: str) -> bool:
    return _is_below(key, DECIDING) and not _is_below(key, OF_TRAINING)


def _is_below(key: str, names: Sequence[str]) -> bool:
    return any(re.fullmatch(rf"{re.escape(name)}([.\[].*)?", key) for name in names)


def _is_typed(key: str, there: Mapping[str, Any], here: Mapping[str, Any], job: Composed) -> bool:
    """Itself or a part that it is in; or what others refer to: the seed, vars, a group of files.

    What comes from the environment is as good as typed.
    """
    if fingerprint.is_hidden(here.get(key)):
        return True
    typed = [key_of(override) for override in job.typed]
    is_seed = all(key in run and run[key] == run.get("seed") for run in (there, here))
    if _is_below(key, typed) or ("seed" in typed and is_seed):
        return True
    return any(name.split(".")[0] == "vars" or _is_group(name) for name in typed)


def _is_group(name: str) -> bool:
    return "." not in name and name not in TOP_LEVEL


def _as_typed(there: Mapping[str, Any], here: Mapping[str, Any], keys: Sequence[str]) -> str:
    words = []
    for key in keys:
        if key not in there:
            words.append(f"~{key}")
        elif "[" not in key:  # what is within a list can't be typed alone
            words.append(_override(key if key in here else f"++{key}", there[key]))
    return f" ({' '.join(words)})" if words else ""


def _override(key: str, value: Any) -> str:
    """As a shell takes it; text that Hydra would read as something else is in quotes."""
    is_plain = not isinstance(value, str) or re.fullmatch(r"[A-Za-z_./][\w./:-]*|\d+", value)
    if is_plain:
        return f"{key}={shown(value)}"
    return shlex.quote(f"{key}={quoted(value)}")


def _brought(job: Composed) -> list[str]:
    """What of the run's own overrides an evaluation may depend on."""
    typed = {"recipe", *map(key_of, job.typed)}
    saved = [override for override in job.overrides if key_of(override) not in typed]
    return [o for o in saved if not _is_below(key_of(o), (*OF_TRAINING, *OF_FIT))]
