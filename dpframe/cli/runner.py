"""Checks and runs the points that Hydra's sweeper names; or another launcher runs them."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from dpframe.checkpoint import seal
from dpframe.cli.exit import say
from dpframe.cli.results import Outcome, Result, Results
from dpframe.config.compose import Composed, compose, from_hydra
from dpframe.config.loader import ConfigLoader, quoted
from dpframe.errors import Interrupted, UserError, first_line
from dpframe.launch import signals
from dpframe.util import files


class RunFailed(Exception):
    """Tells a sweeper that there is no value, and why."""


@dataclass
class Runner:
    """Runs the points of a sweep and records what they came to."""

    results: Results
    configs: ConfigLoader  # with what is typed: a sweeper may draw values, but no run to resume
    config_dir: str | None
    shared: list[str]  # Hydra's own overrides, for each point
    jobs: int  # at a time
    is_listed: bool  # the points: by Hydra's own sweeper, which brings them all at once
    other: Launcher | None = None  # that the user has chosen
    known: dict[tuple[str, ...], Result] = field(default_factory=dict)  # of an earlier sweep
    began: dict[int, float] = field(default_factory=dict)  # when each run did
    has_device: bool = True  # a GPU that has failed is lost to this process, but not to others

    def run_batch(self, batch: Sequence[Sequence[str]]) -> list[JobReturn]:
        """What dpframe's launcher calls: all points are checked before the first one runs."""
        done = len(self.results.runs)
        new = [self._result(done + at, list(point)) for at, point in enumerate(batch, start=1)]
        self.results.runs += new
        if self.is_listed:
            self.results.total = len(new)
        self._run(self._check(new))
        return [self._report(result) for result in new]

    # ---- the points

    def _result(self, number: int, overrides: list[str]) -> Result:
        before = self.known.get(tuple(overrides))
        if before is None or not before.is_done:
            return Result(number, overrides)
        return replace(before, number=number)

    def _check(self, new: Sequence[Result]) -> list[Composed]:
        """What there is to run."""
        jobs, right = [], []
        for result in new:
            signals.raise_if_signaled()
            with self._refusals(result):
                jobs += self._to_run(result)
        for job in jobs:
            # This imports torch: only now that the rest is good.
            from dpframe.config.build import check_targets

            with self._refusals(self.results.of(job)):
                check_targets(job)
                right.append(job)
        return right

    def _to_run(self, result: Result) -> list[Composed]:
        """The run from its newest checkpoint, if it has one; none, if it is done."""
        words, number = [*self.shared, *result.overrides], result.number - 1
        job, config = compose_point(self.configs, words, number)
        result.directory = str(config.hydra.sweep.subdir)
        files.refuse_url("hydra.sweep.subdir", result.directory)
        directory = self.results.directory / result.directory
        if result.is_done and (directory / "summary.json").is_file():
            return []
        is_begun = self.known and job.settings.mode == "fit"
        if is_begun and seal.newest_of_run(directory) is not None:
            words.append(f"resume={quoted(str(directory))}")
            configs = ConfigLoader(self.config_dir)
            configs.taken = self.configs.taken
            job, _ = compose_point(configs, words, number)
        job.run_dir, job.is_run_dir_given = str(directory), True
        return [job]

    @contextmanager
    def _refusals(self, result: Result) -> Iterator[None]:
        """All listed points have to be right. A drawn one that no run can have has failed."""
        try:
            yield
        except UserError as error:
            if self.is_listed:
                raise
            say(error)
            result.status, result.reason = "failed", first_line(error)

    # ---- the runs

    def _run(self, jobs: list[Composed]) -> None:
        from dpframe.cli.jobs import lanes, run_apart, run_here

        if self.other is not None and jobs:
            self._run_by(self.other, jobs)
            return
        while jobs and self.jobs == 1 and self.has_device:
            job = jobs.pop(0)
            signals.raise_if_signaled()
            self._note_begin(job)
            try:
                outcome, self.has_device = run_here(job)
            except Interrupted as error:
                self._note_end(job, Outcome("interrupted", reason=str(error)))
                raise
            self._note_end(job, outcome)
        if jobs:
            run_apart(jobs, lanes(jobs, self.jobs), begun=self._note_begin, ended=self._tell_end)

    def _run_by(self, other: Launcher, jobs: Sequence[Composed]) -> None:
        """In the directories that the runs would have here; told when all have ended."""
        points = []
        for job in jobs:
            self._note_begin(job)
            name = quoted(self.results.of(job).directory)
            points.append([*job.overrides, f"hydra.sweep.subdir={name}"])
        for job, done in zip(jobs, other.launch(points, jobs[0].number or 0), strict=True):
            try:
                outcome, seconds = done.return_value
            except Exception as error:
                outcome, seconds = Outcome("failed", reason=first_line(error)), None
            self._note_end(job, outcome, seconds)

    def _note_begin(self, job: Composed) -> None:
        result = self.results.of(job)
        result.status, self.began[result.number] = "running", time.monotonic()
        print(self.results.title(result), flush=True)
        self.results.save()

    def _note_end(self, job: Composed, outcome: Outcome, seconds: float | None = None) -> None:
        result = self.results.of(job)
        result.status, result.value, result.reason = outcome
        result.seconds = seconds or time.monotonic() - self.began[result.number]
        self.results.save()

    def _tell_end(self, job: Composed, outcome: Outcome) -> None:
        self._note_end(job, outcome)
        print(self.results.ending(self.results.of(job)), flush=True)

    def _report(self, result: Result) -> JobReturn:
        """What its sweeper hears. Hydra's own, which optimises nothing, would end at a failure."""
        done = JobReturn(overrides=result.overrides, status=JobStatus.COMPLETED)
        done.return_value = result.value
        if result.value is None and not self.is_listed:
            why = result.reason or f"{self.results.objective.metric} was not measured"
            done.status, done.return_value = JobStatus.FAILED, RunFailed(why)
        return done


def compose_point(
    configs: ConfigLoader, words: list[str], number: int
) -> tuple[Composed, DictConfig]:
    """A run, and the config that Hydra composes of it."""
    config = compose(configs, words)
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.num, config.hydra.job.id = number, str(number)
    HydraConfig.instance().set_config(config)
    job = from_hydra(config, words)
    job.number = number
    return job, config


def run_point(config: Any, *, config_dir: str | None, since: float) -> tuple[Outcome, float]:
    """A run that another launcher has started, perhaps in another process, in the directory that it
    has made; and how many seconds that took.

    At submitit's signal the run saves, and submitit then queues its job again: the run goes on from
    a checkpoint that is of this sweep, which began at `since`.
    """
    from dpframe.cli.jobs import run_here

    signals.raise_if_signaled()
    began, hydra = time.monotonic(), HydraConfig.get()
    overrides: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
    words, directory = [*overrides["hydra"], *overrides["task"]], hydra.runtime.output_dir
    newest = seal.newest_of_run(directory)
    if newest is not None and newest.stat().st_mtime > since:
        words.append(f"resume={quoted(directory)}")
    job, _ = compose_point(ConfigLoader(config_dir), words, hydra.job.num)
    job.run_dir, job.is_run_dir_given = directory, True
    stop = signals.Interruption([signals.PREEMPTION])
    stop.open()
    stop.begin()
    try:
        outcome, _ = run_here(job)
    except Interrupted as error:
        stop.close()
        signal.raise_signal(error.number)  # does what the launcher does then
        outcome = Outcome("interrupted", reason=str(error))
    finally:
        stop.close()
    return outcome, time.monotonic() - began
