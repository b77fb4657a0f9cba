"""MLflow gets the curves and all else of a run and of its resume once, in one run of its own."""

import os
import sqlite3
from copy import deepcopy

import pytest
from forked import fresh
from small import Hooks, fitted
from test_media import show_all

from dpframe.loggers.mlflow import MLflow, key

pytest.importorskip("mlflow", reason="mlflow is not installed")


def test_a_run_and_its_resume_are_one_run_with_every_step_once(tmp_path):
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/store.db"}
    fresh(trained_and_resumed, "run", folder=tmp_path, environment=environment)
    with sqlite3.connect(tmp_path / "store.db") as store:
        asked = "select run_uuid, status, name from runs"
        assert store.execute(asked).fetchall() == [
            ((tmp_path / "run" / "mlflow-id.txt").read_text(), "FINISHED", "run")
        ]
        curve = store.execute("select step from metrics where key = 'step/loss' order by step")
        assert [step for (step,) in curve] == list(range(1, 16))
        parameters = dict(store.execute("select key, value from params").fetchall())
    assert parameters["strategy"] == "CPU"
    (folder,) = tmp_path.glob("mlruns/*/*/artifacts")
    kept = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    files = ["images/val_rows-step{}.png", "figures/curve-step{}.png", "texts/said-step{}.txt"]
    files += ["sounds/tone-step{}.wav", "tables/val_worst-step{}.csv", "tables/found-step{}.csv"]
    assert kept == {file.format(step) for file in files for step in (3, 8)} | {"config.yaml"}


def trained_and_resumed(name):
    os.mkdir(name)
    saved = {}
    show = Hooks(on_step_end=show_all)
    keep = Hooks(on_epoch_end=lambda t: saved.update({t.epoch: deepcopy(t.state_dict())}))
    both = {"directory": name, "log_every": 1}
    fitted(callbacks=[show, keep], loggers=[MLflow()], **both)
    fitted(callbacks=[show], loggers=[MLflow()], resume=saved[1], max_epochs=3, **both)


def test_a_run_has_its_name_tags_and_notes(tmp_path):
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/store.db"}
    fresh(described, folder=tmp_path, environment=environment)
    with sqlite3.connect(tmp_path / "store.db") as store:
        (name,) = store.execute("select name from runs").fetchone()
        tags = dict(store.execute("select key, value from tags").fetchall())
    assert name == "off" and tags["mlflow.note.content"] == "two words"
    assert (tags["x"], tags["y _z_"]) == ("true", "true")


def described():
    hparams = {"name": "off", "tags": "x,y (z)", "notes": "two words"}
    MLflow().open(".", config="", hparams=hparams, purge_step=None)


@pytest.mark.parametrize(
    "store, command",
    [
        ("sqlite:///a b.db", "mlflow ui --backend-store-uri 'sqlite:///a b.db'"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
    ],
)
def test_the_dashboard_is_the_command_or_the_server_that_shows_the_store(store, command):
    assert (
        fresh(MLflow().dashboard, "", environment={**os.environ, "MLFLOW_TRACKING_URI": store})
        == command
    )


def test_a_name_has_the_letters_that_are_allowed():
    assert key("val/f1@10 (top)") == "val/f1_10 _top_"
