"""`mode=compare`: a recipe over strategies, each with the same curve."""

import json
import re
import sys

import pytest
import torch
from command import attempts, dpframe

from dpframe.config.compose import composed
from dpframe.modes.measure import WARM_UPS
from dpframe.plugins.lab import variants
from dpframe.plugins.lab.contest import Entry, describe, train


@pytest.mark.parametrize("count", [1, WARM_UPS, WARM_UPS + 1])
def test_a_training_that_ends_with_its_warm_up_has_a_rate(count):
    job = composed(["recipe=boston", "strategy=cpu", f"trainer.max_steps={count}"])
    assert train(job, "cpu").rows_per_second > 0


def test_a_contest_is_a_table_with_the_speed_up_over_the_first():
    entries = [
        Entry("odd", 2, failure="it has no such device"),
        Entry("cpu", 1, ["cpu"], 100.0, 2.0, None, {"val/loss": 0.5}),
        Entry("ddp", 4, ["cuda:0", "cuda:1"], 250.0, 0.8, [1 << 30, 1 << 20], {"val/loss": 0.5}),
        Entry("streamed", 1, ["cpu"], 50.0),
    ]
    title, _, _, *rows, failed, _, fastest = describe("lenet", entries, "val/loss").splitlines()
    assert title == "lenet"
    assert [re.split(" {2,}", row) for row in rows] == [
        ["cpu", "1", "2 s", "100", "1.00", "not counted", "0.5"],
        ["ddp", "4", "800 ms", "250", "2.50", "1 GiB + 1 MiB", "0.5"],
        ["streamed", "1", "50", "0.50", "not counted"],
    ]
    assert failed == "failed: strategy=odd trainer.gpus=2: it has no such device"
    assert fastest == "fastest: strategy=ddp trainer.gpus=4, 250 samples/s"


def test_a_line_says_where_a_strategy_ends_elsewhere():
    ends = [("ddp", 2, 0.256), ("cpu", 1, 0.165), ("data_parallel", 2, 0.16500001)]
    entries = [Entry(a, n, [], 9.0, metrics={"val/loss": value}) for a, n, value in ends]
    *_, line = describe("summed", entries, "val/loss").splitlines()
    said = "another val/loss: 0.256 by strategy=ddp trainer.gpus=2, 0.165 by strategy=cpu; in float"
    assert line.startswith(said)
    assert "another val/loss" not in describe("summed", entries[1:], "val/loss")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, [("cpu", 1), ("ddp", 2), ("fsdp", 2), ("data_parallel", 2)]),
        (["ddp"], [("ddp", 1), ("ddp", 2)]),
    ],
)
def test_there_is_a_row_of_one_replica(names, expected):
    job = composed(["recipe=boston", "trainer.gpus=2"])
    found = [(variant.name, variant.replicas) for variant in variants.list_variants(job, names)]
    assert sorted(found) == sorted(expected)


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
    files = {path.name for path in (tmp_path / "compared").iterdir()}
    assert files == {".hydra", ".lock", "compare.txt", "summary.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["compared"]


@pytest.mark.parametrize(
    "gpus, counts", [(0, [2]), (1, [2]), (2, [2]), (4, [2, 4]), (6, [2, 4, 6])]
)
def test_all_gpus_are_tried_also_where_they_are_no_power_of_two(monkeypatch, gpus, counts):
    monkeypatch.setattr(variants, "present", lambda accelerator: [torch.device("cpu")] * gpus)
    assert variants._counts(composed(["recipe=boston"])) == counts


def test_a_strategy_whose_package_is_missing_is_left_out_unless_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    job = composed(["recipe=boston", "trainer.accelerator=cpu"])
    assert {variant.name for variant in variants.list_variants(job)} == {
        "cpu",
        "data_parallel",
        "ddp",
        "fsdp",
    }
    (named,) = variants.list_variants(job, ["ray"], [2])
    assert "strategy=ray needs Ray Train" in named.failure


def test_mistakes_are_one_line(tmp_path):
    lines = {
        "compare.strategies=[dpp]": "compare.strategies=dpp is not one of cpu, data_parallel",
        "compare.gpus=[0]": "compare.gpus=0 is out of range; use 1 or more",
        "checkpoint=a.ckpt": "mode=compare begins each training with fresh weights; leave it out",
    }
    (tmp_path / "a.ckpt").touch()
    tried = attempts([["recipe=boston", "mode=compare", line] for line in lines], tmp_path)
    for said, each in zip(lines.values(), tried, strict=True):
        assert each.code == 2 and said in each.err and each.err.count("\n") == 1, each
