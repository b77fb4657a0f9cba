"""A sweep checks every point before the first one runs; then each is a run with its directory."""

import json
import os

import pytest
import yaml
from command import ROOT, attempts, dpframe, environment, write

from dpframe.cli.compose import directory_name
from dpframe.cli.sweep import _made

OWN = """
import dpframe.recipes.boston as boston


class Own(boston.Boston):
    def __init__(self, net, optimizer, scheduler=None, fails=False):
        super().__init__(net, optimizer, scheduler)
        self.fails = fails

    def training_step(self, batch):
        if self.fails:
            raise KeyError("a bug")
        return super().training_step(batch)
"""


def test_a_sweep_over_strategies_and_numbers(tmp_path):
    words = ("-m", "recipe=boston", "strategy=cpu,ddp", "task.optimizer.lr=0.01,0.001")
    done = dpframe(*words, "trainer.max_epochs=1", "trainer.accelerator=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (sweep,) = tmp_path.glob("multirun/boston/*")
    runs = sorted(path for path in sweep.iterdir() if path.is_dir())
    rest = "trainer.accelerator=cpu,trainer.max_epochs=1"  # Hydra sorts them
    assert [run.name for run in runs] == [
        f"{number}_strategy={strategy},task.optimizer.lr={rate},{rest}"
        for number, (strategy, rate) in enumerate(
            [("cpu", 0.01), ("cpu", 0.001), ("ddp", 0.01), ("ddp", 0.001)]
        )
    ]
    for run in runs:
        assert (run / "run.log").is_file() and (run / ".hydra" / "config.yaml").is_file()
        assert len(list(run.glob("events.out.tfevents.*"))) == 1
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    assert [summary["replicas"] for summary in summaries] == [1, 1, 2, 2]
    losses = [summary["metrics"]["val/loss"] for summary in summaries]
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-5), "the strategy changed the numbers"
    assert "sweep: 4 of 4 runs finished" in done.stdout


def test_one_bad_point_is_refused_before_any_runs(tmp_path):
    lines = [
        ["seed=1,abc"],
        ["trainer.max_epochs=1,0"],
        ["strategy=cpu,dpp"],
        ["trainer.max_epoch=1,2"],
        ["checkpoint=missing.ckpt,other.ckpt"],
        ["task.optimizer.lr=interval(0,1)"],
        ["hydra/sweeper=none"],
    ]
    done, heavy = attempts([["-m", "recipe=boston", *line] for line in lines], tmp_path)
    done += attempts([["-m"], ["-m", "recipe=boston,bostn"]], tmp_path)[0]
    assert heavy == []
    target = ["task.optimizer._target_=torch.optim.SGD,torch.optim.Adm"]
    done += attempts([["-m", "recipe=boston", *target]], tmp_path)[0]
    for one in done:
        assert (one.code, one.out, one.files, one.err.count("\n")) == (2, "", [], 1), one
    assert "did you mean Adam?" in done[-1].err


def test_a_point_that_fails_leaves_the_others_running(tmp_path):
    write(tmp_path, {"own.py": OWN})
    words = ["-m", "recipe=boston", "task._target_=own.Own", "+task.fails=false,true,false"]
    done = dpframe(*words, "trainer.max_epochs=1", cwd=tmp_path)
    assert done.returncode == 1
    assert "sweep: 2 of 3 runs finished" in done.stdout
    assert done.stderr.startswith("Traceback") and "KeyError: 'a bug'" in done.stderr
    assert "sweep: failed: multirun/boston/" in done.stderr.splitlines()[-1]
    assert "/1_" in done.stderr.splitlines()[-1]
    assert len(list(tmp_path.glob("multirun/boston/*/[02]_*/summary.json"))) == 2


def test_a_point_that_a_user_error_ends_is_one_line(tmp_path):
    words = ["-m", "recipe=boston", "strategy=cpu", "trainer.gpus=2,1", "trainer.max_epochs=1"]
    done = dpframe(*words, cwd=tmp_path)
    assert done.returncode == 1
    told, failed = done.stderr.splitlines()
    assert told.startswith("dpframe: trainer.gpus=2 but strategy=cpu is one replica")
    assert failed.startswith("sweep: failed: ") and "/0_strategy=cpu" in failed


def test_recipes_are_swept_into_one_directory(tmp_path):
    words = ("-m", "recipe=boston,shapes", "trainer.max_epochs=1")
    done = dpframe(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (sweep,) = tmp_path.glob("multirun/*/*")
    assert sweep.parent.name == "boston,shapes"
    names = sorted(path.name for path in sweep.iterdir() if path.is_dir())
    assert names == [f"{n}_recipe={r},{words[2]}" for n, r in enumerate(("boston", "shapes"))]


def test_two_sweeps_of_one_second_get_a_directory_each(tmp_path):
    first = tmp_path / "multirun" / "now"
    assert [_made(first, is_given=False).name for _ in range(2)] == ["now", "now-2"]


def test_a_given_directory_is_used_and_one_that_cant_be_made_is_one_line(tmp_path):
    words = ("-m", "recipe=boston", "trainer.max_epochs=1", "seed=1,2")
    done = dpframe(*words, "hydra.sweep.dir=here", cwd=tmp_path)
    assert done.returncode == 0
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == [*(f"{n}_seed={n + 1},trainer.max_epochs=1" for n in (0, 1)), "multirun.yaml"]
    (refused,), _ = attempts([[*words, "hydra.sweep.dir=/proc/no"]], tmp_path)
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "the sweep's directory /proc/no can't be made" in refused.err


PLUGINS = {
    "hydra_plugins/own.py": """
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore


class Backwards(BasicSweeper):
    def sweep(self, arguments):
        listed = [word for word in arguments if "interval" not in word]
        return super().sweep([*listed, "seed=2,1"])


class Counting(BasicLauncher):
    def launch(self, job_overrides, initial_job_idx):
        print("launching", len(job_overrides))
        return super().launch(job_overrides, initial_job_idx)


@dataclass
class Sweeper:
    _target_: str = "hydra_plugins.own.Backwards"
    max_batch_size: int | None = None


@dataclass
class Launcher:
    _target_: str = "hydra_plugins.own.Counting"


store = ConfigStore.instance().store
store(group="hydra/sweeper", name="own", node=Sweeper, provider="own")
store(group="hydra/launcher", name="own", node=Launcher, provider="own")
"""
}


def test_a_sweeper_and_a_launcher_of_another_package(tmp_path):
    write(tmp_path / "site", PLUGINS)
    chosen = ("--config-dir=mine", "experiment=draws", "hydra/launcher=own")
    draws = "defaults: [override /hydra/sweeper: own]\nhydra: {sweeper: {max_batch_size: 3}}\n"
    write(tmp_path, {"mine/experiment/draws.yaml": f"# @package _global_\n{draws}"})
    drawn = "task.optimizer.lr=interval(0.01,0.02)"  # more than Hydra's own sweeper can
    words = ("-m", "recipe=boston", "trainer.max_epochs=1", drawn, *chosen)
    path = f"{ROOT}{os.pathsep}{tmp_path / 'site'}"
    done = dpframe(*words, cwd=tmp_path, env=environment(PYTHONPATH=path))
    assert done.returncode == 0, done.stderr
    assert "launching 2" in done.stdout and "sweep: 2 of 2 runs finished" in done.stdout
    seeds = {
        path.parent.parent.name[0]: yaml.safe_load(path.read_text())["seed"]
        for path in tmp_path.glob("multirun/boston/*/*/.hydra/config.yaml")
    }
    assert seeds == {"0": 2, "1": 1}


def test_a_sweeps_directory_has_no_slash_and_a_length_that_files_may_have():
    assert directory_name("checkpoint=a/b.ckpt,seed=1") == "checkpoint=a_b.ckpt,seed=1"
    for letter in ("x", "é", "日"):
        assert len(f"1234_{directory_name(letter * 300)}".encode()) < 255


def test_the_cyclic_collector_is_on_while_a_sweep_runs(tmp_path):
    own = OWN.replace("if self.fails", "if not gc.isenabled()")
    write(tmp_path, {"own.py": f"import gc\n{own}"})
    words = ("-m", "recipe=boston", "task._target_=own.Own", "trainer.max_steps=1", "seed=1,2")
    assert dpframe(*words, cwd=tmp_path).returncode == 0
