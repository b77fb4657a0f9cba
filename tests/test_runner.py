"""Runs of a sweep, one at a time, and what of it is checked when."""

from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from dpframe import UserError
from dpframe.cli import jobs, runner
from dpframe.cli.outcome import Outcome
from dpframe.cli.results import Results, read_earlier
from dpframe.cli.runner import Runner
from dpframe.config.compose import Composed
from dpframe.config.loader import ConfigLoader
from dpframe.config.objective import Objective
from dpframe.config.points import Points, compose_point


def test_a_point_is_a_run_of_its_own_with_its_number(monkeypatch):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # as it was before, afterwards
    job, config = compose_point(ConfigLoader(None), ["recipe=boston", "seed=7"], 3)
    assert (job.number, job.settings.seed, config.seed) == (3, 7, 7)
    assert HydraConfig.get().job.num == 3


class Told(Points):
    """Notes what is composed, and when what runs."""

    def __init__(self) -> None:
        super().__init__(ConfigLoader(None))
        self.told: list[str] = []

    def compose(self, words: Any, number: int) -> tuple[Composed, str]:
        self.told.append(f"check {number}")
        return super().compose(words, number)

    def run(self, job: Composed) -> tuple[Outcome, bool]:
        self.told.append(f"run {job.number}")
        return Outcome("finished", float(job.settings.seed)), True


def run_listed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *swept: str
) -> tuple[Results, list[str]]:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    monkeypatch.setattr(runner, "AHEAD", 4)
    points = Told()
    monkeypatch.setattr(jobs, "run_here", points.run)
    results = Results(directory, Objective("val/loss", "min"), [], {"recipe"}, "basic")
    made = Runner(results, points, None, [], jobs=1, is_listed=True)
    try:
        made.run_batch([["recipe=boston", *point.split()] for point in swept])
    except UserError:
        points.told.append("refused")
    return results, points.told


def test_of_many_points_some_are_checked_before_the_first_run_and_one_more_after_each(
    tmp_path, monkeypatch, capsys
):
    _, told = run_listed(tmp_path, monkeypatch, *(f"seed={seed}" for seed in range(7)))
    first = [f"check {number}" for number in range(4)]
    then = [f"run {n}" if is_run else f"check {n + 4}" for n in range(3) for is_run in (1, 0)]
    assert told == [*first, *then, *(f"run {number}" for number in range(3, 7))]
    said = "sweep: 4 of 7 points are checked; the others will be, while these run\n"
    assert capsys.readouterr().err == said


def test_all_of_a_few_points_are_checked_before_the_first_one_runs(tmp_path, monkeypatch, capsys):
    _, told = run_listed(tmp_path, monkeypatch, "seed=1", "seed=2", "seed=3", "seed=x")
    assert told == ["check 0", "check 1", "check 2", "check 3", "refused"]
    assert not capsys.readouterr().err


def test_a_value_that_only_a_later_point_has_is_checked_before_the_first_one_runs(
    tmp_path, monkeypatch
):
    swept = [
        f"{rate} seed={seed}"
        for rate in ("data.batch_size=8", "data.batch_size=x")
        for seed in (1, 2)
    ]
    _, told = run_listed(tmp_path, monkeypatch, *swept[:1], *swept[:1] * 6, swept[-1])
    assert told == ["check 0", "check 7", "refused"]


def test_a_later_point_that_no_run_can_have_has_failed_and_the_others_run(
    tmp_path, monkeypatch, capsys
):
    seeds = [0, 1, 2, 3, 4, -1, 6]
    results, told = run_listed(tmp_path, monkeypatch, *(f"seed={seed}" for seed in seeds))
    statuses = ["finished"] * 5 + ["failed", "finished"]
    assert [run.status for run in results.runs] == statuses
    assert "run 5" not in told and results.runs[5].reason.startswith("seed=-1 is out of range")
    assert "dpframe: seed=-1 is out of range" in capsys.readouterr().err
    results.save()
    assert [run.status for run in read_earlier(tmp_path).runs] == statuses
