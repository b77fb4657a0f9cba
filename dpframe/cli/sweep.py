"""A sweep: Hydra's sweeper names the points, each is checked first, then each is a run."""

import gc
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from dpframe.cli.compose import (
    CONFIG_NAME,
    Composed,
    explained,
    from_hydra,
    hydra_over,
    quoted,
    raw,
    raw_of_run,
    raw_with_saved,
    with_path_quoted,
    written_overrides,
)
from dpframe.cli.objective import Objective, direction, objective_of
from dpframe.cli.refusal import first_line
from dpframe.cli.resumed import value_of, with_saved
from dpframe.errors import UserError, printable

BASIC = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"


def sweep(overrides: list[str], config_dir: str | None) -> int:
    """0 when every run finished, else 1: one that fails leaves the others running."""
    began = time.time() - 1  # a file system's clock may lag a little
    overrides = [with_path_quoted(override) for override in overrides]
    with hydra_over(config_dir) as hydra:
        hydra.config_loader.typed = overrides  # type: ignore[attr-defined]
        with explained(overrides):
            overrides = _with_recipe(overrides, hydra)
            shared = raw(overrides, config_dir=config_dir, mode=RunMode.MULTIRUN)
            is_listed = shared.hydra.sweeper._target_ == BASIC  # a file may choose another, too
            points = _points(overrides, hydra) if is_listed else []
        jobs = [_checked(point, config_dir) for point in points]
        _check_targets(jobs)
        gc.freeze()
        gc.enable()  # main has disabled it for the imports
        with explained(overrides):
            objective = jobs[0].objective if jobs else _objective(shared)
            aim = direction(shared.hydra.sweeper, objective, overrides)
        directory, more = _directory(shared, jobs, overrides)
        try:
            hydra.multirun(CONFIG_NAME, run_point, [*overrides, *aim, *more])
        except RunFailed:
            print("sweep: the sweeper has ended it, as a run failed", file=sys.stderr)
        except HydraException as error:
            raise UserError(first_line(error)) from None
    return _report(directory, began)


class RunFailed(Exception):
    """For a sweeper, which is to know that there is no value, and why."""


def run_point(config: DictConfig) -> float | None:
    """One run, in the directory that Hydra made for it; its objective's value.

    Hydra's own sweeper, which optimises nothing, would give up at the first that fails.
    """
    try:
        return _value(config)
    except RunFailed as failed:
        if HydraConfig.get().sweeper._target_ == BASIC:
            return None
        raise failed from None


def _value(config: DictConfig) -> float:
    from dpframe.cli.main import show_failure
    from dpframe.cli.run import run

    try:
        with open_dict(config):
            config.hydra = HydraConfig.instance().cfg.hydra  # type: ignore[union-attr]
        job = _job(config)
        job.run_dir, job.is_run_dir_given = HydraConfig.get().runtime.output_dir, True
        value = job.objective.value(run(job))
    except UserError as error:
        print(f"dpframe: {printable(str(error))}", file=sys.stderr)
        raise RunFailed(str(error)) from None
    except Exception as error:
        show_failure(error)
        raise RunFailed(first_line(error)) from None
    if value is None or math.isnan(value):
        raise RunFailed(f"{job.objective.metric} is {value}")
    return value


def _objective(shared: DictConfig) -> Objective:
    callbacks: Any = OmegaConf.to_container(shared.callbacks or OmegaConf.create(), resolve=True)
    return objective_of(callbacks)


def _points(overrides: list[str], hydra: Hydra) -> list[list[str]]:
    """The override lists of a sweep over listed values; another sweeper draws its own."""
    if any(override.startswith("hydra/sweeper=") for override in overrides):
        return []
    parsed = OverridesParser.create(hydra.config_loader).parse_overrides(overrides)
    return [point for batch in BasicSweeper.split_arguments(parsed, None) for point in batch]


def _checked(point: list[str], config_dir: str | None) -> Composed:
    config = raw_of_run(point, config_dir)
    job = from_hydra(config, point)
    job.run_dir = str(config.hydra.sweep.dir)
    return job


def _job(config: DictConfig) -> Composed:
    """Hydra composes a point without what the run of its checkpoint was begun with."""
    hydra, typed = config.hydra, written_overrides(config)
    if any(OmegaConf.select(config, key) is not None for key in ("checkpoint", "resume")):
        config = raw_with_saved(typed)
        overrides = written_overrides(config)
        with open_dict(config):
            config.hydra = hydra
    else:
        overrides = typed
    job = from_hydra(config, typed)
    job.overrides = overrides
    return job


def _with_recipe(overrides: list[str], hydra: Hydra) -> list[str]:
    """Hydra composes a sweep before its points: the recipe of their checkpoints is to be known."""
    is_evaluation = value_of("checkpoint", overrides) and not value_of("recipe", overrides)
    points = _points(overrides, hydra) if is_evaluation else []
    merged = [with_saved(point, Path) for point in points]
    recipes = dict.fromkeys(value_of("recipe", point) for point in merged)
    known = [f"recipe={recipe}" for recipe in recipes if recipe is not None]
    return [*overrides, *known[:1]]


def _check_targets(jobs: list[Composed]) -> None:
    from dpframe.cli.run import check_targets  # imports torch: now that the rest is good

    for job in jobs:
        check_targets(job)


def _directory(
    shared: DictConfig, jobs: list[Composed], overrides: list[str]
) -> tuple[Path, list[str]]:
    """One directory for all of the sweep, and the overrides that make Hydra use it."""
    recipes = list(dict.fromkeys(job.settings.recipe for job in jobs))
    with explained(overrides):
        first = Path(jobs[0].run_dir if jobs else str(shared.hydra.sweep.dir))
    if any(override.startswith("hydra.sweep.dir=") for override in overrides):
        return _made(first, is_given=True), []
    more = []
    if len(recipes) > 1:
        first = first.parent.with_name(",".join(recipes)) / first.name
        more = ["hydra.job.config.override_dirname.exclude_keys=[]"]
    directory = _made(first, is_given=False)
    return directory, [*more, f"hydra.sweep.dir={quoted(str(directory))}"]


def _made(first: Path, *, is_given: bool) -> Path:
    """Two sweeps of one second get one each."""
    directory, number = first, 1
    if "${" in os.path.abspath(first):
        raise UserError(
            f"the sweep's directory {os.path.abspath(first)} has a ${{, which Hydra would take for "
            "a reference; name another by hydra.sweep.dir=DIR"
        )
    try:
        first.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                directory.mkdir(exist_ok=is_given)
                return directory
            except FileExistsError:
                if is_given:
                    raise
                number += 1
                directory = first.with_name(f"{first.name}-{number}")
    except OSError as error:
        raise UserError(
            f"the sweep's directory {directory} can't be made: {error.strerror}; "
            "name another by hydra.sweep.dir=DIR"
        ) from None


def _report(directory: Path, began: float) -> int:
    """Told by the files, as a launcher may have run the points anywhere."""
    runs = [notes.parent for notes in directory.rglob(".hydra") if _is_new(notes, began)]
    failed = [run for run in runs if not _is_new(run / "summary.json", began)]
    print(f"sweep: {len(runs) - len(failed)} of {len(runs)} runs finished", flush=True)
    for run in sorted(failed):
        print(f"sweep: failed: {printable(str(run))}", file=sys.stderr)
    return 1 if failed else 0


def _is_new(path: Path, began: float) -> bool:
    return path.exists() and path.stat().st_mtime >= began
