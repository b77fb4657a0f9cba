"""A trained task from its checkpoint, and a Trainer in Python that goes on from one."""

import json
import os
import sys

import pytest
import torch
from command import dpframe as command
from command import write
from forked import fresh
from recorded import once
from small import Rows, Small, fitted, is_same, trainer

import dpframe
from dpframe import Trainer, TrainerSettings, UserError, checkpoint
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.recipes.boston import BostonData
from dpframe.strategies.ddp import DDP

MINE = """
import dpframe
from torch import nn

class Mine(dpframe.Task):
    def __init__(self, width, token, net=None):
        super().__init__(net or nn.Linear(width, 1))
        self.token = token
    def predict_step(self, batch):
        return self.net(batch)
"""
RECIPE = """
# @package _global_
task: {_target_: mine_to_load.Mine, width: 3, token: 'a ${oc.env:TOKEN_TO_LOAD,none}'}
data: {_target_: dpframe.recipes.boston.BostonData}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    line = ["recipe=boston", "trainer.max_epochs=2", "trainer.precision=64", "hydra.run.dir=run"]
    tested = ["mode=predict", "checkpoint=run/checkpoints/best.ckpt", "hydra.run.dir=predicted"]
    for words in (line, [*line[:1], *tested]):
        done = command(*words, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_a_loaded_task_predicts_what_the_command_predicts(run):
    data = BostonData()
    data.setup()
    rows = [column.double() for column in data.test_dataset().tensors]
    lines = (run / "predicted" / "predictions.csv").read_text().split()[1:]
    for path in (run / "run", run / "run/checkpoints/best.ckpt"):
        task = dpframe.load(path)
        assert not task.training and task.net[0].weight.dtype == torch.float64
        assert task.predict_step(rows)[:, 0].tolist() == list(map(float, lines))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A run of a recipe of one's own, whose task is beside the configs."""
    code = MINE.replace("net=None", "net=None, optimizer=None")
    write(tmp_path, {"mine_to_load.py": code, "conf/recipe/mine.yaml": RECIPE})
    write(tmp_path, {"run/.hydra/overrides.yaml": "- recipe=mine\n- task.width=3\n"})
    weights = {"net.weight": torch.ones(1, 3), "net.bias": torch.zeros(1)}
    checkpoint.save({"task": weights}, tmp_path / "run/checkpoints/best.ckpt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("mine_to_load", None)


def loaded(*overrides):
    return dpframe.load("run", *overrides, config_dir="conf")


def test_what_came_from_the_environment_comes_from_it_again(mine, monkeypatch):
    assert loaded().token == "a none"
    monkeypatch.setenv("TOKEN_TO_LOAD", "secret")
    assert loaded().token == "a secret"


@pytest.mark.parametrize(
    "notes, typed, said",
    [
        (
            "- recipe=mine\n- task.widht=4\n",
            [],
            "there is no key task.widht|takes no such argument",
        ),
        (
            "- recipe=mine\n",
            ["task.width=4"],
            "does not fit this recipe's Mine: net.weight has size",
        ),
        ("- recipe=mien\n", [], "recipe=mien: there is no such recipe; did you mean mine?"),
        (
            "- recipe=mine\n- task._target_=os.getcwd\n",
            [],
            "type them again: task._target_=os.getcwd",
        ),
        ("- seed=1\n", [], "recipe is not set; set recipe=NAME"),
        ("a: [\n", [], "overrides.yaml can't be read"),
        ("- recipe=mine\n", ["+task.token=${oc.env:NOT_SET_AT_ALL}"], "token has a value already"),
        ("- recipe=mine\n", ["task.token=${oc.env:NOT_SET_AT_ALL}"], "NOT_SET_AT_ALL"),
    ],
)
def test_a_run_that_can_not_be_built_is_refused_in_one_line(mine, notes, typed, said):
    write(mine, {"run/.hydra/overrides.yaml": notes})
    with pytest.raises(UserError) as caught:
        loaded(*typed)
    assert any(each in str(caught.value) for each in said.split("|")), caught.value
    assert "\n" not in str(caught.value)


def test_what_a_run_was_started_with_is_named_again(mine):
    notes = "- recipe=mine\n- task.net={_target_:torch.nn.Linear,in_features:3,out_features:1}\n"
    write(mine, {"run/.hydra/overrides.yaml": notes})
    again = "task.net={_target_:torch.nn.Linear,in_features:3,out_features:1}"
    assert torch.equal(loaded(f"+{again}").net.weight, torch.ones(1, 3))


def test_what_the_recipe_has_that_the_run_had_not_is_typed(mine):
    state = checkpoint.load("run/checkpoints/best.ckpt")
    then = {"task._target_": "mine_to_load.Mine", "task.width": 5, "task.token": "b"}
    state["fingerprint"] = json.dumps(then)
    checkpoint.save(state, mine / "run/checkpoints/best.ckpt")
    with pytest.raises(
        UserError, match="its run had another config: task.width=5 there, 3 here; type"
    ):
        loaded()
    assert loaded("task.width=3").training is False


@pytest.mark.parametrize(
    "name, said",
    [(".hydra/overrides.yaml", "nothing beside it says"), ("checkpoints/best.ckpt", "no such")],
)
def test_a_pipe_in_the_run_directory_is_not_waited_for(mine, name, said):
    (mine / "run" / name).unlink()
    os.mkfifo(mine / "run" / name)
    with pytest.raises(UserError, match=said):
        dpframe.load(mine / "run/checkpoints/best.ckpt", config_dir="conf")


def test_a_path_without_a_checkpoint_or_a_config_is_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match="nowhere: there is no such file"):
        dpframe.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="path=ftpx://bucket/run: Protocol not known: ftpx"):
        dpframe.load("ftpx://bucket/run")
    with pytest.raises(UserError, match="~nobody-here: there is no such file"):
        dpframe.load("~nobody-here")
    with pytest.raises(UserError, match="has no best.ckpt and no last.ckpt; name a checkpoint"):
        dpframe.load(tmp_path)
    checkpoint.save({"task": {}}, tmp_path / "some.ckpt")
    with pytest.raises(UserError, match="call dpframe.checkpoint.load_task"):
        dpframe.load(tmp_path / "some.ckpt")


# A Trainer from Python


@pytest.mark.parametrize("resume", ["last", "checkpoints/last.ckpt"])
def test_a_trainer_goes_on_from_its_newest_checkpoint_or_a_file(tmp_path, resume):
    whole = fitted(max_epochs=4)
    fitted(callbacks=[Checkpoint()], directory=tmp_path, max_epochs=2)
    start = resume if resume == "last" else tmp_path / resume
    again = fitted(resume=start, directory=tmp_path, max_epochs=4)
    assert is_same(again.task.state_dict(), whole.task.state_dict())


def test_a_trainer_without_a_checkpoint_says_so(tmp_path):
    for directory, said in ((tmp_path, "there is no whole checkpoint"), ("", "has no files")):
        with pytest.raises(UserError, match=f"resume=last: .*{said}"):
            trainer(directory=directory).fit(resume="last")


def train(strategy):
    settings = TrainerSettings(max_epochs=2, precision="64")
    torch.manual_seed(0)
    with Trainer(Small(), Rows(), strategy=strategy, settings=settings) as made:
        return made.fit()


@once
def by_ranks():
    strategy = DDP(2, "cpu")
    return fresh(strategy.launch, train, strategy)


def test_several_ranks_from_python_take_one_call():
    assert by_ranks() == pytest.approx(train(None), rel=1e-12)
