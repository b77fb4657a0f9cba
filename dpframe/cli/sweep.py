"""A sweep: Hydra's sweeper names the points, and a `Runner` checks and runs them."""

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from dpframe.cli.picture import svg
from dpframe.cli.results import Earlier, Results, read_earlier
from dpframe.cli.runner import RunFailed, Runner, run_point
from dpframe.config.compose import Composed
from dpframe.config.keys import has
from dpframe.config.loader import ConfigLoader, quoted, with_path_quoted
from dpframe.config.objective import Objective
from dpframe.config.overrides import key_of, value_of
from dpframe.config.points import Points, compose_point
from dpframe.config.schema import OF_ITS_TABLE, OF_THE_SWEEP, SweepSettings
from dpframe.config.untrusted import must_be_typed, refuse_calls
from dpframe.errors import Interrupted, UserError, first_line, printable, suggestion
from dpframe.launch import signals
from dpframe.modes.directory import create, refuse_ways_out, remove
from dpframe.util import files
from dpframe.values import shown

# A sweeper's key, and its values for the modes min, which is every sweeper's default, and max.
DIRECTIONS: dict[str, dict[str, Any]] = {
    "direction": {"min": "minimize", "max": "maximize"},  # Optuna's
    "optim.maximize": {"min": False, "max": True},  # Nevergrad's
    "ax_config.experiment.minimize": {"min": True, "max": False},
}
SWEEPER, LAUNCHER = ".BasicSweeper", ".BasicLauncher"  # Hydra's own
OURS = {"_target_": "hydra_plugins.dpframe_launcher.DpframeLauncher"}  # in place of that launcher
ELSEWHERE = "use another one: hydra.sweep.dir=DIR"
NAMED_BY = "hydra.job.config.override_dirname.exclude_keys"
TYPED_EACH_TIME = ("hydra", "resume", "resume_anyway")


def sweep(given: list[str], config_dir: str | None) -> int:
    """0 when every run finished, else 1: the others go on when one fails."""
    before, typed = _with_earlier([with_path_quoted(override) for override in given])
    configs = ConfigLoader(config_dir, typed=typed)
    again = [with_path_quoted(override) for override in given]
    configs.taken = [] if before is None else [o for o in before.overrides if o not in again]
    overrides, first, config = _first_point(typed, configs)
    settings, is_listed = first.settings.sweep, _is(config.hydra.sweeper, SWEEPER)
    _refuse(overrides, config, settings)
    _refuse_keys(overrides, first, is_listed=is_listed)
    if not is_listed:  # listed points are all checked
        from dpframe.config.build import check_targets  # which imports torch

        check_targets(first)
    turn(config.hydra.sweeper, first.objective, typed)
    directory, made = _directory(config, overrides, settings)
    with files.claim(directory, "the sweep's directory", instead=ELSEWHERE):
        if before is not None:  # what has been run until it was claimed
            before = read_earlier(directory)
        if (stop := signals.current()) is not None:
            stop.begin()  # from now on there is something to remove, or a table to write
        results = Results(
            directory=directory,
            objective=first.objective,
            typed=[each for each in typed if key_of(each) not in OF_THE_SWEEP],
            fixed={key_of(o.get_key_element()) for o in overrides if not o.is_sweep_override()},
            sweeper=str(config.hydra.runtime.choices["hydra/sweeper"]),
            over=settings.averaged,
            compare=settings.compare,
        )
        shared = _of_each_run(results)
        runner = Runner(results, Points(configs), config_dir, shared, settings.jobs, is_listed)
        if before is not None and is_listed:
            runner.known = {tuple(result.overrides): result for result in before.runs}
        elif before is not None:  # a search, which draws others
            results.runs = list(before.runs)
        try:
            _by_sweeper(config, runner)
        except (UserError, Interrupted) as error:
            if all(result.status == "missing" for result in results.runs):
                remove(made)
                raise
            if isinstance(error, UserError):
                raise
            _conclude(results)
            then = shlex.join([f"sweep.resume={directory}", *filter(must_be_typed, typed)])
            raise Interrupted(error.number, f"; go on with {then}") from None
        return _conclude(results)


# ---- what is typed


def _with_earlier(given: list[str]) -> tuple[Earlier | None, list[str]]:
    """The sweep to go on with, and its overrides, except those of its start alone."""
    name = value_of("sweep.resume", given)
    if name is None:
        return None, given
    before = read_earlier(files.local_path("sweep.resume", name))
    changed = {key_of(each) for each in given} & {*OF_ITS_TABLE}
    saved = [o for o in before.overrides if not _is_of_one_start(o) and key_of(o) not in changed]
    new = [override for override in given if override not in saved]
    for override in new:
        if not _is_of_one_start(override) and key_of(override) not in OF_ITS_TABLE:
            raise UserError(
                f"{override}: sweep.resume goes on with a sweep as it was; leave {override} out, "
                "or begin another sweep"
            )
    is_chosen = any(override.startswith("hydra/sweeper=") for override in new)
    if before.sweeper != "basic" and not is_chosen:
        raise UserError(
            f"sweep.resume={name}: that sweep used hydra/sweeper={before.sweeper}; add it and its "
            "settings, as you typed them then"
        )
    refuse_calls([each for each in saved if each not in given], f"sweep.resume={name}")
    return before, [*saved, *new]


def _is_of_one_start(override: str) -> bool:
    return head_of(override) in TYPED_EACH_TIME or key_of(override) in OF_THE_SWEEP


def head_of(override: str) -> str:
    return re.split(r"\W", key_of(override))[0]


def _first_point(
    typed: Sequence[str], configs: ConfigLoader
) -> tuple[list[Override], Composed, DictConfig]:
    """All overrides, and what their first values make: a key that is not there is refused
    before there is a directory or a study."""
    overrides = _parse(typed, configs)
    first, config = compose_point(configs, list(map(_first, overrides)), 0)
    if params := config.hydra.sweeper.get("params"):
        keys = {each.key_or_group for each in overrides}
        more = _parse([f"{key}={value}" for key, value in params.items()], configs)
        overrides = [*(each for each in more if each.key_or_group not in keys), *overrides]
        first, config = compose_point(configs, list(map(_first, overrides)), 0)
    return overrides, first, config


def _parse(words: Sequence[str], configs: ConfigLoader) -> list[Override]:
    with configs.explained(words):
        return OverridesParser.create(configs.loader).parse_overrides(list(words))


def _first(override: Override) -> str:
    line, value = str(override.input_line), override.value()
    if not override.is_sweep_override():
        return line
    if override.is_hydra_override():
        raise UserError(f"{line}: a key of Hydra's has one value for all runs of a sweep")
    if head_of(line) == "sweep":
        key, _, given = line.partition("=")
        hint = f"; a list of keys is {key}=[{given}]" * (key == "sweep.over")
        raise UserError(f"{line}: a key of the sweep has one value for all its runs{hint}")
    if isinstance(value, IntervalSweep):
        return f"{override.get_key_element()}={value.start}"
    for first in override.sweep_string_iterator():
        return f"{override.get_key_element()}={first}"
    raise UserError(f"{line}: these are no values, so there is nothing to run")


def _refuse(overrides: Sequence[Override], config: DictConfig, settings: SweepSettings) -> None:
    """Refuses what is for another sweeper or launcher."""
    for each in overrides:
        if each.is_interval_sweep() and _is(config.hydra.sweeper, SWEEPER):
            raise UserError(
                f"{each.input_line}: Hydra's own sweeper needs listed values, e.g. lr=1,2"
            )
    if settings.jobs > 1 and not _is(config.hydra.launcher, LAUNCHER):
        raise UserError(
            f"sweep.jobs={settings.jobs}: another launcher starts the runs itself; set how many at "
            "a time there, or leave out sweep.jobs"
        )


def _refuse_keys(overrides: Sequence[Override], first: Composed, *, is_listed: bool) -> None:
    """Refuses to compare or average what does not differ. A search may draw any key of the config
    that has no typed value."""
    settings = first.settings.sweep
    swept = [key_of(o.get_key_element()) for o in overrides if o.is_sweep_override()]
    fixed = {key_of(o.get_key_element()) for o in overrides if not o.is_sweep_override()}
    over = settings.averaged if settings.over != SweepSettings.over else []
    chosen = [("over", key) for key in over]
    chosen += [("compare", settings.compare)] * (settings.compare is not None)
    for name, key in chosen:
        may_be_drawn = not is_listed and key not in fixed and has(first.config, key)
        if key not in swept and not may_be_drawn:
            near = next((each for each in swept if each.endswith(f".{key}")), None)
            hint = f"did you mean {near}?" if near else suggestion(key, swept)
            if not swept:
                hint = "list its values, e.g. seed=0,1,2"
            raise UserError(f"sweep.{name}={key}: the runs do not differ in {key}; {hint}")


def _is(node: DictConfig, name: str) -> bool:
    return str(node._target_).endswith(name)


def turn(sweeper: DictConfig, objective: Objective, typed: Sequence[str]) -> None:
    """Turns the sweeper to where the metric gets better."""
    for name, values in DIRECTIONS.items():
        node, better = OmegaConf.select(sweeper, name), values.get(objective.mode)
        if node is None or better is None:
            continue
        key = f"hydra.sweeper.{name}"
        given = node[0] if OmegaConf.is_list(node) and len(node) == 1 else node
        given = getattr(given, "name", given)  # an Enum's
        if given == better:
            return
        if key in map(key_of, typed) or given != values["min"]:
            where = objective.mode_key or "its mode"
            raise UserError(
                f"{key}={shown(given)}, but the objective is {objective.metric}, where "
                f"{where} is {objective.mode}; leave one out, or change the other"
            )
        with read_write(sweeper):
            OmegaConf.update(sweeper, name, better)
        return


# ---- the sweeper


def _of_each_run(results: Results) -> list[str]:
    """Hydra's own overrides. The names of directories have what differs."""
    words = [word for word in results.typed if head_of(word) == "hydra"]
    if NAMED_BY not in map(key_of, words):
        constant = sorted(key for key in results.fixed if head_of(key) != "hydra")
        words.append(f"{NAMED_BY}=[{','.join(map(quoted, constant))}]")
    return [*words, f"hydra.sweep.dir={quoted(str(results.directory.absolute()))}"]


def _by_sweeper(config: DictConfig, runner: Runner) -> None:
    results, hydra = runner.results, config.hydra
    words = [word for word in results.typed if head_of(word) != "hydra"]
    words = [word for word in words if key_of(word) not in OF_ITS_TABLE]
    context: Any = partial(HydraContext, callbacks=Callback())  # type: ignore[arg-type]
    plugins = Plugins.instance()
    with runner.points.configs.explained(words), read_write(hydra), open_dict(hydra):
        hydra.overrides.hydra, hydra.overrides.task = runner.shared, words
        hydra.sweep.dir = str(results.directory.absolute())
        if runner.is_listed:
            hydra.sweeper.max_batch_size = None  # points are checked before the first one runs
        if not _is(hydra.launcher, LAUNCHER):
            runner.other = plugins.instantiate_launcher(
                hydra_context=context(ConfigLoader(runner.config_dir)),
                task_function=partial(run_point, config_dir=runner.config_dir, since=time.time()),
                config=deepcopy(config),
            )
        if "optuna" in str(hydra.sweeper._target_):
            _set_up_optuna(hydra.sweeper, runner)
        hydra.launcher = OURS
        sweeper = plugins.instantiate_sweeper(
            hydra_context=context(_Unchecked(runner.points.configs)),
            task_function=runner.run_batch,
            config=config,
        )
    try:
        sweeper.sweep(words)
    except RunFailed:
        print("sweep: the sweeper has ended it, as a run failed", file=sys.stderr)
    except HydraException as error:
        raise UserError(first_line(error)) from None
    except ValueError as error:  # Optuna's, which names the best trial last
        if any(result.status not in ("failed", "missing") for result in results.runs):
            raise
        if not results.failed:  # a launcher's
            raise UserError(f"the sweep did not start: {first_line(error)}") from None


class _Unchecked:
    """The loader for a sweeper, which composes each point to check it: the runner does so."""

    def __init__(self, configs: ConfigLoader) -> None:
        self._configs = configs

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Any) -> DictConfig:
        return master_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._configs, name)


def _set_up_optuna(sweeper: DictConfig, runner: Runner) -> None:
    """The study is kept in the sweep's directory, and goes on when a trial fails."""
    sweeper.max_failure_rate = sweeper.max_failure_rate or 1.0
    sweeper.n_trials -= sum(result.is_done for result in runner.results.runs)
    if runner.other is None and "hydra.sweeper.n_jobs" not in map(key_of, runner.shared):
        sweeper.n_jobs = runner.jobs
    version = metadata.version("sqlalchemy")
    if sweeper.storage is None and not version.startswith("1."):
        print(
            f"sweep: the study is not kept in a file: Optuna 2 needs sqlalchemy<2, not {version}",
            file=sys.stderr,
        )
    elif sweeper.storage is None:
        sweeper.storage = f"sqlite:///{runner.results.directory.absolute() / 'study.db'}"
        sweeper.study_name = "sweep"


# ---- its directory, and what is told at its end


def _directory(
    config: DictConfig, overrides: Sequence[Override], settings: SweepSettings
) -> tuple[Path, list[Path]]:
    """The sweep's directory, and what was made for it."""
    if settings.resume is not None:
        directory = files.local_path("sweep.resume", settings.resume)
        made = new_directory(directory, is_given=True)
        refuse_ways_out(directory)
        return made
    for each in overrides:
        if each.key_or_group in ("recipe", "name") and each.is_sweep_override():
            config[each.key_or_group] = ",".join(each.sweep_string_iterator())
    path = files.local_path("hydra.sweep.dir", str(config.hydra.sweep.dir))
    is_given = any(each.key_or_group == "hydra.sweep.dir" for each in overrides)
    return new_directory(path, is_given=is_given)


def new_directory(path: Path, *, is_given: bool) -> tuple[Path, list[Path]]:
    if "${" in os.path.abspath(path):
        raise UserError(
            f"the sweep's directory {os.path.abspath(path)} has a ${{, which Hydra would take for "
            f"a reference; {ELSEWHERE}"
        )
    try:
        return create(path, is_given=is_given)
    except OSError as error:
        raise UserError(
            f"the sweep's directory {path} can't be made: {error.strerror}; {ELSEWHERE}"
        ) from None


def _conclude(results: Results) -> int:
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
        path = results.directory / result.directory if result.directory else None
        print(
            printable(f"sweep: failed: {path or results.title(result)}: {result.reason}"),
            file=sys.stderr,
        )
    return 0 if done == total else 1
