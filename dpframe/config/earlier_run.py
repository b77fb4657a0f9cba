"""What a run takes over from an earlier one: its checkpoint, and overrides below the typed ones.

A run directory is data, maybe a stranger's: what names something to call is typed again. Import
nothing here that imports torch: all is found before, once for all ranks.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from dpframe.checkpoint import address, seal
from dpframe.config import modes
from dpframe.config.overrides import is_switch, key_of, value_of
from dpframe.config.schema import NONE, SWITCHED, RunSettings
from dpframe.config.untrusted import must_be_typed, refuse_calls
from dpframe.errors import UserError, first_line, nearest, printable

KEY = r"(\+\+?|~)?[A-Za-z_][^\s=]*(=|$)"
NOT_TAKEN_OVER = ("resume", "resume_anyway", "checkpoint", "checkpoint_skip", "mode", "sweep")
WORDS = ("best", "last")  # a checkpoint of the newest run
OF_ITS_MACHINE = (  # an evaluation has the same numbers on another one
    "strategy",
    "trainer.gpus",
    "trainer.accelerator",
    "trainer.max_restarts",
    "trainer.threads",
    "trainer.data_on_device",
)
OF_ITS_RUN = ("test_after_fit", "name", "tags", "notes")
RESUMES_BEST = (
    "resume=best: a run continues from its newest checkpoint: use resume=last; checkpoint=best "
    "begins a new run with the best weights"
)
LIMITS = [  # for a short run; an evaluation reads all rows
    f"trainer.limit_{kind}_batches" for kind in ("eval", "val", "test", "predict")
]


def start_file(settings: RunSettings, runs: Path) -> Path | None:
    """The checkpoint that `resume` or `checkpoint` names; this recipe's runs are in `runs`."""
    if settings.resume is not None:
        return resumed_file(settings.resume, runs)
    if settings.checkpoint not in (None, NONE):
        return _file("checkpoint", settings.checkpoint)
    return None


def resumed_file(resume: str, runs: Path) -> Path:
    """`last`, a run's directory or a file; of a run, its newest checkpoint that is whole."""
    directory = _resumed_run(resume, runs)
    if directory is None:
        return _file("resume", resume)
    directory = directory / "checkpoints"
    last, good = directory / "last.ckpt", seal.newest_good(directory)
    if good is None:
        damage = seal.damage(next(directory.glob("*.ckpt")))
        raise UserError(
            f"resume={resume}: no checkpoint in {directory} is whole: {damage}; resume another run"
        )
    if good != last and last.exists() and (damage := seal.damage(last)):
        line = f"dpframe: {last}: {damage}; resuming from {good}"
        print(printable(line), file=sys.stderr)
    return good


def saved_since(resume: str, start: Path, step: int) -> Path | None:
    """What the run has saved after this step, which was read before its directory was locked: a
    run that ends, e.g. by a signal, saves last of all."""
    is_run = resume == "last" or os.path.isdir(os.path.expanduser(resume))
    paths = list(start.parent.glob("*.ckpt")) if is_run else [start]
    if all(seal.step_of(path) <= step for path in paths):
        return None
    newest = start if paths == [start] else seal.newest_good(start.parent)
    return newest if newest is not None and seal.step_of(newest) > step else None


def _resumed_run(resume: str, runs: Path) -> Path | None:
    """The directory that `last` or a directory stands for; None: it is a file."""
    path = address.local_file("resume", resume)
    if resume == "last":
        return _newest_run(runs, "resume=last")
    if not os.path.isdir(path):  # False, too, for a name that is too long
        return None
    if not any(path.glob("checkpoints/*.ckpt")):
        raise _without_checkpoint("resume", path)
    return path


def newest_file(name: str, runs: Path) -> Path:
    """`best` or `last` of the newest run."""
    return _newest_run(runs, f"checkpoint={name}") / "checkpoints" / f"{name}.ckpt"


def _newest_run(runs: Path, typed: str) -> Path:
    """The one that has written a checkpoint last."""
    checkpoints = sorted(runs.glob("*/checkpoints/*.ckpt"), key=seal.time_of)
    if not checkpoints:
        raise UserError(f"{typed}: there is no run with a checkpoint in {runs}")
    return checkpoints[-1].parent.parent


def run_directory(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint is in."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def with_saved(overrides: Sequence[str], runs: Callable[[], Path]) -> list[str]:
    """With the overrides of the run that is resumed or evaluated.

    `runs` tells where this recipe's runs are; it is called only for `resume=last`.
    """
    resume, checkpoint = value_of("resume", overrides), value_of("checkpoint", overrides)
    if resume is not None:
        return [*_of_resumed(resume, overrides, runs), *overrides]
    if checkpoint not in (None, NONE) and modes.evaluates(value_of("mode", overrides)):
        return [*_of_evaluated(checkpoint, overrides), *overrides]
    return list(overrides)


def _of_resumed(resume: str, typed: Sequence[str], runs: Callable[[], Path]) -> list[str]:
    """The config of the run that goes on."""
    run = _resumed_run(resume, runs() if resume == "last" else Path())
    saved = saved_overrides(run or run_directory(_file("resume", resume)))
    kept = [each for each in saved if _is_kept(each, saved, typed)]
    refuse_calls(kept, f"resume={resume}")
    return kept


def _of_evaluated(checkpoint: str, typed: Sequence[str]) -> list[str]:
    """The config of its checkpoint's run, except for the machine it ran on."""
    saved = saved_overrides(run_directory(_file("checkpoint", checkpoint)))
    theirs, recipe = value_of("recipe", saved), value_of("recipe", typed)
    if theirs is not None and recipe is not None and theirs != recipe:
        refuse_recipe(checkpoint, theirs, recipe)
    kept = [each for each in saved if _is_evaluated(each, saved, typed)]
    refuse_calls(kept, f"checkpoint={checkpoint}")
    if value_of("experiment", kept) is not None:  # it may set a limit: `experiment=debug` does
        kept += [f"{limit}=null" for limit in LIMITS]
    return kept


def refuse_recipe(checkpoint: str, theirs: str, recipe: str) -> NoReturn:
    raise UserError(
        f"checkpoint={checkpoint} is of a run with recipe={theirs}, not recipe={recipe}; "
        f"use recipe={theirs}, or name a checkpoint of recipe={recipe}"
    )


def _is_kept(override: str, saved: Sequence[str], typed: Sequence[str]) -> bool:
    """Whether a saved override counts beside those that are typed."""
    key, of_typed = key_of(override), [key_of(each) for each in typed]
    if re.split(r"[^\w]", key)[0] in (*NOT_TAKEN_OVER, "hydra"):
        return False
    if key in of_typed and must_be_typed(override):
        return False
    for group in ("strategy", "task/schedule"):
        if key.startswith(f"{group.replace('/', '.')}."):  # another option has other keys
            options = [each for each in typed if key_of(each) == group]
            return key not in of_typed and all(option in saved for option in options)
    if _is_switched(override, typed):
        return False
    if override.startswith("+") and "." in key:  # the key has to exist before it is changed
        return not any(each.startswith("+") for each in typed if key_of(each) == key)
    return key not in of_typed


def _is_switched(override: str, typed: Sequence[str]) -> bool:
    """Whether a typed `callbacks=…` switches all of them off, or this one on again."""
    group, _, name = key_of(override).partition(".")
    if group not in SWITCHED or not name:
        return False
    chosen = [set(re.findall(r"\w+", each)[1:]) for each in typed if key_of(each) == group]
    is_off = is_switch(override)
    return any(options <= {"none"} or (is_off and name in options) for options in chosen)


def _is_evaluated(override: str, saved: Sequence[str], typed: Sequence[str]) -> bool:
    """The same for an evaluation, which may be on another machine."""
    key = key_of(override)
    group = key.partition(".")[0]
    if key in (*OF_ITS_MACHINE, *OF_ITS_RUN, *LIMITS) or group == "strategy":
        return False
    is_of_other = group != key and group in map(key_of, typed)  # callbacks=none has other keys
    return not is_of_other and _is_kept(override, saved, typed)


def saved_overrides(directory: Path | None) -> list[str]:
    path = directory and directory / ".hydra" / "overrides.yaml"
    if path is None or not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        # A few bytes of them stand for gigabytes, and no run writes one.
        has_alias = any(isinstance(each, yaml.AliasEvent) for each in yaml.parse(text))
        saved = [[]] if has_alias else yaml.safe_load(text) or []
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(
            f"{path} can't be read: {first_line(error)}; fix it, or remove it"
        ) from None
    if not isinstance(saved, list) or any(isinstance(each, list | dict) for each in saved):
        raise UserError(f"{path} is no list of overrides; fix it, or remove it")
    overrides = [str(override).strip() for override in saved]
    strange = next((each for each in overrides if not re.match(KEY, each)), None)
    if strange is not None:
        raise UserError(f"{path}: {strange!r} is no override; fix it, or remove the file")
    return overrides


def _file(key: str, name: str) -> Path:
    path = address.local_file(key, name)
    if os.path.isdir(path):
        if (path / ".hydra").is_dir() and not any(path.glob("checkpoints/*")):
            raise _without_checkpoint(key, path)
        raise UserError(
            f"{key}={path} is a directory; name a file in it, e.g. checkpoints/best.ckpt"
        )
    if not os.path.isfile(path):
        words = WORDS if key == "checkpoint" else ("last",)
        near = nearest(name, words, cutoff=0.7)
        hint = f"; did you mean {key}={near}?" if near and path.name not in words else ""
        if key == "resume" and name == "best":
            raise UserError(RESUMES_BEST)
        if key == "resume" and not hint:
            hint = "; use resume=last, of the newest run, or a run's directory, or a checkpoint"
        raise UserError(f"{key}={path}: there is no such file{hint}")
    return path


def _without_checkpoint(key: str, run: Path) -> UserError:
    return UserError(f"{key}={run}: there is no checkpoint in {run / 'checkpoints'}")
