"""A hint leads somewhere: what it says is taken the next time; and so is what a class takes."""

import pytest
from command import attempts, cold_attempts, write

from dpframe.config.target import find, taken_by

RECIPE = """
# @package _global_
recipe: lines
task:
  _target_: parts.lines.Lines
  net: {_target_: torch.nn.Linear, in_features: 1, out_features: 1}
  optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1}
data:
  _target_: parts.lines.LinesData
  batch_size: 25
"""
PARTS = """
import dpframe
import torch
from torch.utils.data import TensorDataset

class Lines(dpframe.Task):
    def training_step(self, batch):
        x, y = batch
        return {"loss": (self.net(x) - y).square().mean()}

class Base(dpframe.DataModule):
    def __init__(self, batch_size: int, *, rows: int = 100, **more):
        super().__init__(batch_size, **more)
        self.rows = rows

class LinesData(Base):
    def train_dataset(self):
        x = torch.linspace(-1, 1, self.rows).reshape(-1, 1)
        return TensorDataset(x, 3 * x)
"""
MISTAKEN = """
import dpframe
from parts.lines import Lines, LinesData
from torch import nn

class Unannotated(Lines):
    def __init__(self, net, optimizer):
        super().__init__(net)
        self.optimizer = optimizer
    def configure_optimizer(self):
        return self.optimizer(self.parameters())

class Early(Lines):
    def __init__(self, net, optimizer):
        self.net = net

class Without(Lines):
    def __init__(self, net, optimizer):
        self.rate = 0.1

class Outer(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.inner = Inner()

class Inner(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(1, 1)

class Several(LinesData):
    def val_dataset(self):
        return [self.train_dataset(), self.train_dataset()]

class Both(LinesData):
    def train_dataset(self):
        return super().train_dataset(), super().train_dataset()

class Bare(LinesData):
    def __init__(self, batch_size):
        self.batch_size = batch_size
"""
OF_PARTS = {  # what is typed after recipe=lines, and the line
    "task._target_=parts.mistaken.Unannotated task.optimizer=sgd": "task.optimizer=sgd is text; "
    "name its class: task.optimizer._target_=torch.optim.SGD",
    "task._target_=parts.mistaken.Early": "Early.__init__ has no super().__init__(); call it first",
    "task._target_=parts.mistaken.Without": "Without.__init__ has no super().__init__(); call it "
    "first",
    "task.net._target_=parts.mistaken.Outer": "Inner.__init__ has no super().__init__(); call it "
    "first",
    "data._target_=parts.mistaken.Bare": "Bare.__init__ has no super().__init__(); call it first",
    "data._target_=parts.mistaken.Several": "Several.val_dataset() returned a list of 2 data sets; "
    "return a dict of them by their names",
    "data._target_=parts.mistaken.Both": "Both.train_dataset() returned a tuple of 2 data sets; "
    "return one, e.g. a ConcatDataset",
}
# What is typed after a recipe, a part of the hint, and what one types then.
HINTS = [
    ("boston lr=0.1", "did you mean task.optimizer.lr?", "task.optimizer.lr=0.1"),
    ("boston optimized_metric=val/mae", "did you mean sweep.metric?", ""),
    ("boston max_epochs=3", "did you mean trainer.max_epochs?", "trainer.max_epochs=3"),
    ("boston batchsize=32", "did you mean data.batch_size?", "data.batch_size=32"),
    (
        "boston weight_decay=0.1",
        "did you mean task.optimizer.weight_decay?",
        "task.optimizer.weight_decay=0.1",
    ),
    ("gan lr=0.1", "task.optimizers.critic.lr or task", "task.optimizers.generator.lr=0.1"),
    ("shapes lr=0.1", "nothing in this config has lr", ""),
    ("boston trainer.lr=0.1", "did you mean task.optimizer.lr?", "task.optimizer.lr=0.1"),
    ("boston monitor=val/mae", "callbacks.checkpoint.m", "callbacks.checkpoint.monitor=val/mae"),
    (
        "boston patience=3",
        "callbacks=early_stopping has callbacks.early_stopping.patience",
        "callbacks=early_stopping callbacks.early_stopping.patience=3",
    ),
    (
        "boston callbacks.early_stoping=false",
        "there is no key callbacks.early_stoping; did you mean callbacks.early_stopping?",
        "callbacks.early_stopping=false",
    ),
    (
        "boston callbacks.early_stopping=true",
        "callbacks=early_stopping brings it, and callbacks.early_stopping=false switches it off",
        "callbacks=early_stopping",
    ),
    (
        "boston ~callbacks.early_stopping",
        "callbacks=early_stopping brings it, and callbacks.early_stopping=false switches it off",
        "callbacks.early_stopping=false",
    ),
    (
        "boston callbacks={early_stopping:false}",
        "callbacks=early_stopping brings it, and callbacks.early_stopping=false switches it off",
        "callbacks.early_stopping=false",
    ),
    ("boston logger.wandbb=null", "did you mean logger.wandb?", "logger.wandb=null"),
    (
        "boston callbacks.mine=false",
        "there is no key callbacks.mine; +callbacks.mine._target_=… adds it",
        "+callbacks.mine._target_=dpframe.Callback",
    ),
    (
        "boston strategy.timeout_seconds=9",
        "strategy=ddp has it",
        "strategy=ddp strategy.timeout_seconds=9",
    ),
    (
        "boston task.scheduler.step_size=3",
        "+task.scheduler._target_=… +task.scheduler._partial_=true +task.scheduler.step_size=…",
        "+task.scheduler._target_=torch.optim.lr_scheduler.StepLR +task.scheduler._partial_=true "
        "+task.scheduler.step_size=3",
    ),
    ("boston task/schedule=warmup_cosin", "did you mean warmup_cosine?", "task/schedule=constant"),
    ("boston schedule=wsd", "did you mean task/schedule=warmup_cosine?", "task/schedule=wsd"),
    (
        "boston task.schedule.decay=0.1",
        "there is no key task.schedule.decay; task/schedule=wsd has it",
        "task/schedule=wsd task.schedule.decay=0.1",
    ),
    ("boston task/schedule=linear task.schedule.decay=0.1", "task/schedule=wsd has it", ""),
    (
        "boston task/schedule=linear task.schedule.warmpu=0.1",
        "did you mean task.schedule.warmup?",
        "task/schedule=linear task.schedule.warmup=0.1",
    ),
    (
        "boston task/schedule=linear task.schedule.warmup=-1",
        "task.schedule.warmup=-1 is out of range; use a share of all steps such as 0.03, or",
        "task/schedule=linear task.schedule.warmup=1",
    ),
    (
        "boston task/schedule=wsd task.schedule.decay=0.99",
        "task.schedule.warmup=0.03 and task.schedule.decay=0.99 are more than all steps",
        "task/schedule=wsd task.schedule.decay=99",
    ),
]
OF_CLASSES = [  # which are asked once torch is imported
    (
        "boston task.optimizer.momentum=0.9",
        "task.optimizer.momentum: Adam takes no such argument; there is: amsgrad, betas",
        "task.optimizer._target_=torch.optim.SGD task.optimizer.momentum=0.9",
    ),
    ("lines data.workerz=2", "did you mean workers?", "data.workers=2"),
    ("lines data.row=9", "did you mean rows?", "data.rows=9"),
    ("lines task.net.bia=false", "did you mean bias?", "task.net.bias=false"),
    ("lines data.speed=9", "there is: batch_size, divide_streams, divided, drop_last", ""),
]


def test_what_a_hint_says_is_taken_and_torch_is_not_imported(tmp_path):
    own = write(tmp_path, {"own/conf/recipe/lines.yaml": RECIPE, "own/parts/lines.py": PARTS})
    done, heavy = cold_attempts([*mistaken(HINTS), *followed(HINTS + OF_CLASSES)], own)
    assert heavy == []
    for (typed, says, _), mistake in zip(HINTS, done, strict=False):
        assert (mistake.code, mistake.out) == (2, "") and says in mistake.err, (typed, mistake)
    for (_, _, then), correct in zip(HINTS + OF_CLASSES, done[len(HINTS) :], strict=True):
        assert correct.code == 0, (then, correct.err)


def test_an_argument_that_a_class_lacks_names_the_nearest(tmp_path):
    """`parts` is found though it is not in the current directory, but beside the configs."""
    own = write(tmp_path, {"own/conf/recipe/lines.yaml": RECIPE, "own/parts/lines.py": PARTS})
    done = attempts(mistaken(OF_CLASSES), own)
    for (typed, says, _), mistake in zip(OF_CLASSES, done, strict=True):
        assert (mistake.code, mistake.out) == (2, "") and says in mistake.err, (typed, mistake)


def test_a_mistake_in_a_part_of_ones_own_is_one_line(tmp_path):
    parts = {"own/parts/lines.py": PARTS, "own/parts/mistaken.py": MISTAKEN}
    own = write(tmp_path, {"own/conf/recipe/lines.yaml": RECIPE, **parts})
    lines = [["--config-dir=own/conf", "recipe=lines", *typed.split()] for typed in OF_PARTS]
    for (typed, says), done in zip(OF_PARTS.items(), attempts(lines, own), strict=True):
        assert (done.code, done.err) == (2, f"dpframe: {says}\n"), (typed, done)
        assert done.files == ["own"], typed


def mistaken(hints: list[tuple[str, str, str]]) -> list[list[str]]:
    return [["--config-dir=own/conf", *f"recipe={typed}".split()] for typed, _, _ in hints]


def followed(hints: list[tuple[str, str, str]]) -> list[list[str]]:
    """What is typed then, to see the config alone."""
    words = [[f"recipe={typed.split()[0]}", *then.split()] for typed, _, then in hints]
    return [["--config-dir=own/conf", *line, "-c", "job"] for line in words]


def test_what_a_class_takes_is_a_key_in_a_run_its_resume_and_a_sweep(tmp_path):
    own = write(tmp_path, {"own/conf/recipe/lines.yaml": RECIPE, "own/parts/lines.py": PARTS})
    start = ["--config-dir=own/conf", "callbacks.progress.bar=false"]
    lines = [
        [*start, "recipe=lines", "trainer.max_epochs=1", "data.rows=50", "hydra.run.dir=run"],
        [*start, "resume=run", "trainer.max_epochs=2"],
        [*start, "-m", "recipe=lines", "trainer.max_epochs=1", "data.rows=25,50"],
        [*start, "recipe=lines", "data.rows=many"],
    ]
    first, resumed, swept, wrong = attempts(lines, own)
    assert (first.code, resumed.code, swept.code) == (0, 0, 0), (first, resumed, swept)
    assert "epoch 1/1  step 2 " in first.out and "epoch 2/2  step 4 " in resumed.out
    names = sorted(path.name for path in own.glob("multirun/lines/*/*") if path.is_dir())
    assert [name.split(",")[0] for name in names] == ["0_data.rows=25", "1_data.rows=50"]
    assert wrong.err == "dpframe: data.rows=many is text; use a whole number\n"


@pytest.mark.parametrize(
    "path, first, others",
    [
        ("torch.optim.Adam", "params", {"lr", "weight_decay"}),
        ("torch.nn.Linear", "in_features", {"out_features", "bias"}),
        ("dpframe.strategies.ddp.DDP", "gpus", {"accelerator", "timeout_seconds"}),
        ("dpframe.strategies.single.auto", "gpus", {"accelerator"}),
        ("dpframe.recipes.boston.Boston", "net", {"optimizer", "scheduler"}),
    ],
)
def test_what_a_class_takes_is_known_through_those_that_it_is_built_on(path, first, others):
    names, is_all = taken_by(find(path, ""))
    assert names[0] == first and others < set(names) and is_all


def test_what_takes_any_keyword_is_not_known():
    assert taken_by(dict) == ([], False)


def test_a_newcomers_mistakes_are_told_with_what_to_write(tmp_path):
    grouped = "# @package _global_\ndefaults:\n  - boston\n  - task/schedule: wsd\n  - _self_\n"
    closed = "import dpframe\nclass D(dpframe.DataModule):\n    def __init__(self):\n        pass\n"
    write(tmp_path, {"mine/recipe/grouped.yaml": grouped, "own.py": closed})
    mistakes = {
        "--config-dir=mine recipe=grouped": "write override /task/schedule: wsd",
        "resume=last": "resume=last: of which recipe? add recipe=NAME, or name a run: resume=DIR",
        "recipe=boston data._target_=own.D data.batch_size=4": "data.batch_size: D takes no such "
        "argument; let its __init__ take **options, and call super().__init__(**options)",
    }
    for done, told in zip(
        attempts([line.split() for line in mistakes], tmp_path), mistakes.values(), strict=True
    ):
        assert done.code == 2 and told in done.err and done.err.count("\n") == 1, done.err
