"""A sweep checks every point before the first one runs; then each is a run with its directory,
whose best value its sweeper gets."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from command import ROOT, Attempt, attempts, write
from omegaconf import OmegaConf

from dpframe import UserError
from dpframe.cli.sweep import turn
from dpframe.config.loader import directory_name
from dpframe.config.objective import Objective, objective_of

OWN = """
import gc

import dpframe
from dpframe.recipes.boston import Boston


class Own(Boston):
    def __init__(self, net, optimizer, scheduler=None, fails=False):
        super().__init__(net, optimizer, scheduler)
        self.fails = fails

    def training_step(self, batch):
        if self.fails or not gc.isenabled():
            raise KeyError("a bug")
        return super().training_step(batch)


class Scored(Boston):
    def summarize(self, means):
        if self.training:
            return means
        self.validated = getattr(self, "validated", 0) + 1
        return {**means, "score": [0.25, 0.75, 0.5][self.validated - 1]}


class Diverged(Boston):
    def __init__(self, net, optimizer, scheduler=None, at=0):
        super().__init__(net, optimizer, scheduler)
        self.at = at

    def summarize(self, means):
        return means if self.training or self.at != 1 else {**means, "loss": float("inf")}


class Failing(dpframe.Callback):
    def on_epoch_end(self, trainer):
        if trainer.seed == 1:
            raise KeyError("a bug")
"""
PLUGIN = """
import json
from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper


class Told(Sweeper):
    def __init__(self, direction, goes_on, seeds, params=None, space=None):
        self.space = space or {}
        self.direction, self.goes_on, self.seeds = direction, goes_on, seeds

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        heard, listed = [], [word for word in arguments if "interval" not in word]
        listed += [f"{key}={value}" for key, value in self.space.items()]
        for number, seed in enumerate(reversed(range(self.seeds))):
            (done,) = self.launcher.launch([[*listed, f"seed={seed}"]], number)
            is_done = done.status == JobStatus.COMPLETED
            heard.append(done.return_value if is_done else type(done._return_value).__name__)
            if not (is_done or self.goes_on):
                done.return_value
        with open(f"heard-{self.direction}.json", "w") as file:
            json.dump(heard, file)


class Counting(BasicLauncher):
    def launch(self, job_overrides, initial_job_idx):
        print("launching", len(job_overrides))
        return super().launch(job_overrides, initial_job_idx)


@dataclass
class Node:
    _target_: str = "hydra_plugins.own.Told"
    direction: Any = "minimize"
    goes_on: bool = True
    seeds: int = 3


@dataclass
class Searches(Node):
    params: Any = None
    space: Any = None


@dataclass
class Launcher:
    _target_: str = "hydra_plugins.own.Counting"


store = ConfigStore.instance().store
store(group="hydra/sweeper", name="told", node=Node, provider="own")
store(group="hydra/sweeper", name="searches", node=Searches, provider="own")
store(group="hydra/launcher", name="own", node=Launcher, provider="own")
"""
DRAWS = """
# @package _global_
defaults: [override /hydra/sweeper: told]
hydra: {sweeper: {seeds: 2}}
"""
SEARCHES = """
# @package _global_
defaults: [override /hydra/sweeper: searches]
hydra: {sweeper: {params: {seed: "1,2", task.optimizer.lrr: "interval(0.01,0.02)"}}}
"""
THEIRS = """
# @package _global_
defaults: [override /hydra/sweeper: searches]
hydra: {sweeper: {seeds: 1, space: {resume_anyway: true}}}
"""
SHORT = "trainer.max_steps=1"
TOLD = ("recipe=boston", "hydra/sweeper=told", "logger=none", "+callbacks.x._target_=own.Failing")
THRICE = ("trainer.max_epochs=3", "trainer.sanity_batches=0")  # which would count as validated
SCORED = ("callbacks.checkpoint.monitor=val/score", "callbacks.checkpoint.mode=max")
SHORT_RUNS = ("recipe=boston", SHORT, "logger=none")
NUMBERED = ("hydra.sweep.dir=by", "hydra.sweep.subdir=${hydra.job.num}")
SWEPT = {
    "bug": ["recipe=boston", "task._target_=own.Own", "+task.fails=false,true,false", SHORT],
    "infinite": ["recipe=boston", "task._target_=own.Diverged", "+task.at=${seed}", "seed=0,1,2"],
    "mistake": ["recipe=boston", "strategy=cpu", "trainer.gpus=2,1", SHORT, "hydra.sweep.dir=bad"],
    "recipes": ["recipe=boston,shapes", SHORT],
    "refused": ["recipe=boston", SHORT, "seed=1,2", "hydra.sweep.dir=/proc/no"],
    "best": [*TOLD, *SCORED, "task._target_=own.Scored", *THRICE],
    "ended": [*TOLD, "callbacks.checkpoint=null", "hydra.sweeper.goes_on=false", SHORT],
    "drawn": [*TOLD, "trainer.max_steps=${seed}", "hydra.sweep.dir=mistakes"],
    "first": [*SHORT_RUNS, "hydra/sweeper=told", "hydra.sweeper.seeds=2", "hydra.sweep.dir=twice"],
    "second": ["sweep.resume=twice", "hydra/sweeper=told", "hydra.sweeper.seeds=2"],
    "table": [*SHORT_RUNS, "seed=0,1", "task.optimizer.lr=0.01,0.1", "hydra.sweep.dir=here"],
    "metric": [*SHORT_RUNS, "sweep.metric=val/mae", "sweep.mode=max", "seed=0,1", *NUMBERED],
    "no mode": [*SHORT_RUNS, "sweep.metric=val/mae", "seed=0,1"],
    "no metric": [*SHORT_RUNS, "sweep.mode=max", "seed=0,1"],
    "misspelt": [*SHORT_RUNS, "sweep.metric=val/mea", "sweep.mode=min", "seed=0,1"],
    "jobs": [*SHORT_RUNS, "hydra/launcher=own", "sweep.jobs=2", "seed=1,2"],
    "unknown": [*TOLD, "task.optimizer.lrr=interval(0.01,0.02)"],
    "unknown in a file": ["--config-dir=mine", "experiment=searches", "recipe=boston"],
    "theirs": ["--config-dir=mine", "experiment=theirs", "recipe=boston", SHORT],
    "contradiction": [*TOLD, "hydra.sweeper.direction=maximize"],
    "drawn pairs": [*TOLD, SHORT, "hydra.sweeper.seeds=2", "sweep.compare=seed", "sweep.over=null"],
    "no pairs": [*TOLD, SHORT, "hydra.sweeper.seeds=1", "sweep.compare=task.optimizer.lr"],
    "not drawn": [*TOLD, "sweep.compare=task.optimizer.lrr"],
    "plugins": ["--config-dir=mine", "experiment=draws", "hydra/launcher=own", "recipe=boston"],
}
SWEPT["drawn"] += ["--config-dir=mine", "experiment=three"]  # the first of the sweeper's is right
SWEPT["infinite"] += [SHORT, "logger=none", "hydra.sweep.dir=infinite"]
SWEPT["plugins"] += [SHORT, "task.optimizer.lr=interval(0.01,0.02)", "hydra.sweep.dir=drawn"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Attempt]]:
    """Sweeps one after the other, in one directory."""
    files = {"site/hydra_plugins/own.py": PLUGIN, "mine/experiment/draws.yaml": DRAWS}
    files["mine/experiment/searches.yaml"] = SEARCHES
    files["mine/experiment/theirs.yaml"] = THEIRS
    files["mine/experiment/three.yaml"] = "# @package _global_\nseed: 3"
    directory = write(tmp_path_factory.mktemp("swept"), files | {"own.py": OWN})
    path = f"{ROOT}{os.pathsep}{directory / 'site'}"
    lines = [["-m", *line] for line in SWEPT.values()]
    done = attempts(lines, directory, PYTHONPATH=path)
    return directory, dict(zip(SWEPT, done, strict=True))


def test_one_bad_point_is_refused_before_any_runs(tmp_path):
    lines = [
        ["seed=1,abc"],
        ["trainer.max_epochs=1,0"],
        ["strategy=cpu,dpp"],
        ["trainer.max_epoch=1,2"],
        ["checkpoint=missing.ckpt,other.ckpt"],
        ["task.optimizer.lr=interval(0,1)"],
        ["seed=range(0)"],
        ["hydra/sweeper=none"],
        ["recipe=boston,bostn"],
    ]
    lines = [["-m", "recipe=boston", *line] for line in lines]
    target = ["-m", "recipe=boston", "task.optimizer._target_=torch.optim.SGD,torch.optim.Adm"]
    done = attempts([*lines, ["-m"], target], tmp_path)
    for one in done:
        assert (one.code, one.out, one.files, one.err.count("\n")) == (2, "", [], 1), one
    assert "did you mean Adam?" in done[-1].err


def test_a_point_that_fails_leaves_the_others_running(swept):
    directory, done = swept
    bug, mistake = done["bug"], done["mistake"]
    assert (bug.code, mistake.code) == (1, 1)
    assert "sweep: 2 of 3 runs finished" in bug.out
    assert bug.err.startswith("Traceback") and "KeyError: 'a bug'" in bug.err
    assert "sweep: failed: multirun/boston/" in bug.err.splitlines()[-1]
    assert "/1_" in bug.err.splitlines()[-1]
    assert len(list(directory.glob("multirun/boston/*/[02]_+task.fails*/summary.json"))) == 2
    told, failed = mistake.err.splitlines()
    assert told.startswith("dpframe: trainer.gpus=2 but CPU is one replica")
    assert failed.startswith("sweep: failed: bad/0_trainer.gpus=2: ")


def test_a_run_whose_objective_is_infinite_is_told_and_left_out_of_the_mean(swept):
    directory, done = swept
    infinite = done["infinite"]
    assert infinite.code == 1 and "Traceback" not in infinite.err
    [told] = infinite.err.splitlines()
    assert told.startswith("sweep: failed: infinite/1_") and told.endswith(": val/loss is inf")
    assert "sweep: 2 of 3 runs finished" in infinite.out
    content = json.loads((directory / "infinite" / "sweep.json").read_text())
    assert [mean["runs"] for mean in content["means"]] == [[1, 3]]
    assert (directory / "infinite" / "sweep.csv").is_file()


def test_recipes_are_swept_into_one_directory(swept):
    directory, done = swept
    assert done["recipes"].code == 0, done["recipes"].err
    (sweep,) = directory.glob("multirun/boston,shapes/*")
    names = sorted(path.name for path in sweep.iterdir() if path.is_dir())
    assert names == [f"{n}_recipe={r}" for n, r in enumerate(("boston", "shapes"))]


def test_a_given_directory_is_used_and_one_that_cant_be_made_is_one_line(swept):
    directory, done = swept
    assert done["table"].code == 0, done["table"].err
    names = sorted(path.name for path in (directory / "here").iterdir())
    points = [(seed, rate) for seed in (0, 1) for rate in ("0.01", "0.1")]
    runs = [f"{n}_seed={seed},task.optimizer.lr={rate}" for n, (seed, rate) in enumerate(points)]
    assert names == [".lock", *runs, "multirun.yaml", "sweep.csv", "sweep.json", "sweep.svg"]
    assert {path.name for path in (directory / "by").iterdir() if path.is_dir()} == {"0", "1"}
    refused = done["refused"]
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "the sweep's directory /proc/no can't be made" in refused.err


def test_a_sweeper_and_a_launcher_of_another_package(swept):
    directory, done = swept
    plugins = done["plugins"]
    assert plugins.code == 0, plugins.err
    assert "launching 1" in plugins.out and "sweep: 2 of 2 runs finished" in plugins.out
    seeds = {
        path.parent.parent.name[0]: yaml.safe_load(path.read_text())["seed"]
        for path in directory.glob("drawn/*/.hydra/config.yaml")
    }
    assert seeds == {"0": 1, "1": 0}


def test_a_sweeper_that_goes_on_has_other_directories_than_before(swept):
    directory, done = swept
    assert (done["first"].code, done["second"].code) == (0, 0), done["second"].err
    runs = json.loads((directory / "twice" / "sweep.json").read_text())["runs"]
    assert [run["directory"] for run in runs] == ["0_seed=1", "1_seed=0", "2_seed=1", "3_seed=0"]
    assert [run["number"] for run in runs] == [1, 2, 3, 4]
    assert all((directory / "twice" / run["directory"] / "summary.json").exists() for run in runs)


def test_what_no_search_can_have_is_one_line_before_there_is_a_directory(swept):
    directory, done = swept
    assert done["jobs"].err.startswith("dpframe: sweep.jobs=2: another launcher starts the runs")
    for name in ("unknown", "unknown in a file"):
        assert re.match(r"dpframe: task\.optimizer\.lrr.*; did you mean .*lr\?\n$", done[name].err)
    for name in ("jobs", "unknown", "unknown in a file"):
        assert (done[name].code, done[name].out) == (2, "")
    sweeps = [path.name for path in directory.glob("multirun/*/*")]
    assert len(sweeps) == sum("finished; multirun/" in one.out for one in done.values())


def test_the_objective_is_the_best_of_what_the_checkpoint_watches_in_its_direction(swept):
    directory, done = swept
    assert done["best"].code == 1
    heard = json.loads((directory / "heard-maximize.json").read_text())
    assert heard == [0.75, "RunFailed", 0.75]
    assert "sweep: 2 of 3 runs finished" in done["best"].out
    texts = [path.read_text() for path in directory.glob("multirun/*/*/*/summary.json")]
    summaries = [told for told in map(json.loads, texts) if "val/score" in told.get("best", {})]
    assert [summary["best"] for summary in summaries] == [{"val/score": 0.75}] * 2
    assert summaries[0]["metrics"]["val/score"] == 0.5


def test_a_sweeper_sets_nothing_that_only_a_user_can(swept):
    theirs = swept[1]["theirs"]
    assert theirs.code == 1
    assert "dpframe: a config file sets resume_anyway, which only you can" in theirs.err


def test_a_point_that_a_sweeper_draws_and_no_run_can_have_is_told_as_failed(swept):
    directory, done = swept
    drawn = done["drawn"]
    runs = json.loads((directory / "mistakes" / "sweep.json").read_text())["runs"]
    assert [run["status"] for run in runs] == ["finished", "failed", "failed"]
    said = "trainer.max_steps=0 is out of range; use 1 or more"
    assert runs[2]["reason"] == said and f"dpframe: {said}\n" in drawn.err
    assert drawn.code == 1 and re.search(
        rf"^sweep: failed: run 3: seed=0: {said}$", drawn.err, re.M
    )


def test_a_sweeper_that_ends_at_a_failure_is_told_and_a_contradiction_is_one_line(swept):
    _, done = swept
    assert done["ended"].code == 1
    assert "sweep: the sweeper has ended it, as a run failed" in done["ended"].err
    assert "sweep: 1 of 2 runs finished" in done["ended"].out
    assert done["contradiction"].code == 2
    assert done["contradiction"].err == (
        "dpframe: hydra.sweeper.direction=maximize, but the objective is val/loss, where "
        "callbacks.checkpoint.mode is min; leave one out, or change the other\n"
    )


@pytest.mark.parametrize(
    ("callbacks", "objective"),
    [
        ({"checkpoint": None, "early_stopping": None}, ("val/loss", "min", "")),
        (
            {"checkpoint": None, "early_stopping": {"monitor": "val/mae", "mode": "min"}},
            ("val/mae", "min", "callbacks.early_stopping"),
        ),
        (
            {"checkpoint": {"monitor": "a", "mode": "max"}, "early_stopping": {"monitor": "b"}},
            ("a", "max", "callbacks.checkpoint"),
        ),
    ],
)
def test_the_checkpoint_says_what_is_optimised_then_early_stopping(callbacks, objective):
    assert objective_of({"callbacks": callbacks}) == objective


@pytest.mark.parametrize(
    ("sweeper", "mode", "typed", "turned"),
    [
        ({"direction": "minimize"}, "min", [], {"direction": "minimize"}),
        ({"direction": "minimize"}, "max", [], {"direction": "maximize"}),
        ({"direction": ["maximize"]}, "max", [], {"direction": ["maximize"]}),
        ({"optim": {"maximize": False}}, "max", [], {"optim": {"maximize": True}}),
        ({"max_batch_size": None}, "max", [], {"max_batch_size": None}),
        ({"direction": "minimize"}, "max", ["hydra.sweeper.direction=minimize"], None),
        ({"direction": "maximize"}, "min", [], None),
        ({"direction": ["minimize", "minimize"]}, "min", [], None),
    ],
)
def test_a_direction_follows_the_mode_or_is_refused(sweeper, mode, typed, turned):
    node, objective = OmegaConf.create(sweeper), Objective("val/a", mode, "callbacks.checkpoint")
    if turned is not None:
        turn(node, objective, typed)
        assert node == turned
        return
    with pytest.raises(UserError, match=r"^hydra\.sweeper\.direction="):
        turn(node, objective, typed)


def test_each_run_has_a_header_and_the_sweep_a_table_the_best_first(swept):
    directory, done = swept
    out = done["table"].out
    assert re.findall(r"^run \d.*", out, re.M) == [
        "run 1 of 4: seed=0 lr=0.01",
        "run 2 of 4: seed=0 lr=0.1",
        "run 3 of 4: seed=1 lr=0.01",
        "run 4 of 4: seed=1 lr=0.1",
    ]
    rows = [line.split() for line in out.splitlines() if re.match(r"\d +\d +0\.", line)]
    values = {row[0]: float(row[3]) for row in rows}
    assert list(values) == sorted(values, key=values.__getitem__)
    (path,) = re.findall(r"finished; (.*)/sweep\.json", out)
    content = json.loads((directory / path / "sweep.json").read_text())
    runs = {run["number"]: run for run in content["runs"]}
    for number, run in runs.items():
        summary = json.loads((directory / path / run["directory"] / "summary.json").read_text())
        assert run["value"] == summary["metrics"]["val/loss"]
        assert run["value"] == pytest.approx(values[str(number)], rel=1e-3)
        assert run["status"] == "finished" and run["seconds"] > 0
    best = runs[int(rows[0][0])]["directory"]
    assert f"best: run {rows[0][0]}, val/loss {rows[0][3]}, {path}/{best}\n" in out
    assert re.search(r"^0\.01? +\S+ ± \S+ +2$", out, re.M), "no mean over seeds"


def test_another_metric_is_optimised_in_the_direction_that_is_set(swept):
    directory, done = swept
    out = done["metric"].out
    rows = [line.split() for line in out.splitlines() if re.match(r"\d +\d +\d", line)]
    assert "seed  val/mae  seconds" in out
    assert float(rows[0][2]) > float(rows[1][2])
    told = {name: done[name].err.splitlines() for name in ("no mode", "no metric", "misspelt")}
    assert [done[name].code for name in told] == [2, 2, 1]
    assert told["no mode"] == [
        "dpframe: sweep.metric=val/mae: no callback monitors it, so nothing says in which "
        "direction it gets better; add sweep.mode=min or sweep.mode=max"
    ]
    assert told["no metric"] == [
        "dpframe: sweep.mode=max goes with sweep.metric=NAME; set both, or neither"
    ]
    said = "dpframe: sweep.metric=val/mea is not measured; did you mean val/mae?"
    assert told["misspelt"][0] == said and "0 of 2 runs" in done["misspelt"].out


LISTED = ("seed=0,1", "task.optimizer.lr=0.1,0.2", "+vars.fold=1,2")
UNCOMPARED = {  # one line each, before a run
    "sweep.compare=lr": "compare=lr: the runs do not differ in lr; did you mean task.optimizer.lr?",
    "sweep.compare=data.batch_size": (
        "compare=data.batch_size: the runs do not differ in data.batch_size; there is: seed, "
        "task.optimizer.lr, vars.fold"
    ),
    "sweep.over=[seed,vars.flod]": (
        "over=vars.flod: the runs do not differ in vars.flod; did you mean vars.fold?"
    ),
    "sweep.over=seed,vars.fold": (
        "over=seed,vars.fold: a key of the sweep has one value for all its runs; a list of keys is "
        "sweep.over=[seed,vars.fold]"
    ),
    "sweep.over=3": (
        "over=3 is neither a key nor a list of keys; use e.g. sweep.over=[seed,data.fold]"
    ),
    "sweep.over=": (
        "over= is neither a key nor a list of keys; use e.g. sweep.over=[seed,data.fold]"
    ),
    "sweep.compare=": "compare= names no key; use e.g. sweep.compare=task.optimizer.lr",
    "sweep.compare=seed": (
        "compare=seed: means are taken over it; compare another key, or set sweep.over=[]"
    ),
    "sweep.compare=seed sweep.over=[seed,vars.fold]": (
        "compare=seed: means are taken over it; compare another key, or set sweep.over=[vars.fold]"
    ),
    "sweep.comapre=seed": (
        "comapre=seed: there is no key sweep.comapre; did you mean sweep.compare?"
    ),
}


def test_a_key_that_can_not_be_compared_is_one_line_before_the_first_run(tmp_path):
    lines = [["-m", *SHORT_RUNS, *LISTED, *words.split()] for words in UNCOMPARED]
    one_value = ["-m", *SHORT_RUNS, "sweep.compare=seed", "sweep.over=null"]
    done = attempts([*lines, one_value], tmp_path)
    said = [*UNCOMPARED.values()]
    said += ["compare=seed: the runs do not differ in seed; list its values, e.g. seed=0,1,2"]
    for one, words in zip(done, said, strict=True):
        assert (one.code, one.out, one.files) == (2, "", []), one
        assert one.err == f"dpframe: sweep.{words}\n"


def test_one_run_may_have_a_sweeps_keys_from_a_file_and_its_metric_typed(tmp_path):
    keys = "sweep: {jobs: 2, compare: data.batch_size}\n"
    recipe = f"# @package _global_\ndefaults: [boston, _self_]\n{keys}"
    write(tmp_path, {"mine/recipe/swept.yaml": recipe})
    words = ["--config-dir=mine", "recipe=swept", "logger=none", SHORT, "hydra.run.dir=run"]
    more = ["sweep.metric=val/loss", "sweep.mode=min", "sweep.compare=null"]
    resumed = ["--config-dir=mine", "resume=run", "trainer.max_steps=2"]
    once, again = attempts([[*words, *more], resumed], tmp_path)
    assert (once.code, again.code) == (0, 0), (once.err, again.err)


def test_what_a_search_draws_is_compared_where_two_runs_differ_in_one_key(swept):
    _, done = swept
    drawn, without = done["drawn pairs"], done["no pairs"]
    assert re.search(r"^0 +\S+ +1 +0 of 1$", drawn.out, re.M), "of seed 1, which has failed"
    assert (without.code, done["not drawn"].code) == (0, 2), without.err
    key = "task.optimizer.lrr"
    assert f"sweep.compare={key}: the runs do not differ in {key}; " in done["not drawn"].err
    said = "no two runs differ in it alone, so there are no pairs"
    assert f"\nsweep.compare=task.optimizer.lr: {said}\n" in without.out


def test_a_sweeps_directory_has_no_slash_and_a_length_that_files_may_have():
    assert directory_name("checkpoint=a/b.ckpt,seed=1") == "_checkpoint=a_b.ckpt,seed=1"
    assert directory_name("") == "", "nothing differs"
    for letter in ("x", "é", "日"):
        assert len(f"1234{directory_name(letter * 300)}".encode()) < 255
