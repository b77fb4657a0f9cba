"""A sweep: Hydra's sweeper names the points, each is checked first, then each is a run."""

import gc
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from dpframe.cli.compose import (
    Composed,
    Objective,
    compose,
    from_hydra,
    objective_of,
    overrides_of,
)
from dpframe.cli.configs import Configs, quoted, with_path_quoted
from dpframe.cli.directory import create
from dpframe.cli.refusal import first_line
from dpframe.cli.resume import key_of, value_of, with_saved
from dpframe.cli.settings import shown
from dpframe.errors import UserError, printable

# A sweeper's key, and its values for the modes min, which is every sweeper's default, and max.
DIRECTIONS: dict[str, dict[str, Any]] = {
    "direction": {"min": "minimize", "max": "maximize"},  # Optuna's
    "optim.maximize": {"min": False, "max": True},  # Nevergrad's
    "ax_config.experiment.minimize": {"min": True, "max": False},
}


def sweep(overrides: list[str], config_dir: str | None) -> int:
    """0 when every run finished, else 1: the others go on when one fails."""
    began = time.time() - 1  # a file system's clock may lag a little
    overrides = [with_path_quoted(override) for override in overrides]
    configs = Configs(config_dir, typed=overrides)
    with configs.explained(overrides):
        overrides = [*overrides, *_recipe(overrides, configs)]
        shared = configs.compose(overrides, RunMode.MULTIRUN)
        points = _points(overrides, configs) if _is_basic(shared) else []
    jobs = [_checked(point, configs) for point in points]
    _check_targets(jobs)
    gc.freeze()
    gc.enable()  # `main` has disabled it for the imports
    with configs.explained(overrides):
        callbacks: Any = OmegaConf.to_container(shared.callbacks or OmegaConf.create())
        objective = jobs[0].objective if jobs else objective_of(callbacks)
        more = direction(shared.hydra.sweeper, objective, overrides)
    directory, named = _directory(shared, jobs, overrides)
    with configs.explained(overrides):
        shared = configs.compose([*overrides, *more, *named], RunMode.MULTIRUN)
        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=HydraContext(configs, Callback()),  # type: ignore[arg-type]
            task_function=partial(run_point, config_dir=config_dir),
            config=shared,
        )
    try:
        sweeper.sweep(overrides_of(shared))
    except RunFailed:
        print("sweep: the sweeper has ended it, as a run failed", file=sys.stderr)
    except HydraException as error:
        raise UserError(first_line(error)) from None
    return _report(directory, began)


class RunFailed(Exception):
    """Tells a sweeper that there is no value, and why."""


def run_point(config: DictConfig, *, config_dir: str | None) -> float | None:
    """One run, in the directory that Hydra made for it; its objective's value.

    Hydra's own sweeper, which optimises nothing, would end at the first run that fails.
    """
    is_basic = _is_basic(HydraConfig.instance().cfg)
    try:
        return _value(config, config_dir)
    except RunFailed as failed:
        if is_basic:
            return None
        raise failed from None


def _is_basic(config: Any) -> bool:
    """Whether the sweeper is Hydra's own, which runs each combination of the values listed."""
    return str(config.hydra.sweeper._target_).endswith(".BasicSweeper")


def _value(config: DictConfig, config_dir: str | None) -> float:
    from dpframe.cli.main import show_failure
    from dpframe.cli.run import run

    try:
        job = _job(config, config_dir)
        summary, metric = run(job), job.objective.metric
    except UserError as error:
        print(f"dpframe: {printable(str(error))}", file=sys.stderr)
        raise RunFailed(str(error)) from None
    except Exception as error:
        show_failure(error)
        raise RunFailed(first_line(error)) from None
    value = summary.get("best", {}).get(metric, summary["metrics"].get(metric))
    if value is None or math.isnan(value):
        raise RunFailed(f"{metric} is {value}")
    return value


def _job(config: DictConfig, config_dir: str | None) -> Composed:
    """Hydra composes a point without the overrides of the run that it resumes or evaluates."""
    hydra: Any = HydraConfig.get()
    with open_dict(config):
        config.hydra = hydra
    typed = overrides_of(config)
    overrides = typed
    if any(OmegaConf.select(config, key) is not None for key in ("checkpoint", "resume")):
        config = compose(Configs(config_dir), typed)
        overrides = overrides_of(config)
        with open_dict(config):
            config.hydra = hydra
        HydraConfig.instance().set_config(config)
    job = from_hydra(config, typed)
    job.overrides = overrides
    job.run_dir, job.is_run_dir_given = hydra.runtime.output_dir, True
    return job


def _recipe(overrides: Sequence[str], configs: Configs) -> list[str]:
    """Hydra composes a sweep before its points, so the recipe of their checkpoints is added."""
    if value_of("recipe", overrides) or not value_of("checkpoint", overrides):
        return []
    recipes = [value_of("recipe", with_saved(point, Path)) for point in _points(overrides, configs)]
    return [f"recipe={recipe}" for recipe in recipes if recipe is not None][:1]


def _points(overrides: Sequence[str], configs: Configs) -> list[list[str]]:
    """The overrides of each combination of listed values; other sweepers draw their own points."""
    if any(override.startswith("hydra/sweeper=") for override in overrides):
        return []
    choices: dict[str, list[str]] = {}
    for override in OverridesParser.create(configs.loader).parse_overrides(list(overrides)):
        key = override.get_key_element()
        if not override.is_sweep_override():
            values = [override.get_value_element_as_str()]
        elif override.is_discrete_sweep():
            values = list(override.sweep_string_iterator())
        else:
            raise UserError(f"{override.input_line}: Hydra's own sweeper needs listed values")
        choices[key] = [f"{key}={value}" for value in values]
    return [list(point) for point in itertools.product(*choices.values())]


def _checked(point: list[str], configs: Configs) -> Composed:
    config = compose(configs, point)
    job = from_hydra(config, point)
    job.run_dir = str(config.hydra.sweep.dir)
    return job


def _check_targets(jobs: list[Composed]) -> None:
    from dpframe.cli.run import check_targets  # imports torch: only now that the rest is good

    for job in jobs:
        check_targets(job)


def _directory(
    shared: DictConfig, jobs: list[Composed], overrides: list[str]
) -> tuple[Path, list[str]]:
    """One directory for all of the sweep, and the overrides that make Hydra use it."""
    recipes = list(dict.fromkeys(job.settings.recipe for job in jobs))
    first = Path(jobs[0].run_dir if jobs else str(shared.hydra.sweep.dir))
    if any(override.startswith("hydra.sweep.dir=") for override in overrides):
        return new_directory(first, is_given=True), []
    more = []
    if len(recipes) > 1:
        first = first.parent.with_name(",".join(recipes)) / first.name
        more = ["hydra.job.config.override_dirname.exclude_keys=[]"]
    directory = new_directory(first, is_given=False)
    return directory, [*more, f"hydra.sweep.dir={quoted(str(directory))}"]


def new_directory(path: Path, *, is_given: bool) -> Path:
    if "${" in os.path.abspath(path):
        raise UserError(
            f"the sweep's directory {os.path.abspath(path)} has a ${{, which Hydra would take for "
            "a reference; use another one: hydra.sweep.dir=DIR"
        )
    try:
        return create(path, is_given=is_given)[0]
    except OSError as error:
        raise UserError(
            f"the sweep's directory {path} can't be made: {error.strerror}; "
            "use another one: hydra.sweep.dir=DIR"
        ) from None


def direction(sweeper: DictConfig, objective: Objective, overrides: Sequence[str]) -> list[str]:
    """The override that turns the sweeper to where the metric gets better, if it needs one."""
    for name, values in DIRECTIONS.items():
        node, better = OmegaConf.select(sweeper, name), values.get(objective.mode)
        if node is None or better is None:
            continue
        key = f"hydra.sweeper.{name}"
        given = node[0] if OmegaConf.is_list(node) and len(node) == 1 else node
        given = getattr(given, "name", given)  # an Enum's
        if given == better:
            return []
        if key in map(key_of, overrides) or given != values["min"]:
            where = f"{objective.key}.mode" if objective.key else "its mode"
            raise UserError(
                f"{key}={shown(given)}, but the objective is {objective.metric}, where "
                f"{where} is {objective.mode}; leave one out, or change the other"
            )
        return [f"{key}={shown(better)}"]
    return []


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
