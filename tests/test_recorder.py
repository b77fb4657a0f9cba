"""What a run tells its loggers, and its directory, in which it writes alone."""

from pathlib import Path
from typing import Any

import pytest
from small import fitted

from dpframe import UserError
from dpframe.callbacks import Checkpoint
from dpframe.loggers import CSV
from dpframe.trainer.recorder import hyperparameters

CONFIG = {
    "recipe": "boston",
    "seed": 3,
    "mode": "fit",
    "checkpoint": None,
    "task": {
        "_target_": "dpframe.recipes.boston.Boston",
        "net": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.ReLU"}]},
        "optimizer": {"_target_": "torch.optim.Adam", "_partial_": True, "lr": 0.01},
        "scheduler": None,
    },
    "data": {"_target_": "dpframe.recipes.boston.BostonData", "batch_size": 128},
    "trainer": {"max_epochs": 5, "precision": "64", "skip_dynamo_import": True, "gpus": [0, 1]},
    "callbacks": {"checkpoint": {"_target_": "dpframe.callbacks.checkpoint.Checkpoint"}},
    "logger": {"csv": {"file": "metrics.csv"}},
}


def test_hyperparameters_are_what_decides_the_curve() -> None:
    assert hyperparameters(CONFIG) == {
        "recipe": "boston",
        "seed": 3,
        "task.net": "Sequential",
        "task.optimizer": "Adam",
        "task.optimizer.lr": 0.01,
        "data.batch_size": 128,
        "trainer.max_epochs": 5,
        "trainer.precision": "64",
    }


def test_a_runs_name_tags_and_notes_are_told_where_it_has_them() -> None:
    empty = {"name": None, "tags": [], "notes": None}
    assert hyperparameters(empty) == {}
    told = {"name": "off", "tags": "a,b", "notes": "two words"}
    assert hyperparameters({**told, "tags": ["a", "b"]}) == told


def test_the_precision_is_text_whatever_its_value() -> None:
    trainers = [{"precision": value} for value in (32, "bf16")]
    found = [hyperparameters({"trainer": each})["trainer.precision"] for each in trainers]
    assert found == ["32", "bf16"]


def test_a_run_without_a_config_has_no_hyperparameters() -> None:
    assert hyperparameters({}) == {}


# A run's directory, from Python


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "parts, line",
    [
        (
            {"callbacks": Checkpoint, "loggers": CSV},
            'has the checkpoints of another run; continue it with fit(resume="last")',
        ),
        ({"loggers": CSV}, "has the metrics.csv of another run; remove that"),
    ],
)
def test_a_fresh_fit_into_the_directory_of_another_run_is_refused_and_changes_nothing(
    tmp_path, parts, line
):
    def made() -> dict[str, Any]:
        return {name: [part()] for name, part in parts.items()}

    fitted(**made(), directory=tmp_path, max_epochs=1)
    before = contents(tmp_path)
    with pytest.raises(UserError) as caught:
        fitted(**made(), directory=tmp_path, max_epochs=1)
    other = "or name another by run=RunInfo(directory=…)"
    assert str(caught.value) == f"the run directory {tmp_path} {line}, {other}"
    assert contents(tmp_path) == before


def test_a_test_a_resume_and_a_run_that_writes_nothing_may_share_a_directory(tmp_path):
    kept = {"callbacks": [Checkpoint()], "loggers": [CSV()], "directory": tmp_path}
    one = fitted(**kept, max_epochs=1)
    assert "test/loss" in one.test()
    fitted(**kept, max_epochs=2, resume="last")
    fitted(directory=tmp_path, max_epochs=1)
    assert one.fit(resume="last")
