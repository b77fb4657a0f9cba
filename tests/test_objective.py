"""What a sweep optimises, in which direction, and what its sweeper hears of a run that failed."""

import json
import os
from pathlib import Path

import pytest
from command import ROOT, Attempt, attempts, write
from omegaconf import OmegaConf

from dpframe import UserError
from dpframe.cli.objective import Objective, direction, objective_of

SWEEPER = """
import json
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper


class Told(Sweeper):
    def __init__(self, direction, goes_on):
        self.direction, self.goes_on = direction, goes_on

    def setup(self, *, hydra_context, task_function, config):
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        heard = []
        for number, seed in enumerate((0, 1, 2)):
            (done,) = self.launcher.launch([[*arguments, f"seed={seed}"]], number)
            is_done = done.status == JobStatus.COMPLETED
            heard.append(done.return_value if is_done else type(done._return_value).__name__)
            if not (is_done or self.goes_on):
                done.return_value
        with open(f"heard-{self.direction}.json", "w") as file:
            json.dump([self.direction, heard], file)


@dataclass
class Node:
    _target_: str = "hydra_plugins.told.Told"
    direction: Any = "minimize"
    goes_on: bool = True


ConfigStore.instance().store(group="hydra/sweeper", name="told", node=Node, provider="told")
"""
OWN = """
import dpframe
from dpframe.recipes.boston import Boston


class Own(Boston):
    def summarize(self, means):
        if self.training:
            return means
        self.validated = getattr(self, "validated", 0) + 1
        return {**means, "score": [0.25, 0.75, 0.5][self.validated - 1]}


class Failing(dpframe.Callback):
    def on_epoch_end(self, trainer):
        if trainer.seed == 1:
            raise KeyError("a bug")
"""
TOLD = ["-m", "recipe=boston", "hydra/sweeper=told", "logger=none"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Attempt]]:
    """Sweeps one after the other, in one directory."""
    files = {"site/hydra_plugins/told.py": SWEEPER, "own.py": OWN}
    directory = write(tmp_path_factory.mktemp("swept"), files)
    watched = ["callbacks.checkpoint.monitor=val/score", "callbacks.checkpoint.mode=max"]
    failing = "+callbacks.failing._target_=own.Failing"
    lines = [
        [*watched, failing, "task._target_=own.Own", "trainer.max_epochs=3"],
        [
            failing,
            "callbacks.checkpoint=null",
            "hydra.sweeper.goes_on=false",
            "trainer.max_epochs=1",
        ],
        ["hydra.sweeper.direction=maximize"],
    ]
    path = f"{ROOT}{os.pathsep}{directory / 'site'}"
    done = attempts([[*TOLD, *line] for line in lines], directory, PYTHONPATH=path)
    return directory, done


def test_the_objective_is_the_best_of_what_the_checkpoint_watches_in_its_direction(swept):
    directory, (done, *_) = swept
    assert done.code == 1
    heard = json.loads((directory / "heard-maximize.json").read_text())
    assert heard == ["maximize", [0.75, "RunFailed", 0.75]]
    assert "sweep: 2 of 3 runs finished" in done.out and "KeyError: 'a bug'" in done.err
    texts = [path.read_text() for path in directory.glob("multirun/*/*/*/summary.json")]
    summaries = [json.loads(text) for text in texts if "val/score" in text]
    assert [summary["best"] for summary in summaries] == [{"val/score": 0.75}] * 2
    assert summaries[0]["metrics"]["val/score"] == 0.5


def test_a_sweeper_that_ends_at_a_failure_is_told_and_a_contradiction_is_one_line(swept):
    _, (_, ended, refused) = swept
    assert ended.code == 1
    assert "sweep: the sweeper has ended it, as a run failed" in ended.err
    assert "sweep: 1 of 2 runs finished" in ended.out
    assert refused.code == 2
    assert refused.err == (
        "dpframe: hydra.sweeper.direction=maximize, but the objective is val/loss, where "
        "callbacks.checkpoint.mode is min; leave one out, or change the other\n"
    )


@pytest.mark.parametrize(
    ("callbacks", "objective"),
    [
        ({}, ("val/loss", "min", "")),
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
    assert objective_of(callbacks) == objective


@pytest.mark.parametrize(
    ("sweeper", "mode", "typed", "added"),
    [
        ({"direction": "minimize"}, "min", [], []),
        ({"direction": "minimize"}, "max", [], ["hydra.sweeper.direction=maximize"]),
        ({"direction": ["maximize"]}, "max", [], []),
        ({"optim": {"maximize": False}}, "max", [], ["hydra.sweeper.optim.maximize=true"]),
        ({"max_batch_size": None}, "max", [], []),
        ({"direction": "minimize"}, "max", ["hydra.sweeper.direction=minimize"], None),
        ({"direction": "maximize"}, "min", [], None),
        ({"direction": ["minimize", "minimize"]}, "min", [], None),
    ],
)
def test_a_direction_follows_the_mode_or_is_refused(sweeper, mode, typed, added):
    node, objective = OmegaConf.create(sweeper), Objective("val/a", mode, "callbacks.checkpoint")
    if added is not None:
        assert direction(node, objective, typed) == added
        return
    with pytest.raises(UserError, match=r"^hydra\.sweeper\.direction="):
        direction(node, objective, typed)
