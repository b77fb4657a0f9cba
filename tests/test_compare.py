"""`mode=compare`: a recipe over strategies, each with the same curve."""

import json
from xml.etree import ElementTree

import pytest
from command import attempts, dpframe

from dpframe.plan.contest import Contest, Entry


def test_a_contest_is_a_table_with_the_speed_up_over_the_first():
    entries = [
        Entry("odd", 2, failure="it has no such device"),
        Entry("cpu", 1, ["cpu"], 100.0, 2.0, None, {"val/loss": 0.5}),
        Entry("ddp", 4, ["cuda:0", "cuda:1"], 250.0, 0.8, [1 << 30, 1 << 20], {"val/loss": 0.5}),
        Entry("streamed", 1, ["cpu"], 50.0),
    ]
    contest = Contest("lenet <b>", entries, "val/loss")
    rows = [line.split() for line in str(contest).splitlines()[2:6]]
    assert rows == [
        ["odd", "2", "it", "has", "no", "such", "device"],
        ["cpu", "1", "2", "s", "100", "1.00", "not", "counted", "0.5"],
        ["ddp", "4", "800", "ms", "250", "2.50", "1", "GiB", "+", "1", "MiB", "0.5"],
        ["streamed", "1", "50", "0.50", "not", "counted"],
    ]
    assert str(contest).endswith("\nfastest: strategy=ddp trainer.gpus=4, 250 samples/s")
    picture = ElementTree.fromstring(contest.svg())
    assert {"cpu", "ddp", "streamed", "lenet <b>"} <= {text.text for text in picture.iter()}
    assert Contest("nothing", entries[:1]).svg() == ""


def test_each_strategy_trains_to_the_same_numbers_and_one_that_can_not_stops_no_other(tmp_path):
    done = dpframe(
        *("mode=compare", "recipe=boston", "trainer.max_epochs=2", "trainer.precision=64"),
        *("compare.strategies=[cpu,ddp,data_parallel]", "compare.gpus=[2,999]"),
        *("trainer.accelerator=auto", "hydra.run.dir=compared"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "compared" / "summary.json").read_text())["compare"]
    found = {(entry["strategy"], entry["replicas"]): entry for entry in summary}
    assert list(found) == [
        ("cpu", 1),
        *(("ddp", 2), ("ddp", 999)),
        *(("data_parallel", 2), ("data_parallel", 999)),
    ]
    whole = [entry for entry in summary if not entry["failure"]]
    assert [entry["replicas"] for entry in whole] == [1, 2, 2]
    for entry in whole:
        assert entry["metrics"] == pytest.approx(whole[0]["metrics"], rel=1e-12)
        assert entry["seconds"] == pytest.approx(404 / entry["rows_per_second"])
    assert "999 replicas on" in found["ddp", 999]["failure"]
    assert (tmp_path / "compared" / "compare.svg").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["compared"]


def test_mistakes_are_one_line(tmp_path):
    lines = {
        "compare.strategies=[dpp]": "compare.strategies=dpp is not one of cpu, data_parallel",
        "compare.gpus=[0]": "compare.gpus: 0 is out of range; use 1 or more",
        "checkpoint=a.ckpt": "mode=compare begins each training with fresh weights; leave it out",
    }
    (tmp_path / "a.ckpt").touch()
    tried = attempts([["recipe=boston", "mode=compare", line] for line in lines], tmp_path)
    for said, each in zip(lines.values(), tried, strict=True):
        assert each.code == 2 and said in each.err and each.err.count("\n") == 1, each
