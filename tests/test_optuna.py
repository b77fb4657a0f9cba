"""Optuna's sweeper: its study is in the sweep's directory, goes on, and hears what is best."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import attempts, write

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="dpframe[sweep] is not installed")
optuna = pytest.importorskip("optuna")

OWN = """
import dpframe
from dpframe.recipes.boston import Boston


class Scored(Boston):
    '''Best in its second epoch, and the better the larger the learning rate is.'''

    def __init__(self, net, optimizer, scheduler=None):
        super().__init__(net, optimizer, scheduler)
        self.rate = optimizer.keywords["lr"]

    def summarize(self, means):
        if self.training:
            return means
        self.validated = getattr(self, "validated", 0) + 1
        score = self.rate * [1.0, 3.0, 2.0][self.validated - 1]
        return {**means, "score": score}


class Failing(dpframe.Callback):
    def on_fit_start(self, trainer):
        if trainer.update.optimizer.param_groups[0]["lr"] < 0.03:
            raise KeyError("too small")
"""
LINE = ["-m", "recipe=boston", "hydra/sweeper=optuna", "hydra/sweeper/sampler=random"]
LINE += ["hydra.sweeper.sampler.seed=1", "task.optimizer.lr=interval(0.01,0.1)"]
LINE += ["trainer.max_epochs=3", "trainer.sanity_batches=0", "logger=none"]
SCORED = ["task._target_=own.Scored", "callbacks.checkpoint.monitor=val/score"]
SCORED += ["callbacks.checkpoint.mode=max", "hydra.sweep.dir=scored"]
FAILING = ["+callbacks.failing._target_=own.Failing", "hydra.sweep.dir=failing"]


def study(directory: Path) -> Any:
    return optuna.load_study("sweep", f"sqlite:///{directory / 'study.db'}")


def runs(directory: Path) -> list[dict[str, Any]]:
    return json.loads((directory / "sweep.json").read_text())["runs"]


def test_it_maximises_the_best_score_and_the_study_goes_on(tmp_path):
    write(tmp_path, {"own.py": OWN})
    again = ["-m", "sweep.resume=scored", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=5"]
    again.append(SCORED[0])
    again += ["hydra/sweeper/sampler=random"]
    other = ["-m", "sweep.resume=scored", SCORED[0]]
    lines = [[*LINE, *SCORED, "hydra.sweeper.n_trials=3"], again, again, other]
    first, second, third, without = attempts(lines, tmp_path)
    assert (first.code, second.code, third.code) == (0, 0, 0), first.err + second.err
    assert "run 1: lr=0.0" in first.out and "sweep: 3 of 3 runs finished" in first.out
    assert "sweep: 5 of 5 runs finished" in second.out and "run 4: lr=0.0" in second.out
    assert "run 6" not in third.out, "all trials were done"
    found = study(tmp_path / "scored")
    assert found.direction.name == "MAXIMIZE"
    rates = [trial.params["task.optimizer.lr"] for trial in found.trials]
    assert len(rates) == 5
    assert [trial.value for trial in found.trials] == pytest.approx([3 * rate for rate in rates])
    assert [run["value"] for run in runs(tmp_path / "scored")] == [t.value for t in found.trials]
    best = rates.index(max(rates)) + 1
    assert f"best: run {best}, val/score {max(rates) * 3:.4g}, " in second.out
    assert without.code == 2
    assert "that sweep used hydra/sweeper=optuna; add it" in without.err


def test_a_trial_that_fails_is_told_and_the_others_go_on(tmp_path):
    write(tmp_path, {"own.py": OWN})
    (done,) = attempts([[*LINE, *FAILING, "hydra.sweeper.n_trials=6"]], tmp_path)
    states = [trial.state.name for trial in study(tmp_path / "failing").trials]
    failed = [run["status"] == "failed" for run in runs(tmp_path / "failing")]
    assert [state == "FAIL" for state in states] == failed and len(failed) == 6
    assert 0 < sum(failed) < 6 and done.code == 1
    assert done.err.count("sweep: failed: failing/") == sum(failed)
    assert "KeyError: 'too small'" in done.err


def test_a_search_space_in_a_file_names_no_run_to_resume(tmp_path):
    space = "{search_space: {resume: {type: categorical, choices: [theirs]}}, n_trials: 1}"
    head = "# @package _global_\ndefaults: [override /hydra/sweeper: optuna]\n"
    write(tmp_path, {"mine/experiment/searches.yaml": f"{head}hydra: {{sweeper: {space}}}"})
    short = ["recipe=boston", "trainer.max_steps=1"]
    search = ["-m", "--config-dir=mine", "experiment=searches", *short]
    made, done = attempts([[*short, "hydra.run.dir=theirs"], search], tmp_path)
    assert (made.code, done.code) == (0, 1)
    assert "dpframe: a config file sets resume, which only you can" in done.err
