"""`dpframe runs`: a table of what was trained, and two runs side by side."""

import json
import math

import pytest
from command import attempts, cold_attempts, write
from forked import fresh

from dpframe.cli.main import Parser
from dpframe.cli.runs import HELP, runs
from dpframe.errors import UserError
from dpframe.modes.directory import Directory
from dpframe.modes.ending import write_summary

BOSTON = ["recipe=boston", "trainer.max_steps=2", "callbacks.progress=null", "logger=none"]


def run_of(folder, began, *overrides, config="", **summary):
    """A run directory as a training leaves it."""
    origin = {"began": began, "commit": "0" * 40, "packages": {"torch": "2.13"}}
    texts = {"origin.json": json.dumps(origin), "overrides.yaml": json.dumps([*overrides])}
    write(folder, {f".hydra/{name}": text for name, text in texts.items()})
    write(folder, {".hydra/config.yaml": config or "mode: fit\nrecipe: boston\n"})
    if summary:
        own = {"mode": "fit", "status": "finished", "steps": 4, "origin": origin, **summary}
        write(folder, {"summary.json": json.dumps(own)})


@pytest.fixture
def trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    best, last = {"best": {"val/loss": 2.0}}, {"metrics": {"val/loss": 3.0, "val/mae": 1.0}}
    best |= {"best_metrics": {"val/loss": 2.0, "val/mae": 1.5}}
    config = "task: {lr: 0.1, net: {width: 8}}\nname: low\n"
    lr = "task.optimizer.lr=0.1"
    run_of(tmp_path / "outputs/boston/1", "2026-01-02T10:00:00", lr, config=config, **best, **last)
    named = {"name": "off", "tags": ["ablation", "b"], "best": {"val/loss": 1.0}}
    config = "task: {lr: 0.2, net: {width: 8}}\nname: off\n"
    run_of(
        tmp_path / "outputs/boston/2_off",
        "2026-01-01T10:00:00",
        "task.optimizer.lr=0.2",
        "recipe=boston",
        "hydra.run.dir=x",
        "name=off",
        config=config,
        **named,
    )
    run_of(tmp_path / "multirun/boston/1/0_seed=1", "2026-01-03T10:00:00", "seed=1", "task.lr=1")
    run_of(tmp_path / "outputs/boston/3", "2026-01-04", config="mode: test\n")  # no training
    return tmp_path


def listed(*words: str) -> list[list[str]]:
    lines = runs(words, Parser(prog="dpframe runs", add_help=False)).splitlines()
    return [line.split() for line in lines[2:]]


def found(*words: str) -> list[str]:
    return [run["directory"] for run in told(*words)]


def told(*words: str):
    return json.loads(runs([*words, "--json"], Parser(prog="dpframe runs", add_help=False)))


FIRST, NAMED, KILLED = "outputs/boston/1", "outputs/boston/2_off", "multirun/boston/1/0_seed=1"


def test_the_table_has_what_was_typed_what_came_out_and_how_it_ended_the_newest_last(trained):
    when = ["2026-01-01", "10:00"]
    assert listed() == [
        ["off", "optimizer.lr=0.2", "1", "4", "finished", *when, NAMED],
        ["optimizer.lr=0.1", "2", "3", "4", "finished", "2026-01-02", "10:00", FIRST],
        ["seed=1", "task.lr=1", "0", "killed", "2026-01-03", "10:00", KILLED],
    ]
    assert found("outputs") == [NAMED, FIRST] and found(KILLED) == [KILLED]


@pytest.mark.parametrize(
    ("words", "directories"),
    [
        (["--where", "tags=ablation"], [NAMED]),
        (["--where=name=o*", "--where=tags=none"], []),
        (["--where", "optimizer.lr=0.1"], [FIRST]),
        (["--where", "status=killed"], [KILLED]),
        (["--sort", "val/loss"], [NAMED, FIRST, KILLED]),
        (["--sort=-val/loss"], [FIRST, NAMED, KILLED]),
        (["--sort", "val/mae"], [FIRST, NAMED, KILLED]),
        (["--sort=-when"], [KILLED, FIRST, NAMED]),
    ],
)
def test_runs_are_chosen_and_sorted(trained, words, directories):
    assert found(*words) == directories


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no run in nowhere; name a directory"),
        (["--where", "tag=x"], "--where tag=x: no run has tag; did you mean tags?"),
        (["--where", "tags"], "--where tags: use KEY=VALUE"),
        (["--sort", "val/los"], "--sort val/los: no run has it; did you mean val/loss?"),
        (["of", FIRST], "of is neither a run's directory nor its name; did you mean off?"),
        (["a", "b", "c"], "name one directory, or two runs to compare"),
        (["a", "b", "--sort=when"], "leave out --where and --sort"),
        (["--srt"], "there is no option --srt; did you mean --sort?"),
    ],
)
def test_a_mistake_is_a_line(trained, words, said):
    with pytest.raises(UserError) as raised:
        listed(*words)
    assert said in str(raised.value)


def test_two_runs_are_shown_side_by_side_with_how_their_configs_differ(trained):
    lines = listed("off", FIRST)
    for line in (["steps", "4", "4"], ["best", "val/loss", "1", "2"], ["task.lr", "0.2", "0.1"]):
        assert line in lines
    assert ["best", "val/mae", "1.5"] in lines, "only the one has it"
    assert not any("width" in line[0] or line[0] in ("torch", "name") for line in lines)
    assert told("off", FIRST)["config"] == {"task.lr": [0.2, 0.1]}


def test_a_number_that_is_not_finite_is_null_for_programs_and_nan_in_the_table(trained):
    write_summary(trained / KILLED, {"mode": "fit", "best": {"val/loss": math.inf}})
    old = {"metrics": {"val/loss": math.nan}, "best": {"val/loss": 5.0}}  # as it once was written
    run_of(trained / "multirun/boston/1/1", "2026-01-04T10:00:00", **old)
    text = (trained / KILLED / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["best"] == {"val/loss": None}
    assert "nan" in listed("multirun")[0] and "nan" in listed("multirun")[1]
    words = ["multirun", "--sort=val/loss", "--json"]
    printed = runs(words, Parser(prog="dpframe runs", add_help=False))
    old, new = json.loads(printed, parse_constant=pytest.fail)
    assert (old["metrics"], new["best"]) == ({"val/loss": None}, {"val/loss": None})
    assert ["best", "val/loss", "nan", "5"] in listed(KILLED, "multirun/boston/1/1")


def test_a_run_that_is_on_is_running_and_a_damaged_one_is_listed_all_the_same(trained):
    directory = Directory(trained / FIRST, is_given=True)
    directory.make({"origin.json": '{"began": "2026-01-09"}'})  # a resume
    write(trained / NAMED, {"summary.json": "[", ".hydra/overrides.yaml": "{"})
    write(trained / KILLED, {"summary.json": '{"steps": "x", "best": 3, "tags": {}, "origin": 0}'})
    status = {run["directory"]: run["status"] for run in fresh(told, folder=trained)}
    assert status == {NAMED: "killed", KILLED: "killed", FIRST: "running"}
    directory.release()
    assert [run["status"] for run in told()] == ["killed"] * 3


def test_the_table_of_real_runs_comes_without_torch(tmp_path):
    named = [*BOSTON, "name=low", "task.optimizer.lr=0.1", "hydra.run.dir=a"]
    done = attempts([named, [*BOSTON, "hydra.run.dir=b"]], tmp_path)
    assert [one.code for one in done] == [0, 0]
    lines = [["runs", "."], ["runs", "a", "b"], ["runs", "--help"]]
    (table, pair, help), heavy = cold_attempts(lines, tmp_path)
    assert heavy == [] and help.out == f"{HELP}\n"
    row = table.out.splitlines()[2].split()
    assert row[:5] == ["low", "max_steps=2", "progress=null", "logger=none", "lr=0.1"]
    assert [line.split() for line in pair.out.splitlines() if "optimizer.lr" in line] == [
        ["task.optimizer.lr", "0.1", "0.01"]
    ]
