"""The table of a sweep, its best run, its means over seeds, and what a later sweep reads of it."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dpframe import UserError
from dpframe.cli.outcome import Outcome, Result, outcome_of
from dpframe.cli.picture import svg
from dpframe.cli.results import Results, read_earlier, short
from dpframe.config.objective import Objective

RUNS = [  # seed, lr, status, value
    (0, "0.1", "finished", 3.0),
    (1, "0.1", "finished", 5.0),
    (0, "0.01", "finished", 2.0),
    (1, "0.01", "failed", None),
    (0, "0.001", "pruned", 1.0),
    (1, "0.001", "missing", None),
]


def results(directory: Path = Path("here"), mode: str = "min") -> Results:
    made = Results(
        directory=directory,
        objective=Objective("val/loss", mode),
        typed=["recipe=boston", "seed=0,1", "task.optimizer.lr=0.1,0.01,0.001"],
        fixed={"recipe"},
        total=len(RUNS),
        sweeper="basic",
    )
    for number, (seed, rate, status, value) in enumerate(RUNS, start=1):
        overrides = ["recipe=boston", f"seed={seed}", f"task.optimizer.lr={rate}"]
        made.runs.append(Result(number, overrides, f"{number - 1}_run", status, value, 1.25, "why"))
    return made


@pytest.mark.parametrize(("mode", "best", "order"), [("min", 3, "531246"), ("max", 2, "213546")])
def test_runs_are_sorted_by_the_metric_and_the_best_is_one_that_has_finished(mode, best, order):
    made = results(mode=mode)
    assert "".join(str(run.number) for run in made.ranked()) == order
    assert made.best is not None and made.best.number == best
    head, rule, *rows = made.table().splitlines()
    assert head.split() == ["run", "seed", "lr", "val/loss", "seconds", "status", "directory"]
    assert "".join(row[0] for row in rows) == order
    assert made.summary()[0].startswith(f"best: run {best}, val/loss ")
    assert rows[order.index("3")].split() == ["3", "0", "0.01", "2", "1.2", "finished", "2_run"]


def test_numbers_have_four_significant_digits():
    made = results()
    made.runs[2].value = 1.23456
    assert "  1.235  " in made.table().splitlines()[3]
    assert ", val/loss 1.235, " in made.summary()[0]


def test_runs_that_differ_by_the_seed_alone_are_averaged_with_their_standard_deviation():
    best, one, none = results().means()
    assert best.overrides == ["task.optimizer.lr=0.01"] and (best.runs, best.left_out) == ([3], [4])
    assert (one.runs, one.mean, one.sd) == ([1, 2], 4.0, pytest.approx(2**0.5))
    assert (none.runs, none.left_out, none.mean) == ([], [5, 6], None)
    head, _, *rows = results().summary()[-1].splitlines()
    assert head.split() == ["lr", "val/loss,", "mean", "±", "sd", "over", "seed", "runs"]
    assert [row.split() for row in rows] == [
        ["0.01", "2", "1", "of", "2"],
        ["0.1", "4", "±", "1.41", "2"],
        ["0.001", "0", "of", "2"],
    ], "one run has no standard deviation"
    made = results()
    made.fixed.add("seed")
    assert made.means() == [], "one seed has no mean"


def test_an_infinite_value_in_an_earlier_sweeps_file_is_in_no_mean(tmp_path):
    made = results(tmp_path)
    made.runs[1].value = float("-inf")
    assert made.means() == []
    made.save()
    made.save_table()
    path = tmp_path / "sweep.json"
    path.write_text(path.read_text().replace('"value": null', '"value": -Infinity', 1))
    assert read_earlier(tmp_path).runs == made.runs and svg(made)


def test_a_run_is_called_by_what_it_differs_in():
    made = results()
    assert made.title(made.runs[2]) == "run 3 of 6: seed=0 lr=0.01"
    made.total = None
    assert made.title(made.runs[2]) == "run 3: seed=0 lr=0.01"


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["task.optimizer.lr", "seed"], ["lr", "seed"]),
        (["a.x.lr", "b.x.lr"], ["a.x.lr", "b.x.lr"]),
        (["task.lr", "task.net.lr"], ["task.lr", "net.lr"]),
        (["+lr", "task.lr"], ["lr", "task.lr"]),
    ],
)
def test_a_key_is_called_by_as_few_words_as_tell_it_from_the_others(keys, names):
    assert list(short(keys).values()) == names


@pytest.mark.parametrize(
    ("summary", "outcome"),
    [
        ({"best": {"val/a": 3.0}, "metrics": {"val/a": 4.0}}, Outcome("finished", 3.0)),
        ({"best": {}, "metrics": {"val/a": 4.0}}, Outcome("finished", 4.0)),
        ({"metrics": {}}, Outcome("finished", None)),
        ({"metrics": {"val/a": 4.0}, "stopped": "pruned: worse"}, Outcome("pruned", 4.0)),
        ({"metrics": {"val/a": float("nan")}}, Outcome("failed", None, "val/a is nan")),
        ({"best": {"val/a": float("inf")}}, Outcome("failed", None, "val/a is inf")),
        ({"best": {}, "metrics": {"val/a": None}}, Outcome("failed", None, "val/a is not finite")),
    ],
)
def test_what_a_run_came_to_is_the_best_value_in_its_summary(summary, outcome):
    assert outcome_of(summary, "val/a") == outcome


def test_the_files_of_a_sweep_have_what_the_table_has(tmp_path):
    made = results(tmp_path)
    made.save()
    made.save_table()
    assert read_earlier(tmp_path).runs == made.runs
    assert read_earlier(tmp_path).overrides == made.typed
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert (content["metric"], content["mode"], content["best"]) == ("val/loss", "min", 3)
    assert [mean["mean"] for mean in content["means"]] == [2.0, 4.0, None]
    with open(tmp_path / "sweep.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == list("531246")
    assert rows[2]["task.optimizer.lr"] == "0.1" and rows[2]["val/loss"] == "3.0"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"runs": []}',
        '{"runs": [1], "overrides": [], "sweeper": ""}',
        '{"runs": [{"number": 1}], "overrides": [], "sweeper": ""}',
        '{"runs": [{"number": "1", "overrides": []}], "overrides": [], "sweeper": ""}',
        '{"runs": [{"number": 1, "overrides": "a"}], "overrides": [], "sweeper": ""}',
        '{"runs": [{"number": 1, "overrides": [], "status": "x"}], "overrides": [], "sweeper": ""}',
        '{"runs": [{"number": 1, "overrides": [], "value": []}], "overrides": [], "sweeper": ""}',
        '{"runs": [{"number": 1, "overrides": [], "x": 1}], "overrides": [], "sweeper": ""}',
        '{"runs": [], "overrides": [1], "sweeper": ""}',
        '{"runs": [], "overrides": "ab", "sweeper": ""}',
        "[" * 100_000,
    ],
)
def test_a_file_that_no_sweep_has_written_is_one_line(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(UserError, match=r"sweep\.json (can't be read|is not what a sweep)"):
        read_earlier(tmp_path)


def test_a_directory_without_one_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"there is no sweep\.json in it; name a sweep's"):
        read_earlier(tmp_path)


def test_the_picture_has_a_panel_for_each_key_and_a_point_for_each_run_with_a_value():
    picture = ElementTree.fromstring(svg(results()))
    points = [each for each in picture.iter() if each.tag.endswith("circle")]
    assert len(points) == 2 * 4, "two keys, four runs with a value"
    rates = points[4:]
    assert len({point.get("cx") for point in rates}) == 3
    places = {point[0].text: float(point.get("cx", 0)) for point in rates}
    middle = next(x for title, x in places.items() if "lr=0.01:" in str(title))
    assert middle == pytest.approx(sum((min(places.values()), max(places.values()))) / 2), "no log"
    assert [point.get("fill") for point in points].count("firebrick") == 2
    best = [point[0].text for point in points if point.get("fill") == "firebrick"]
    assert best == ["run 3 of 6: seed=0 lr=0.01: 2"] * 2


def test_a_metric_that_spans_much_is_drawn_by_its_logarithm():
    made = results()
    made.runs = made.runs[:3]
    for run, value in zip(made.runs, (1.0, 100.0, 10.0), strict=True):
        run.value = value
    points = ElementTree.fromstring(svg(made)).findall("{*}circle")
    heights = sorted(float(point.get("cy", 0)) for point in points[:3])
    assert heights[1] == pytest.approx((heights[0] + heights[2]) / 2, abs=0.1)


def test_there_is_no_picture_of_nothing_and_none_with_markup_of_a_value():
    made = results()
    made.runs = made.runs[-1:]
    assert svg(made) == ""
    made = results()
    made.runs[0].overrides[1] = "seed=<script>"
    assert "<script>" not in svg(made) and ElementTree.fromstring(svg(made)) is not None


def test_a_run_writes_a_line_as_it_begins_and_ends_whatever_there_are_of_others(tmp_path):
    made = results(tmp_path)
    made.runs = [Result(number, [f"seed={number}"]) for number in range(1, 101)]
    whole = 0
    for number, run in enumerate(made.runs):
        run.status = "running"
        made.note(run)
        run.status, run.value = "finished", float(number)
        made.note(run)
        whole = whole or (tmp_path / "sweep.json").stat().st_mtime_ns
    assert (tmp_path / "sweep.json").stat().st_mtime_ns == whole, "written once"
    lines = (tmp_path / "sweep.jsonl").read_text().splitlines()
    assert len(lines) == 200 and max(map(len, lines)) < 200
    assert read_earlier(tmp_path).runs == made.runs
    with open(tmp_path / "sweep.jsonl", "a") as journal:
        journal.write('{"number": 100, "over')
    assert read_earlier(tmp_path).runs == made.runs, "a killed sweep has not ended a line"
    made.save()
    assert not (tmp_path / "sweep.jsonl").exists()
    assert read_earlier(tmp_path).runs == made.runs


def test_a_sweep_looks_once_at_each_run_for_what_the_runs_differ_by(monkeypatch):
    made, looks = results(), []
    values = Result.values.fget
    monkeypatch.setattr(Result, "values", property(lambda run: looks.append(1) or values(run)))
    made.runs = [Result(number, [f"seed={number}"]) for number in range(1, 101)]
    assert [made.title(run) for run in made.runs][-1] == "run 100 of 6: seed=100"
    assert len(looks) == 200
    made.runs.append(Result(101, ["+vars.x=2"]))
    assert made.keys() == ["seed", "vars.x"]
