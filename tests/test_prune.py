"""`callbacks=prune`: a run of a sweep that is worse than most is stopped, and told as pruned."""

import json

import pytest
from command import attempts
from forked import run

from dpframe import UserError
from dpframe.callbacks.prune import Prune

RATES = [0.03, 0.02, 0.0001, 0.01, 0.05]
LINE = ["recipe=boston", "trainer.max_epochs=5", "logger=none", "callbacks=prune"]
LINE += ["callbacks.prune.startup_runs=2", "callbacks.prune.warmup_epochs=2"]
LINE += ["trainer.accelerator=cpu"]
SWEEP = ["-m", *LINE, f"task.optimizer.lr={','.join(map(str, RATES))}", "hydra.sweep.dir=swept"]


@pytest.mark.parametrize("strategy", ["cpu", "ddp"])
def test_a_run_that_is_worse_than_the_median_of_those_before_it_is_stopped(tmp_path, strategy):
    done = run([*SWEEP, f"strategy={strategy}"], tmp_path)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "swept" / "sweep.json").read_text())["runs"]
    assert [each["status"] for each in runs] == ["finished"] * 2 + ["pruned"] * 2 + ["finished"]
    epochs = []
    for each in runs:
        summary = json.loads((tmp_path / "swept" / each["directory"] / "summary.json").read_text())
        epochs.append(summary["epochs"])
    assert epochs == [5, 5, 3, 3, 5]
    assert "stopped: pruned: val/loss is " in done.stdout
    assert "sweep: 5 of 5 runs finished" in done.stdout


def test_runs_that_are_no_sweep_prune_nothing_and_neither_do_too_few(tmp_path):
    short = ["strategy=cpu", "trainer.max_epochs=3"]
    alone = [[*LINE, *short, f"task.optimizer.lr={rate}"] for rate in RATES[:3]]
    few = [*SWEEP, *short, "callbacks.prune.startup_runs=5"]
    done = attempts([*alone, few], tmp_path)
    assert [each.code for each in done[:3]] == [0] * 3
    assert not any("pruned" in each.out for each in done)


def test_a_resumed_run_has_its_curve():
    prune, again = Prune(), Prune()
    prune.curve = [3.0, 2.0]
    prune.monitor.is_better(2.0)
    again.load_state_dict(prune.state_dict())
    assert again.curve == [3.0, 2.0] and again.monitor.best == 2.0


@pytest.mark.parametrize("key, value, least", [("warmup_epochs", -1, 0), ("startup_runs", 0, 1)])
def test_a_number_that_is_none_is_one_line(key, value, least):
    line = rf"^callbacks\.prune\.{key}={value} is out of range; use {least}"
    with pytest.raises(UserError, match=line):
        Prune(**{key: value})
