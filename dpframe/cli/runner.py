"""Checks and runs the points that Hydra's sweeper names; or another launcher runs them."""

import gc
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from dpframe.checkpoint import seal
from dpframe.cli.exit import say
from dpframe.cli.outcome import Outcome, Result
from dpframe.cli.results import Results
from dpframe.config.compose import Composed
from dpframe.config.loader import ConfigLoader, quoted
from dpframe.config.points import Points, compose_point
from dpframe.errors import Interrupted, UserError, first_line
from dpframe.launch import signals
from dpframe.util import files

AHEAD = 100  # points that are composed and checked before the first one runs, and at any time


class RunFailed(Exception):
    """Tells a sweeper that there is no value, and why."""


@dataclass
class Runner:
    """Runs the points of a sweep and records what they came to."""

    results: Results
    points: Points  # with what is typed: a sweeper may draw values, but no run to resume
    config_dir: str | None
    shared: list[str]  # Hydra's own overrides, for each point
    jobs: int  # at a time
    is_listed: bool  # the points: by Hydra's own sweeper, which brings them all at once
    other: Launcher | None = None  # that the user has chosen
    known: dict[tuple[str, ...], Result] = field(default_factory=dict)  # of an earlier sweep
    began: dict[int, float] = field(default_factory=dict)  # when each run did
    ready: dict[int, Composed | None] = field(default_factory=dict)  # what was checked, by number
    waiting: list[Result] = field(default_factory=list)  # to be checked, the next one last
    has_device: bool = True  # a GPU that has failed is lost to this process, but not to others
    has_begun: bool = False  # to run

    def run_batch(self, batch: Sequence[Sequence[str]]) -> list[JobReturn]:
        """What dpframe's launcher calls."""
        done = len(self.results.runs)
        new = [self._result(done + at, list(point)) for at, point in enumerate(batch, start=1)]
        self.results.runs += new
        if self.is_listed:
            self.results.total = len(new)
        self._run(new)
        return [self._report(result) for result in new]

    # ---- the points

    def _result(self, number: int, overrides: list[str]) -> Result:
        before = self.known.get(tuple(overrides))
        if before is None or not before.is_done:
            return Result(number, overrides)
        return replace(before, number=number)

    def _check_first(self, new: Sequence[Result]) -> None:
        """Composes and checks `AHEAD` points, or all that there are; for another launcher, all."""
        order = _new_values_first(new)
        ahead = AHEAD if self.other is None else len(new)
        for result in order[:ahead]:
            self.ready[result.number] = self._composed(result)
        self.waiting = order[ahead:][::-1]
        if not gc.isenabled():
            gc.collect()  # what was composed: the imports that follow are frozen
        for number, job in self.ready.items():
            self.ready[number] = self._with_targets(job)

    def _checked(self, new: Sequence[Result]) -> Iterator[Composed]:
        """What there is to run. While that runs, later points are checked, one for one."""
        for result in new:
            if (job := self.ready.pop(result.number)) is not None:
                self.has_begun = True
                yield job
            if self.waiting:
                later = self.waiting.pop()
                self.ready[later.number] = self._with_targets(self._composed(later))

    def _composed(self, result: Result) -> Composed | None:
        """The run from its newest checkpoint, if it has one; None: it is done, or refused."""
        if not self.has_begun:  # what runs ends first
            signals.raise_if_signaled()
        with self._refusals(result):
            return self._to_run(result)
        return None

    def _with_targets(self, job: Composed | None) -> Composed | None:
        """This imports torch: only now that the rest is good."""
        from dpframe.config.build import check_targets

        if job is not None:
            with self._refusals(self._result_of(job)):
                check_targets(job)
                return job
        return None

    def _to_run(self, result: Result) -> Composed | None:
        words, number = [*self.shared, *result.overrides], result.number - 1
        job, result.directory = self.points.compose(words, number)
        files.refuse_url("hydra.sweep.subdir", result.directory)
        directory = self.results.directory / result.directory
        if result.is_done and (directory / "summary.json").is_file():
            return None
        is_begun = self.known and job.settings.mode == "fit"
        if is_begun and seal.newest_of_run(directory) is not None:
            words.append(f"resume={quoted(str(directory))}")
            configs = ConfigLoader(self.config_dir)
            configs.taken = self.points.configs.taken
            job, _ = compose_point(configs, words, number)
        job.run_dir, job.is_run_dir_given = str(directory), True
        return job

    @contextmanager
    def _refusals(self, result: Result) -> Iterator[None]:
        """Listed points have to be right before one runs. A drawn one that no run can have has
        failed, and so has one that is checked later."""
        try:
            yield
        except UserError as error:
            if self.is_listed and not self.has_begun:
                raise
            say(error)
            result.status, result.reason = "failed", first_line(error)

    def _result_of(self, job: Composed) -> Result:
        return self.results.runs[job.number or 0]

    # ---- the runs

    def _run(self, new: Sequence[Result]) -> None:
        self._check_first(new)
        # This imports torch, too.
        from dpframe.cli.jobs import lanes, run_apart, run_here

        first = [job for job in self.ready.values() if job is not None]
        if self.waiting:
            print(
                f"sweep: {len(self.ready)} of {len(new)} points are checked; the others will be, "
                "while these run",
                file=sys.stderr,
            )
        jobs = self._checked(new)
        if self.other is not None:
            self._run_by(self.other, list(jobs))
            return
        while self.jobs == 1 and self.has_device and (job := next(jobs, None)) is not None:
            signals.raise_if_signaled()
            self._note_begin(job)
            try:
                outcome, self.has_device = run_here(job)
            except Interrupted as error:
                self._note_end(job, Outcome("interrupted", reason=str(error)))
                raise
            self._note_end(job, outcome)
        if self.jobs > 1 or not self.has_device:
            run_apart(jobs, lanes(first, self.jobs), begun=self._note_begin, ended=self._tell_end)

    def _run_by(self, other: Launcher, jobs: Sequence[Composed]) -> None:
        """In the directories that the runs would have here; told when all have ended."""
        if not jobs:
            return
        points = []
        for job in jobs:
            self._note_begin(job)
            name = quoted(self._result_of(job).directory)
            points.append([*job.overrides, f"hydra.sweep.subdir={name}"])
        for job, done in zip(jobs, other.launch(points, jobs[0].number or 0), strict=True):
            try:
                outcome, seconds = done.return_value
            except Exception as error:
                outcome, seconds = Outcome("failed", reason=first_line(error)), None
            self._note_end(job, outcome, seconds)

    def _note_begin(self, job: Composed) -> None:
        result = self._result_of(job)
        result.status, self.began[result.number] = "running", time.monotonic()
        print(self.results.title(result), flush=True)
        self.results.note(result)

    def _note_end(self, job: Composed, outcome: Outcome, seconds: float | None = None) -> None:
        result = self._result_of(job)
        result.status, result.value, result.reason = outcome
        result.seconds = seconds or time.monotonic() - self.began.pop(result.number)
        self.results.note(result)

    def _tell_end(self, job: Composed, outcome: Outcome) -> None:
        self._note_end(job, outcome)
        print(self.results.ending(self._result_of(job)), flush=True)

    def _report(self, result: Result) -> JobReturn:
        """What its sweeper hears. Hydra's own, which optimises nothing, would end at a failure."""
        done = JobReturn(overrides=result.overrides, status=JobStatus.COMPLETED)
        done.return_value = result.value
        if result.value is None and not self.is_listed:
            why = result.reason or f"{self.results.objective.metric} was not measured"
            done.status, done.return_value = JobStatus.FAILED, RunFailed(why)
        return done


def _new_values_first(new: Sequence[Result]) -> list[Result]:
    """In turn; of many points, first those that bring a new value, since one may be a typo."""
    if len(new) <= AHEAD:
        return list(new)
    first, seen = list[Result](), set[str]()
    for result in new:
        if not seen.issuperset(result.overrides):
            first.append(result)
            seen.update(result.overrides)
        if len(first) == AHEAD // 2:
            break
    numbers = {result.number for result in first}
    return first + [result for result in new if result.number not in numbers]


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
