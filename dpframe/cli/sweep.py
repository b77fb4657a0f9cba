"""A sweep: each point is checked before the first one runs; then each is a run.

Hydra's own sweeper names a point for each combination of listed values, and these runs are started
here. Any other sweeper or launcher starts them itself, and is told what each came to.
"""

import gc
import itertools
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from dpframe import files
from dpframe.checkpoint import seal
from dpframe.cli.picture import svg
from dpframe.cli.results import Earlier, Outcome, ProcessLost, Result, Results, earlier
from dpframe.config.compose import (
    Composed,
    compose,
    from_hydra,
    overrides_of,
)
from dpframe.config.objective import Objective, objective_of
from dpframe.config.schema import SweepSettings, shown, sweep_settings
from dpframe.config.search import Configs, quoted, with_path_quoted
from dpframe.config.start import MACHINES, WORDS, key_of, value_of, with_saved
from dpframe.errors import Interrupted, UserError, first_line, printable
from dpframe.launch import signals
from dpframe.modes.directory import create, refuse_ways_out

# A sweeper's key, and its values for the modes min, which is every sweeper's default, and max.
DIRECTIONS: dict[str, dict[str, Any]] = {
    "direction": {"min": "minimize", "max": "maximize"},  # Optuna's
    "optim.maximize": {"min": False, "max": True},  # Nevergrad's
    "ax_config.experiment.minimize": {"min": True, "max": False},
}
SWEEPER, LAUNCHER = ".BasicSweeper", ".BasicLauncher"  # Hydra's own
WITH_RECIPE = "hydra.job.config.override_dirname.exclude_keys=[]"  # in the names of runs
OF_THE_SWEEP = ("sweep.jobs", "sweep.resume")  # no run has a use for them
OF_THIS_START = ("hydra", "trusted_modules", "resume", "resume_anyway")


def sweep(given: list[str], config_dir: str | None) -> int:
    """0 when every run finished, else 1: the others go on when one fails."""
    given = [with_path_quoted(override) for override in given]
    before = _earlier(given)
    overrides = _with_earlier(given, before)
    configs = Configs(config_dir, typed=overrides)
    with configs.explained(overrides):
        overrides += _recipe(overrides, configs)
        shared = configs.compose(overrides, RunMode.MULTIRUN)
        settings = sweep_settings(OmegaConf.to_container(shared.sweep, resolve=True))
        words = [each for each in overrides if key_of(each) not in OF_THE_SWEEP]
        points = _points(words, shared, configs) if _is(shared, SWEEPER) else []
    if len({value_of("recipe", point) for point in points}) > 1:
        words.append(WITH_RECIPE)
        points = [[*point, WITH_RECIPE] for point in points]
    runs = [_checked(point, number, configs) for number, point in enumerate(points)]
    _check_targets(runs)
    gc.freeze()
    gc.enable()  # `main` has disabled it for the imports
    is_ours = _is(shared, SWEEPER) and _is(shared, LAUNCHER)
    if settings.jobs > 1 and not is_ours:
        raise UserError(
            f"sweep.jobs={settings.jobs}: another sweeper or launcher starts the runs itself; set "
            "how many at a time there, or leave out sweep.jobs"
        )
    if before is not None and _is(shared, SWEEPER) and not is_ours:
        raise UserError(
            f"sweep.resume={settings.resume} starts the runs that are left by itself; use "
            "hydra/launcher=basic, and sweep.jobs=N for several at a time"
        )
    with configs.explained(overrides):
        objective = runs[0].job.objective if runs else _objective(shared)
        more = [] if is_ours else direction(shared.hydra.sweeper, objective, words)
    results = Results(
        directory=_directory(shared, runs, settings, words),
        objective=objective,
        typed=words,
        fixed=_fixed(words),
        total=len(runs) or None,
        sweeper=str(shared.hydra.runtime.choices["hydra/sweeper"]),
    )
    then = f"go on with {shlex.quote(f'sweep.resume={results.directory}')}"
    began = time.time() - 1  # a file system's clock may lag a little
    if (stop := signals.current()) is not None:
        stop.begin()  # from now on there is a table to write
    try:
        if is_ours:
            OmegaConf.save(shared, results.directory / "multirun.yaml")
            _run(_todo(runs, results, before, config_dir), results, settings)
        else:
            _by_sweeper([*words, *more], configs, config_dir, results, before)
    except Interrupted as error:
        _conclude(results, began)
        raise Interrupted(error.number, f"; {then}") from None
    except ProcessLost:
        code = _conclude(results, began)
        print(
            "sweep: stopped: after an error of its device, this process can run nothing more; "
            f"{then}, which begins with the runs that have not begun",
            file=sys.stderr,
        )
        return code
    return _conclude(results, began)


# ---- the points


class Point(NamedTuple):
    job: Composed
    overrides: list[str]
    sweep_directory: str
    name: str  # of its directory in the sweep's


def _recipe(overrides: Sequence[str], configs: Configs) -> list[str]:
    """Hydra composes a sweep before its points, so the recipe of their checkpoints is added."""
    named = value_of("checkpoint", overrides)
    if value_of("recipe", overrides) or named is None or named in WORDS:
        return []
    points = _combinations(overrides, configs)
    recipes = [value_of("recipe", with_saved(point, Path)) for point in points]
    return [f"recipe={recipe}" for recipe in recipes if recipe is not None][:1]


def _points(words: Sequence[str], shared: DictConfig, configs: Configs) -> list[list[str]]:
    params = shared.hydra.sweeper.get("params") or {}
    return _combinations([*(f"{key}={value}" for key, value in params.items()), *words], configs)


def _combinations(overrides: Sequence[str], configs: Configs) -> list[list[str]]:
    """The overrides of each combination of listed values."""
    choices: dict[str, list[str]] = {}
    for override in OverridesParser.create(configs.loader).parse_overrides(list(overrides)):
        key = override.get_key_element()
        if not override.is_sweep_override():
            values = [override.get_value_element_as_str()]
        elif override.is_discrete_sweep():
            values = list(override.sweep_string_iterator())
        else:
            raise UserError(
                f"{override.input_line}: Hydra's own sweeper needs listed values, e.g. lr=1,2"
            )
        if not values:
            raise UserError(
                f"{override.input_line}: these are no values, so there is nothing to run"
            )
        choices[key] = [f"{key}={value}" for value in values]
    return [list(point) for point in itertools.product(*choices.values())]


def _fixed(words: Sequence[str]) -> set[str]:
    """The keys that have one value."""
    parsed = OverridesParser.create().parse_overrides(list(words))
    return {key_of(each.get_key_element()) for each in parsed if not each.is_sweep_override()}


def _checked(point: list[str], number: int, configs: Configs) -> Point:
    config = compose(configs, point)
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.num, config.hydra.job.id = number, str(number)
    HydraConfig.instance().set_config(config)
    job = from_hydra(config, point)
    job.number = number
    overrides = [override for override in point if head_of(override) != "hydra"]
    name = str(config.hydra.sweep.subdir)
    files.refuse_url("hydra.sweep.subdir", name)
    return Point(job, overrides, str(config.hydra.sweep.dir), name)


def _check_targets(runs: list[Point]) -> None:
    from dpframe.modes.run import check_targets  # imports torch: only now that the rest is good

    for run in runs:
        check_targets(run.job)


def head_of(override: str) -> str:
    return re.split(r"\W", key_of(override))[0]


def _is(shared: Any, name: str) -> bool:
    node = shared.hydra.sweeper if name == SWEEPER else shared.hydra.launcher
    return str(node._target_).endswith(name)


def _objective(shared: DictConfig) -> Objective:
    keys = ("callbacks", "sweep", "mode")
    plain: Any = OmegaConf.to_container(OmegaConf.masked_copy(shared, list(keys)), resolve=True)
    return objective_of(plain)


# ---- an earlier sweep


def _earlier(given: Sequence[str]) -> Earlier | None:
    directory = value_of("sweep.resume", given)
    return None if directory is None else earlier(files.local_path("sweep.resume", directory))


def _with_earlier(given: list[str], before: Earlier | None) -> list[str]:
    """Adds the earlier sweep's overrides, except those of its start alone."""
    if before is None:
        return given
    kept = [each for each in before.overrides if not _is_of_one_start(each)]
    saved = [override for override in kept if key_of(override) not in MACHINES]
    new = [override for override in given if override not in saved]
    for override in new:
        if not _is_of_one_start(override):
            raise UserError(
                f"{override}: sweep.resume goes on with a sweep as it was; leave {override} out, "
                "or begin another sweep"
            )
    is_chosen = any(override.startswith("hydra/sweeper=") for override in new)
    if before.sweeper != "basic" and not is_chosen:
        raise UserError(
            f"sweep.resume={value_of('sweep.resume', given)}: that sweep was by "
            f"hydra/sweeper={before.sweeper}; add this and its settings, as you typed them then"
        )
    return [*saved, *new]


def _is_of_one_start(override: str) -> bool:
    return head_of(override) in OF_THIS_START or key_of(override) in OF_THE_SWEEP


def _todo(
    runs: list[Point], results: Results, before: Earlier | None, config_dir: str | None
) -> list[Composed]:
    """The runs that are not done: from their newest checkpoint where there is one.

    Those that have failed come last, as they may end the sweep again.
    """
    known = {tuple(result.overrides): result for result in before.runs} if before else {}
    todo: list[Composed] = []
    failed: list[Composed] = []
    for number, (job, overrides, _, name) in enumerate(runs, start=1):
        directory = results.directory / name
        done = known.get(tuple(overrides))
        if done is not None and done.is_done and (directory / "summary.json").is_file():
            results.runs.append(replace(done, number=number, directory=name))
            continue
        result, last = Result(number, overrides, name), todo
        if done is not None and done.status == "failed":
            result, last = replace(done, number=number, directory=name), failed
        results.runs.append(result)
        is_begun = before is not None and job.settings.mode == "fit"
        if is_begun and seal.newest_of_run(directory) is not None:
            resume = f"resume={quoted(str(directory))}"
            job = _checked([*job.typed, resume], number - 1, Configs(config_dir)).job
        job.run_dir, job.is_run_dir_given = str(directory), True
        last.append(job)
    return [*todo, *failed]


# ---- the runs


def _run(jobs: list[Composed], results: Results, settings: SweepSettings) -> None:
    from dpframe.cli.jobs import lanes, run_apart, run_here
    from dpframe.launch import local

    since: dict[int, float] = {}

    def begun(job: Composed) -> None:
        result = results.of(job)
        result.status = "running"
        since[result.number] = time.monotonic()
        print(results.title(result), flush=True)
        results.save()

    def ended(job: Composed, outcome: Outcome) -> None:
        result = results.of(job)
        result.status, result.value, result.reason = outcome
        result.seconds = time.monotonic() - since[result.number]
        results.save()
        if settings.jobs > 1:
            print(f"{results.title(result)}: {results.ending(result)}", flush=True)

    if settings.jobs > 1:
        local.allow_fork()
        run_apart(jobs, lanes(jobs, settings.jobs), begun=begun, ended=ended)
        return
    for job in jobs:
        signals.raise_if_signaled()
        begun(job)
        try:
            outcome = run_here(job)
        except Interrupted as error:
            ended(job, Outcome("interrupted", reason=str(error)))
            raise
        except ProcessLost as error:
            ended(job, error.outcome)
            raise
        ended(job, outcome)


# ---- the runs of another sweeper or launcher


class RunFailed(Exception):
    """Tells a sweeper that there is no value, and why."""


def _by_sweeper(
    words: list[str],
    configs: Configs,
    config_dir: str | None,
    results: Results,
    before: Earlier | None,
) -> None:
    results.runs += before.runs if before else []
    done = sum(result.is_done for result in results.runs)
    with configs.explained(words):
        directory, shared = results.directory, configs.compose(words, RunMode.MULTIRUN)
        if not _is(shared, LAUNCHER):  # its processes may have another current directory
            results.directory = directory = directory.absolute()
        words += [f"hydra.sweep.dir={quoted(str(directory))}"]
        node = shared.hydra.sweeper
        words += _study(node, directory)
        if before and (trials := node.get("n_trials")) is not None:
            words += [f"hydra.sweeper.n_trials={trials - done}"]
            if trials <= done:
                return
        first = max((result.number for result in results.runs), default=0) + 1
        words += _later(shared, first - 1)
        shared = configs.compose(words, RunMode.MULTIRUN)
        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=HydraContext(configs, Callback()),  # type: ignore[arg-type]
            task_function=partial(run_point, config_dir=config_dir, results=results, first=first),
            config=shared,
        )
    try:
        sweeper.sweep(overrides_of(shared))
    except RunFailed:
        print("sweep: the sweeper has ended it, as a run failed", file=sys.stderr)
    except HydraException as error:
        raise UserError(first_line(error)) from None
    except ValueError as error:  # Optuna's, which names the best trial last
        if not results.runs:  # a launcher's
            raise UserError(f"the sweep did not start: {first_line(error)}") from None
        if any(result.status != "failed" for result in results.runs):
            raise


def _study(sweeper: DictConfig, directory: Path) -> list[str]:
    """Optuna's study is kept in the sweep's directory, and goes on when a trial fails."""
    if "optuna" not in str(sweeper._target_):
        return []
    words = [] if sweeper.max_failure_rate else ["hydra.sweeper.max_failure_rate=1.0"]
    if sweeper.storage is not None:
        return words
    try:
        version = metadata.version("sqlalchemy")
    except metadata.PackageNotFoundError:
        return words
    if int(version.split(".")[0]) > 1:
        print(
            f"sweep: the study is not kept in a file: Optuna 2 needs sqlalchemy<2, not {version}",
            file=sys.stderr,
        )
        return words
    file = quoted(f"sqlite:///{directory.absolute() / 'study.db'}")
    return [*words, f"hydra.sweeper.storage={file}", "hydra.sweeper.study_name=sweep"]


def _later(shared: DictConfig, runs: int) -> list[str]:
    """A sweeper that goes on numbers its jobs from 0: the directories' names count on."""
    if not runs:
        return []
    name = OmegaConf.to_container(shared.hydra.sweep, resolve=False)["subdir"]  # type: ignore
    name = str(name).replace("${hydra.job.num}", f"${{later:${{hydra.job.num}},{runs}}}")
    return [f"hydra.sweep.subdir='{name}'"]


def run_point(
    config: DictConfig, *, config_dir: str | None, results: Results, first: int
) -> float | None:
    """One run, in the directory that Hydra made for it; its objective's value.

    Hydra's own sweeper, which optimises nothing, would end at the first run that fails.
    """
    from dpframe.cli.jobs import run_here

    hydra: Any = HydraConfig.get()
    began, result = time.monotonic(), Result(first + hydra.job.num, overrides_of_job(hydra))
    result.directory = os.path.relpath(hydra.runtime.output_dir, results.directory)
    result.status = "running"
    results.runs.append(result)
    signals.raise_if_signaled()
    print(results.title(result), flush=True)
    results.save()
    outcome = Outcome("interrupted")
    try:
        outcome = run_here(_job(config, config_dir))
    except UserError as error:  # a point that no run can have
        print(f"dpframe: {printable(str(error))}", file=sys.stderr, flush=True)
        outcome = Outcome("failed", reason=first_line(error))
    except ProcessLost as error:
        outcome = error.outcome
        raise
    finally:
        result.status, result.value, result.reason = outcome
        result.seconds = time.monotonic() - began
        results.save()
    if outcome.status != "failed" and outcome.value is not None:
        return outcome.value
    if _is(HydraConfig.instance().cfg, SWEEPER):
        return None
    raise RunFailed(outcome.reason or f"{results.objective.metric} was not measured")


def overrides_of_job(hydra: Any) -> list[str]:
    overrides: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
    return list(overrides["task"])


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
    job.number = hydra.job.num
    job.overrides = overrides
    job.run_dir, job.is_run_dir_given = hydra.runtime.output_dir, True
    return job


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
            where = objective.mode_key or "its mode"
            raise UserError(
                f"{key}={shown(given)}, but the objective is {objective.metric}, where "
                f"{where} is {objective.mode}; leave one out, or change the other"
            )
        return [f"{key}={shown(better)}"]
    return []


# ---- its directory, and what is told at its end


def _directory(
    shared: DictConfig, runs: list[Point], settings: SweepSettings, words: list[str]
) -> Path:
    """The sweep's directory."""
    if settings.resume is not None:
        directory = new_directory(files.local_path("sweep.resume", settings.resume), is_given=True)
        refuse_ways_out(directory)
        return directory
    path = files.local_path(
        "hydra.sweep.dir", runs[0].sweep_directory if runs else str(shared.hydra.sweep.dir)
    )
    if any(word.startswith("hydra.sweep.dir=") for word in words):
        return new_directory(path, is_given=True)
    recipes = dict.fromkeys(run.job.settings.recipe for run in runs)
    if len(recipes) > 1:
        path = path.parent.with_name(",".join(recipes)) / path.name
    return new_directory(path, is_given=False)


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


def _conclude(results: Results, began: float) -> int:
    """Another launcher may have run the points anywhere: those are told by their files."""
    for notes in sorted(results.directory.rglob(".hydra")):
        name = str(notes.parent.relative_to(results.directory))
        if _is_new(notes, began) and name not in {result.directory for result in results.runs}:
            results.add_from_files(
                notes.parent, is_done=_is_new(notes.parent / "summary.json", began)
            )
    results.save()
    results.save_table()
    if picture := svg(results):
        (results.directory / "sweep.svg").write_text(picture, encoding="utf-8")
    print(f"\n{results.table()}\n")
    for line in results.summary():
        print(line)
    begun = [result for result in results.runs if result.status != "missing"]
    total = results.total or len(begun)
    done = sum(result.is_done for result in results.runs)
    print(f"sweep: {done} of {total} runs finished; {results.directory / 'sweep.json'}", flush=True)
    for result in sorted(results.failed, key=lambda result: result.number):
        path = results.directory / result.directory
        print(printable(f"sweep: failed: {path}: {result.reason}"), file=sys.stderr)
    return 0 if done == total else 1


def _is_new(path: Path, began: float) -> bool:
    return path.exists() and path.stat().st_mtime >= began
