"""Runs what Hydra's sweeper names: dpframe's launcher brings all points, another one each alone."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf, open_dict, read_write

from dpframe import files
from dpframe.checkpoint import seal
from dpframe.cli.exit import say
from dpframe.cli.results import Outcome, Result, Results
from dpframe.config.compose import Composed, compose, from_hydra
from dpframe.config.search import Configs, quoted
from dpframe.errors import Interrupted, UserError, first_line
from dpframe.launch import signals


class RunFailed(Exception):
    """Tells a sweeper that there is no value, and why."""


@dataclass
class Runner:
    results: Results
    configs: Configs
    shared: list[str]  # Hydra's own overrides, for each point
    jobs: int  # at a time
    is_listed: bool  # the points: by Hydra's own sweeper, which brings them all at once
    known: dict[tuple[str, ...], Result] = field(default_factory=dict)  # of an earlier sweep
    began: dict[int, float] = field(default_factory=dict)  # when each run did
    has_device: bool = True  # a GPU that has failed is lost to this process, but not to others

    def launch(self, batch: Sequence[Sequence[str]]) -> list[JobReturn]:
        """Runs a batch of points, of which all are checked before the first one runs."""
        done = len(self.results.runs)
        new = [self._result(done + at, list(point)) for at, point in enumerate(batch, start=1)]
        self.results.runs += new
        if self.is_listed:
            self.results.total = len(new)
        self._run(self._checked(new))
        return [self._returned(result) for result in new]

    def __call__(self, config: Any) -> float | None:
        """One run, for another launcher, which has made its directory; its objective's value."""
        hydra: Any = HydraConfig.get()
        overrides: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
        result = Result(hydra.job.num + 1, overrides["task"])
        signals.raise_if_signaled()
        print(self.results.title(result), flush=True)
        try:
            job, _ = self._composed([*overrides["hydra"], *overrides["task"]], hydra.job.num)
            job.run_dir, job.is_run_dir_given = hydra.runtime.output_dir, True
            from dpframe.cli.jobs import run_here

            (result.status, result.value, result.reason), _ = run_here(job)
        except UserError as error:
            say_refusal(result, error)
        return self._value(result)

    # ---- the points

    def _result(self, number: int, overrides: list[str]) -> Result:
        before = self.known.get(tuple(overrides))
        if before is None or not before.is_done:
            return Result(number, overrides)
        return replace(before, number=number)

    def _checked(self, new: Sequence[Result]) -> list[Composed]:
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
        job, result.directory = self._composed(words, number)
        directory = self.results.directory / result.directory
        if result.is_done and (directory / "summary.json").is_file():
            return []
        is_begun = self.known and job.settings.mode == "fit"
        if is_begun and seal.newest_of_run(directory) is not None:
            job, _ = self._composed([*words, f"resume={quoted(str(directory))}"], number)
        job.run_dir, job.is_run_dir_given = str(directory), True
        return [job]

    def _composed(self, words: list[str], number: int) -> tuple[Composed, str]:
        """A run, and the name of its directory in the sweep's."""
        config = compose(self.configs, words)
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        HydraConfig.instance().set_config(config)
        job = from_hydra(config, words)
        job.number = number
        name = str(config.hydra.sweep.subdir)
        files.refuse_url("hydra.sweep.subdir", name)
        return job, name

    @contextmanager
    def _refusals(self, result: Result) -> Iterator[None]:
        """All listed points have to be right. A drawn one that no run can have has failed."""
        try:
            yield
        except UserError as error:
            if self.is_listed:
                raise
            say_refusal(result, error)

    # ---- the runs

    def _run(self, jobs: list[Composed]) -> None:
        from dpframe.cli.jobs import lanes, run_apart, run_here

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

    def _note_begin(self, job: Composed) -> None:
        result = self.results.of(job)
        result.status, self.began[result.number] = "running", time.monotonic()
        print(self.results.title(result), flush=True)
        self.results.save()

    def _note_end(self, job: Composed, outcome: Outcome) -> None:
        result = self.results.of(job)
        result.status, result.value, result.reason = outcome
        result.seconds = time.monotonic() - self.began[result.number]
        self.results.save()

    def _tell_end(self, job: Composed, outcome: Outcome) -> None:
        self._note_end(job, outcome)
        print(self.results.ending(self.results.of(job)), flush=True)

    def _value(self, result: Result) -> float | None:
        """What its sweeper hears. Hydra's own, which optimises nothing, would end at a failure."""
        if result.value is None and not self.is_listed:
            raise RunFailed(result.reason or f"{self.results.objective.metric} was not measured")
        return result.value

    def _returned(self, result: Result) -> JobReturn:
        done = JobReturn(overrides=result.overrides, status=JobStatus.COMPLETED)
        try:
            done.return_value = self._value(result)
        except RunFailed as error:
            done.status, done.return_value = JobStatus.FAILED, error
        return done


def say_refusal(result: Result, error: UserError) -> None:
    say(error)
    result.status, result.reason = "failed", first_line(error)
