"""`dpframe.run`: the command from Python, by itself, in a program of Hydra's, and in a notebook."""

import json
import re
import runpy
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from command import write
from forked import fresh
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from omegaconf import OmegaConf
from test_readme import files_of
from torch import nn

import dpframe
from dpframe import Trainer, UserError
from dpframe.cli.api import typed
from dpframe.recipes.boston import Boston, BostonData
from dpframe.strategies.single import CPU

ROOT = Path(__file__).resolve().parent.parent
SHORT = {"max_epochs": 3, "precision": "64"}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("api"))
        yield dpframe.run("recipe=boston", "strategy=cpu", trainer=SHORT)


def test_a_run_from_python_has_the_commands_files_its_numbers_and_its_best_weights(result):
    directory = Path(result.directory)
    assert json.loads((directory / "summary.json").read_text()) == result.summary
    assert result.metrics == result.summary["metrics"]
    assert [row["step"] for row in result.history] == [4, 8, 12]
    assert "val/loss" in repr(result) and "_target_" not in repr(result)
    assert result.history[-1]["val/loss"] == result.metrics["val/loss"]
    rows = torch.randn(5, 13, dtype=torch.float64)
    assert torch.equal(result.task.net(rows), dpframe.load(directory).net(rows))
    assert result.checkpoint == str(directory / "checkpoints" / "best.ckpt")


def test_parts_that_are_built_by_hand_have_the_same_curve(result):
    torch.manual_seed(0)
    layers = nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)
    task = Boston(nn.Sequential(*layers), partial(torch.optim.Adam, lr=0.01))
    assert Trainer(task, BostonData(), strategy=CPU(), **SHORT).fit() == result.metrics


def test_what_python_passes_is_what_one_types():
    settings = {
        "recipe": "boston",
        "trainer": {"gpus": [0, 1], "max_steps": None, "clip_norm": {"critic": 0.5}},
        "data": {"file": Path("a b.csv"), "normalize": False, "part": np.float32(0.1)},
        "task.net": {"_target_": "torch.nn.Linear", "in_features": 3},
        "+vars.note": "it's ${here}",
    }
    assert list(typed(settings)) == [
        "recipe='boston'",
        "trainer.gpus=[0,1]",
        "trainer.max_steps=null",
        "trainer.clip_norm.critic=0.5",
        "data.file='a b.csv'",
        "data.normalize=false",
        "data.part=0.1",
        "task.net={_target_:'torch.nn.Linear',in_features:3}",
        r"+vars.note='it\'s \${here}'",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipe=bostn"], "did you mean boston?"),
        (["recipe=boston", "trainer.max_epoch=2"], "did you mean trainer.max_epochs?"),
        (["-m", "recipe=boston"], "dpframe.run: '-m' is not an override; pass key=value texts"),
        (["recipe=boston", "mode=test"], "mode=test without a checkpoint measures untrained"),
        (["recipe=boston", "data.file=nowhere.csv"], "cannot read nowhere.csv"),
    ],
)
def test_a_mistake_is_raised_and_changes_nothing(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state, config = torch.get_rng_state(), HydraConfig.instance().cfg
    with pytest.raises(UserError) as caught:
        dpframe.run(*words)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state) and HydraConfig.instance().cfg is config


def test_a_sweep_of_a_hydra_program_keeps_the_programs_name(monkeypatch):
    runtime = JobRuntime.instance()
    monkeypatch.setattr(runtime, "conf", OmegaConf.create({"name": "mine"}))
    with pytest.raises(UserError):
        dpframe.run("recipe=boston", "trainer.max_epoch=2")
    assert runtime.get("name") == "mine"


def test_runs_of_several_threads_have_the_numbers_of_one(result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(directory: str) -> dict[str, float]:
        words = "recipe=boston", "strategy=cpu", f"hydra.run.dir={directory}"
        return dpframe.run(*words, trainer=SHORT).metrics

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(run, "abcd")] == [result.metrics] * 4


def test_a_run_without_weights_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = dpframe.run(
        "recipe=boston", "callbacks=none", "logger=none", "strategy=cpu", "trainer.max_epochs=1"
    )
    with pytest.raises(UserError, match="this run has kept no weights; leave callbacks.checkpoint"):
        _ = short.task


PROGRAMS = files_of("docs/python.md")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.endswith(".py")])
def test_the_programs_of_the_page_run(name, tmp_path):
    """Two of them have ranks, at the top of a file and in a program of Hydra's."""
    write(tmp_path, PROGRAMS)
    printed, values = fresh(program, name, folder=tmp_path)
    assert printed[-1] == "the same"
    if name == "compare_strategies.py":
        one, two = values
        assert two.pop("replicas") == 2 and one.pop("replicas") == 1
        assert two == pytest.approx(one, rel=1e-12) and "val/mae" in two
        assert [line[:19] for line in printed].count("epoch 3/3  step 12 ") == 2


def program(name):
    """What it prints, and what `dpframe.run` has returned to its `one` and `two`."""
    torch.randn(300, 300) @ torch.randn(300, 300)  # so that this process can't be forked
    sys.argv = [name]
    with tempfile.TemporaryFile("w+") as file, patch.object(sys, "stdout", file):
        there = runpy.run_path(name, run_name="__main__")
        file.seek(0)
        printed = file.read().splitlines()
    results = [there[name] for name in ("one", "two") if name in there]
    return printed, [{**r.metrics, "replicas": r.summary["replicas"]} for r in results]


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path):
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    book = nbformat.read(path, as_version=4)
    saved = [output_of(cell) for cell in book.cells]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT))
        client = nbclient.NotebookClient(
            book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}
        )
        client.execute()
    assert [output_of(cell) for cell in book.cells] == saved


def output_of(cell) -> list[str]:
    """What it prints last and returns, but for digits, and for the spaces by which a line covers a
    longer one that was drawn before it."""
    shown = []
    for output in cell.get("outputs", []):
        text = output.get("text") or output["data"]["text/plain"]
        shown.append(text)
    lines = "".join(shown).rpartition("\r")[2]
    return [re.sub(r"\d+", "#", line).rstrip() for line in lines.splitlines()]


def test_a_mode_of_a_package_may_return_nothing(monkeypatch):
    monkeypatch.setattr("dpframe.modes.fit.run", lambda job: None)
    result = dpframe.run("recipe=boston")
    assert (result.metrics, result.summary, result.checkpoint) == ({}, {}, None)
