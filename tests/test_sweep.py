"""A sweep checks every point before the first one runs; then each is a run with its directory."""

import json
import os
from pathlib import Path

import pytest
import yaml
from command import ROOT, Attempt, attempts, cold_attempts, dpframe, environment, write

from dpframe.cli.configs import directory_name
from dpframe.cli.sweep import new_directory

OWN = """
import gc

import dpframe.recipes.boston as boston


class Own(boston.Boston):
    def __init__(self, net, optimizer, scheduler=None, fails=False):
        super().__init__(net, optimizer, scheduler)
        self.fails = fails

    def training_step(self, batch):
        if self.fails or not gc.isenabled():
            raise KeyError("a bug")
        return super().training_step(batch)
"""
SHORT = "trainer.max_steps=1"
SWEPT = [
    ["recipe=boston", "task._target_=own.Own", "+task.fails=false,true,false", SHORT],
    ["recipe=boston", "strategy=cpu", "trainer.gpus=2,1", SHORT, "hydra.sweep.dir=wrong"],
    ["recipe=boston,shapes", SHORT],
    ["recipe=boston", SHORT, "seed=1,2", "hydra.sweep.dir=here"],
    ["recipe=boston", SHORT, "seed=1,2", "hydra.sweep.dir=/proc/no"],
]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Attempt]]:
    """Sweeps one after the other, in one directory."""
    directory = write(tmp_path_factory.mktemp("swept"), {"own.py": OWN})
    return directory, attempts([["-m", *line] for line in SWEPT], directory)


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
        ["recipe=boston,bostn"],
    ]
    lines = [["-m", "recipe=boston", *line] for line in lines]
    done, heavy = cold_attempts([*lines, ["-m"]], tmp_path)
    assert heavy == []
    target = ["-m", "recipe=boston", "task.optimizer._target_=torch.optim.SGD,torch.optim.Adm"]
    done += attempts([target], tmp_path)
    for one in done:
        assert (one.code, one.out, one.files, one.err.count("\n")) == (2, "", [], 1), one
    assert "did you mean torch.optim.Adam?" in done[-1].err


def test_a_point_that_fails_leaves_the_others_running(swept):
    directory, (done, *_) = swept
    assert done.code == 1
    assert "sweep: 2 of 3 runs finished" in done.out
    assert done.err.startswith("Traceback") and "KeyError: 'a bug'" in done.err
    assert "sweep: failed: multirun/boston/" in done.err.splitlines()[-1]
    assert "/1_" in done.err.splitlines()[-1]
    assert len(list(directory.glob("multirun/boston/*/[02]_*/summary.json"))) == 2


def test_a_point_that_a_user_error_ends_is_one_line(swept):
    _, (_, done, *_) = swept
    assert done.code == 1
    told, failed = done.err.splitlines()
    assert told.startswith("dpframe: trainer.gpus=2 but CPU is one replica")
    assert failed.startswith("sweep: failed: wrong/0_strategy=cpu")


def test_recipes_are_swept_into_one_directory(swept):
    directory, done = swept
    assert done[2].code == 0, done[2].err
    (sweep,) = directory.glob("multirun/boston,shapes/*")
    names = sorted(path.name for path in sweep.iterdir() if path.is_dir())
    assert names == [f"{n}_recipe={r},{SHORT}" for n, r in enumerate(("boston", "shapes"))]


def test_two_sweeps_of_one_second_get_a_directory_each(tmp_path):
    first = tmp_path / "multirun" / "now"
    names = [new_directory(first, is_given=False).name for _ in range(3)]
    assert names == ["now", "now-2", "now-3"]


def test_a_given_directory_is_used_and_one_that_cant_be_made_is_one_line(swept):
    directory, (*_, given, refused) = swept
    assert given.code == 0, given.err
    names = sorted(path.name for path in (directory / "here").iterdir())
    assert names == [*(f"{n}_seed={n + 1},{SHORT}" for n in (0, 1)), "multirun.yaml"]
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
