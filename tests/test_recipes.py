"""The recipes from end to end: what they print, how well they learn, what they leave behind."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dpframe import Task, UserError
from dpframe.cli.compose import composed
from dpframe.cli.run import run
from dpframe.recipes.boston import BostonData


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def done(directory: Path, *overrides: str) -> dict[str, Any]:
    """A run's summary, as `dpframe …` would give it."""
    return run(composed([f"hydra.run.dir={directory}", "trainer.threads=1", *overrides]))


# boston


def test_boston_reaches_a_test_rmse_below_5(tmp_path):
    summary = done(tmp_path / "fit", "recipe=boston", "seed=0")
    assert (summary["epochs"], summary["steps"], summary["replicas"]) == (100, 400, 1)
    best = f"checkpoint={tmp_path}/fit/checkpoints/last.ckpt"
    tested = done(tmp_path / "test", "recipe=boston", "mode=test", best)
    assert tested["metrics"]["test/rmse"] < 5
    assert tested["metrics"]["test/loss"] == summary["metrics"]["val/loss"]
    assert json.loads((tmp_path / "fit" / "summary.json").read_text()) == summary


@pytest.fixture(scope="module")
def boston(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("boston")
    done(directory, "recipe=boston", "trainer.max_epochs=3")
    return directory


def test_a_run_leaves_its_checkpoints_its_log_its_config_and_its_summary(boston):
    left = {str(path.relative_to(boston)) for path in boston.rglob("*") if path.is_file()}
    assert left >= {
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "run.log",
        "summary.json",
        "metrics.csv",
        ".hydra/config.yaml",
    }
    assert [line for line in (boston / "run.log").read_text().splitlines() if "epoch 3/3" in line]


def test_validating_the_best_checkpoint_gives_its_validation_loss_again(boston, tmp_path):
    with (boston / "metrics.csv").open() as file:
        losses = [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]]
    best = f"checkpoint={boston}/checkpoints/best.ckpt"
    again = done(tmp_path, "recipe=boston", "mode=validate", best)
    assert again["metrics"]["val/loss"] == min(losses)


def test_boston_predicts_102_rows_in_the_order_of_the_data_set(boston, tmp_path):
    weights = f"checkpoint={boston}/checkpoints/best.ckpt"
    done(tmp_path, "recipe=boston", "mode=predict", weights, "data.batch_size=10")
    with (tmp_path / "predictions.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["output"]
    data = BostonData()
    data.setup()
    state = torch.load(boston / "checkpoints" / "best.ckpt", weights_only=True)["task"]
    layers = [(state[f"net.{n}.weight"], state[f"net.{n}.bias"]) for n in (0, 2, 4)]
    wanted = data.test_dataset().tensors[0]
    for number, (weight, bias) in enumerate(layers):
        wanted = torch.nn.functional.linear(wanted.relu() if number else wanted, weight, bias)
    assert len(rows) == 102
    given = torch.tensor([[float(cell) for cell in row] for row in rows])
    assert torch.allclose(given, wanted, rtol=1e-5)
    assert not torch.allclose(given, wanted.flip(0), rtol=1e-5)


def test_another_strategy_gives_the_same_predictions(boston, tmp_path):
    weights = f"checkpoint={boston}/checkpoints/best.ckpt"
    texts = []
    for name, strategy in {
        "one": [],
        "three": ["strategy=data_parallel", "trainer.gpus=3"],
    }.items():
        done(tmp_path / name, "recipe=boston", "mode=predict", weights, *strategy)
        texts.append((tmp_path / name / "predictions.csv").read_text().split())
    assert len(texts[0]) == len(texts[1]) == 103
    numbers = [torch.tensor([float(number) for number in text[1:]]) for text in texts]
    assert torch.allclose(*numbers, rtol=1e-5)


def test_debug_takes_one_batch_of_everything(tmp_path):
    summary = done(tmp_path, "recipe=boston", "experiment=debug", "data.batch_size=16")
    assert (summary["epochs"], summary["steps"]) == (1, 1)
    assert {"train/loss", "val/loss"} <= summary["metrics"].keys()
    tables = csv.DictReader((tmp_path / "metrics.csv").open())
    assert any(row["step/loss"] for row in tables)


def test_overfit_brings_the_loss_of_one_batch_down_and_validates_once(tmp_path):
    summary = done(tmp_path, "recipe=boston", "experiment=overfit", "data.batch_size=16")
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    losses = [float(row["train/loss"]) for row in rows]
    assert (summary["steps"], len(losses)) == (100, 100)
    assert losses[-1] < losses[0] / 100
    assert losses[-10:] == sorted(losses[-10:], reverse=True)  # of one and the same batch
    assert [int(row["step"]) for row in rows if row["val/loss"]] == [100]


# shapes

IN_MODEL = "\tIn Model: input size torch.Size([{0}, 5]) output size torch.Size([{0}, 2])"
OUTSIDE = "Outside: input size torch.Size([{0}, 5]) output_size torch.Size([{0}, 2])"
TABLE = {
    1: ([30], [10]),
    2: ([15, 15], [5, 5]),
    3: ([10, 10, 10], [4, 4, 2]),
    4: ([8, 8, 8, 6], [3, 3, 3, 1]),
    8: ([4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2]),
}


def table(replicas: int) -> list[str]:
    """Three batches of 30 rows, then one of 10."""
    whole, rest = TABLE[replicas]
    batches = [whole, whole, whole, rest]
    return [
        line
        for shares in batches
        for line in [*(IN_MODEL.format(rows) for rows in shares), OUTSIDE.format(sum(shares))]
    ]


def shown(text: str) -> list[str]:
    return [line for line in text.splitlines() if "size" in line]


@pytest.mark.parametrize("replicas", TABLE)
def test_shapes_prints_what_each_replica_of_data_parallel_gets(tmp_path, capsys, replicas):
    done(tmp_path, "recipe=shapes", "strategy=data_parallel", f"trainer.gpus={replicas}")
    assert shown(capsys.readouterr().out) == table(replicas)


def test_shapes_prints_the_same_on_four_ranks_of_ddp(tmp_path):
    overrides = ["recipe=shapes", "strategy=ddp", "trainer.gpus=4", f"hydra.run.dir={tmp_path}"]
    ran = subprocess.run(
        [sys.executable, "-m", "dpframe", *overrides], capture_output=True, text=True, check=True
    )
    assert shown(ran.stdout) == table(4)
    with (tmp_path / "predictions.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == [*(f"input_{n}" for n in range(5)), "output_0", "output_1"]
    assert len(rows) == 100


# lenet


def test_lenet_learns_the_digits_and_reports_its_speed(tmp_path, capsys):
    summary = done(tmp_path, "recipe=lenet", "trainer.max_epochs=4", "callbacks.progress=null")
    assert summary["metrics"]["val/accuracy"] > 0.9
    accuracy = f"{summary['metrics']['val/accuracy']:.3f}"
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith("accuracy")]
    assert len(said) == 1
    assert re.fullmatch(rf"accuracy {accuracy}, \d+\.\d\d seconds an epoch on \S+", said[0])


# Predictions of other kinds


class Ragged(Task):
    """As many numbers a row as its index says."""

    def predict_step(self, batch: Any) -> Any:
        return [torch.arange(int(row[0].abs() * 5)) for row in batch[0]]


class Named(Task):
    def predict_step(self, batch: Any) -> Any:
        return {"name": [f"row {float(row[0]):.3f}" for row in batch[0]], "sum": batch[0].sum(1)}


class Numpy(Task):
    def predict_step(self, batch: Any) -> Any:
        return batch[0].numpy()[:, :2], {"nested": batch[0].numpy()[:, :, None]}


class Unkept(Task):
    def predict_step(self, batch: Any) -> Any:
        return {"where": [Path("here") for _ in batch[0]]}


def predicted(tmp_path: Path, task: type[Task]) -> Path:
    where = f"task._target_={__name__}.{task.__name__}"
    done(tmp_path, "recipe=shapes", where, "~task.net", "data.features=5", "callbacks.shapes=null")
    (path,) = tmp_path.glob("predictions.*")
    return path


def test_ragged_predictions_are_kept_as_tensors_that_load_without_running_code(tmp_path):
    path = predicted(tmp_path, Ragged)
    rows = torch.load(path, weights_only=True)
    assert path.name == "predictions.pt"
    assert len(rows) == 100
    assert len({len(row) for row in rows}) > 1


def test_text_beside_numbers_is_a_table(tmp_path):
    path = predicted(tmp_path, Named)
    with path.open() as file:
        header, *rows = csv.reader(file)
    assert header == ["name", "sum"]
    assert len(rows) == 100
    assert all(name.startswith("row ") and float(number) for name, number in rows)


def test_numpy_arrays_are_kept_as_tensors(tmp_path):
    kept = torch.load(predicted(tmp_path, Numpy), weights_only=True)
    assert kept[0].shape == (100, 2)


def test_predictions_that_could_not_be_loaded_again_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"^predict_step returned a \w*Path; return tensors, numb"):
        predicted(tmp_path, Unkept)
