"""A trained task from its checkpoint, and a Trainer in Python that goes on from one."""

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
CONFIG = "task: {_target_: mine_to_load.Mine, width: 3, token: 'a ${oc.env:TOKEN_TO_LOAD,none}'}\n"


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
    """A run of a task from a module that is beside it, and one of a module that is not."""
    write(tmp_path, {"code/mine_to_load.py": MINE, "run/.hydra/config.yaml": CONFIG})
    weights = {"net.weight": torch.ones(1, 3), "net.bias": torch.zeros(1)}
    checkpoint.save({"task": weights}, tmp_path / "run/checkpoints/best.ckpt")
    monkeypatch.syspath_prepend(tmp_path / "code")
    return tmp_path


def test_what_came_from_the_environment_comes_from_it_again(mine, monkeypatch):
    assert dpframe.load(mine / "run").token == "a none"
    monkeypatch.setenv("TOKEN_TO_LOAD", "secret")
    assert dpframe.load(mine / "run").token == "a secret"


def test_what_the_environment_does_not_set_may_be_null(mine):
    config = CONFIG.replace("'a ${oc.env:TOKEN_TO_LOAD,none}'", "'${oc.env:TOKEN_TO_LOAD,null}'")
    write(mine, {"run/.hydra/config.yaml": config})
    assert dpframe.load(mine / "run").token is None


@pytest.mark.parametrize(
    "config, said",
    [
        (
            CONFIG.replace("mine_to_load.Mine", "os.system"),
            "task._target_=os.system is not a dpframe",
        ),
        (CONFIG.replace("3,", "{_target_: os.getcwd},"), "is not one of the names that a config"),
        (CONFIG.replace("width", "widht"), "takes no such argument; did you mean width?"),
        (CONFIG.replace("3,", "4,"), "does not fit this recipe's Mine: net.weight has size (1, 3)"),
        (CONFIG.replace(",none", ""), "TOKEN_TO_LOAD is not set; set it"),
        ("seed: 1\n", "task=null has no _target_; name its class"),
        ("- 1\n", "is no config; restore it from the run"),
        ("a: [\n", "it says how the task of best.ckpt is built"),
        ("a: " + "[" * 9000, "has more than 100 levels; restore it from the run"),
        (CONFIG.replace("3,", f"{'[' * 200}{']' * 200},"), "has more than 100 levels; restore it"),
        ("task: &t {net: *t}", "has an alias, *t, which no run writes; restore it from the run"),
        ("a: &a [x, x]\nb: &b [*a, *a]", "has an alias, *a, which no run writes; restore it"),
        (f"seed: {'9' * 5000}", "it says how the task of best.ckpt is built"),
    ],
)
def test_a_config_that_can_not_be_built_is_refused_in_one_line(mine, config, said):
    write(mine, {"run/.hydra/config.yaml": config})
    with pytest.raises(UserError) as caught:
        dpframe.load(mine / "run")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, said",
    [(".hydra/config.yaml", "config.yaml is no file"), ("checkpoints/best.ckpt", "no such file")],
)
def test_a_pipe_in_the_run_directory_is_not_waited_for(mine, name, said):
    (mine / "run" / name).unlink()
    os.mkfifo(mine / "run" / name)
    with pytest.raises(UserError, match=said):
        dpframe.load(mine / "run/checkpoints/best.ckpt")


def test_python_in_the_run_directory_is_not_imported(mine, monkeypatch):
    config = CONFIG.replace("mine_to_load", "beside_it")
    write(mine, {"run/beside_it.py": MINE, "run/.hydra/config.yaml": config})
    monkeypatch.syspath_prepend(mine / "run")
    with pytest.raises(UserError, match="beside what this run starts from"):
        dpframe.load(mine / "run")
    assert "beside_it" not in sys.modules
    assert dpframe.load(mine / "run", trusted_modules=["beside_it"]).token == "a none"


def test_a_path_without_a_checkpoint_or_a_config_is_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match="nowhere: there is no such file"):
        dpframe.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="path=s3://bucket/run is a URL, and dpframe reads"):
        dpframe.load("s3://bucket/run")
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
