"""Runs and checkpoints of an earlier dpframe are read, and go on: see data/old/README.md.

The numbers were measured on another machine, whose BLAS and number of threads may have added up in
another order. In float64 that shows in the last of 16 digits, and a few more after eleven steps: a
part in a million is far above it, and far below what one lost moment or weight would change.
"""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from command import attempts

import dpframe
from dpframe.recipes.boston import BostonData

OLD = Path(__file__).parent / "data/old"
NUMBERS = json.loads((OLD / "numbers.json").read_text())
BEST = "checkpoint=run/checkpoints/best.ckpt"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(OLD / "run", tmp_path / "run")
    return tmp_path


def near(numbers):
    return pytest.approx(numbers, rel=1e-6)


@pytest.mark.parametrize("resume", ["run", "run/checkpoints/last.ckpt"])
def test_an_old_run_goes_on_within_its_epoch_to_the_same_end_without_a_gap_in_its_curve(
    folder, resume
):
    # Without resume_anyway=true: nothing has changed that decides the numbers. Only if the code of
    # recipes/boston.py has to change, it is needed here.
    (done,) = attempts([[f"resume={resume}"]], folder)
    assert done.code in (0, None), done.err
    summary = json.loads((folder / "run/summary.json").read_text())
    assert (summary["epochs"], summary["steps"], summary["best_step"]) == (3, 21, 21)
    assert summary["metrics"] == near(NUMBERS["resumed"])
    curve, wanted = (rows(path) for path in (folder / "run/metrics.csv", OLD / "metrics.csv"))
    assert [*map(list, curve)] == [*map(list, wanted)]
    for row, row_wanted in zip(curve, wanted, strict=True):
        assert row == near(row_wanted)


def rows(path: Path) -> list[dict[str, float]]:
    """Without what is measured by a clock."""
    with path.open() as file:
        return [
            {n: float(v) for n, v in row.items() if v and n != "step/samples_per_second"}
            for row in csv.DictReader(file)
        ]


def test_an_old_checkpoint_is_tested_with_the_config_of_its_run(folder):
    tested, predicted = (
        [f"mode={mode}", BEST, f"hydra.run.dir={mode}"] for mode in ("test", "predict")
    )
    for done in attempts([tested, predicted], folder):
        assert done.code in (0, None), done.err
    summary = json.loads((folder / "test/summary.json").read_text())
    assert summary["metrics"] == near(NUMBERS["tested"])
    lines = (folder / "predict/predictions.csv").read_text().split()[1:]
    assert len(lines) == 102
    assert [*map(float, lines[:5])] == near(NUMBERS["predicted"])


def test_a_new_run_begins_with_the_weights_of_an_old_checkpoint(folder):
    line = ["recipe=boston", BEST, "trainer.max_steps=1", "trainer.precision=64"]
    (done,) = attempts([[*line, "task.optimizer.lr=1e-12", "hydra.run.dir=new"]], folder)
    assert done.code in (0, None), done.err
    metrics = json.loads((folder / "new/summary.json").read_text())["metrics"]
    assert metrics["val/loss"] == near(NUMBERS["tested"]["test/loss"])  # of the same rows


@pytest.mark.parametrize("path", ["run", "run/checkpoints/best.ckpt"])
def test_an_old_task_is_loaded_with_its_averaged_weights(folder, path):
    task = dpframe.load(folder / path)
    assert not task.training
    data = BostonData()
    data.setup()
    held_out = [column.double() for column in data.test_dataset().tensors]
    with torch.no_grad():
        predicted = task.predict_step(held_out)[:5, 0].tolist()
    assert predicted == near(NUMBERS["predicted"])
