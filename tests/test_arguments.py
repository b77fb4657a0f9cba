"""A method that nothing would call is refused before training; a helper's name begins with _."""

import re
from functools import partial

import numpy as np
import pytest
import small
import torch
from small import Rows, Small, fitted, trainer

from dpframe import Callback, DataModule, Task, Trainer, TrainerSettings, UserError
from dpframe.callbacks import EMA, SWA, Checkpoint, EarlyStopping, Histograms
from dpframe.loggers import CSV
from dpframe.strategies import DDP, FSDP, DataParallel
from dpframe.trainer.checks.arguments import CALLED, THEIRS

BASES = {Task: Small, DataModule: Rows, Callback: Callback}


def given(base, *names):
    """The task, DataModule or callback, with methods so named, is given to a Trainer."""
    own = {name: lambda self, *args: None for name in names}
    made = type("Mine", (BASES[base],), own | {"__module__": "small"})()
    if base is Callback:
        return trainer(callbacks=[made])
    return trainer(**{"task" if base is Task else "data": made})


def refusal(base, *names):
    with pytest.raises(UserError) as caught:
        given(base, *names)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "base, name, meant",
    [
        (DataModule, "vall_dataset", "val_dataset"),
        (DataModule, "validation_dataset", "val_dataset"),
        (DataModule, "valid_dataset", "val_dataset"),
        (DataModule, "train_samplers", "train_sampler"),
        (DataModule, "collate_fn", "collate"),
        (DataModule, "train_dataloader", "train_dataset"),
        (DataModule, "set_up", "setup"),
        (DataModule, "prepare_dta", "prepare_data"),
        (Task, "validation_steps", "validation_step"),
        (Task, "train_step", "training_step"),
        (Task, "configure_optimiser", "configure_optimizer"),
        (Task, "turn", "turns"),
        (Callback, "load_statedict", "load_state_dict"),
    ],
)
def test_a_misspelt_method_is_refused_with_the_nearest_name(base, name, meant):
    assert refusal(base, name) == (
        f"Mine.{name} is never called; rename it to {meant}, or call it _{name} if it is a helper"
    )
    assert given(base, f"_{name}")
    if base is not Callback:
        assert given(base, meant.replace("setup", "collate"), *([name] if meant != "setup" else []))


@pytest.mark.parametrize("base, name", [(base, name) for base in THEIRS for name in THEIRS[base]])
def test_another_frameworks_hook_is_refused_with_what_to_do_instead(base, name):
    line = refusal(base, name)
    instead = THEIRS[base][name]
    assert line == f"Mine.{name} is never called; {instead}, or call it _{name} if it is a helper"
    assert given(base, f"_{name}")
    for hook, called in re.findall(r"(on_\w+)(\(self, trainer\))?", THEIRS[base][name]):
        assert hasattr(Callback, hook), called
    assert not hasattr(base, name), "it is called after all"


@pytest.mark.parametrize("base", CALLED)
def test_what_a_user_may_write_is_there_to_be_called(base):
    assert all(name.startswith("__") or callable(getattr(base, name)) for name in CALLED[base])


@pytest.mark.parametrize(
    "base, names",
    [
        (DataModule, ["train_set", "val_data", "test_data", "split", "build", "read_rows"]),
        (Task, ["training_loss", "encode", "sample", "predict", "step", "accuracy", "test_loss"]),
        (Callback, ["write", "load", "on_step_end"]),
    ],
)
def test_a_helper_is_the_users_own(base, names):
    assert given(base, *names)


class SetUpAsInLightning(Small):
    def setup(self, stage=None): ...


class SetUpByNothing(Small):
    def setup(self): ...


@pytest.mark.parametrize(
    "kind, said",
    [
        (SetUpAsInLightning, "setup takes a stage, and is called with the Trainer, once for"),
        (SetUpByNothing, r"setup takes \(\) and is called with \(trainer\); write setup\(self, tr"),
    ],
)
def test_a_tasks_setup_takes_the_trainer(kind, said):
    with pytest.raises(UserError, match=f"^{kind.__name__}.{said}"):
        trainer(task=kind())


class PreparesByStage(Rows):
    def prepare_data(self, stage): ...


def test_a_preparation_takes_nothing():
    says = r"prepare_data takes \(stage\) and is called with \(\); write prepare_data\(self\)$"
    with pytest.raises(UserError, match=says):
        trainer(data=PreparesByStage())


class Helped(Rows):
    def val_dataset(self):
        return super().val_dataset()

    def val_datasets(self):
        """Beside val_dataset it is no misspelling of it."""


class Watches(Rows, Callback):
    def on_epoch_start(self, trainer):
        """As a callback."""


class Epochs(Small):
    def on_validation_end(self, trainer):
        self.validation_epoch_end(trainer.metrics)

    def validation_epoch_end(self, numbers): ...


def test_a_method_that_the_users_code_calls_says_so_by_its_name():
    assert trainer(data=Helped()) and trainer(data=Watches())
    with pytest.raises(UserError, match=r"call it _validation_epoch_end if it is a helper$"):
        trainer(task=Epochs())


def test_a_batch_that_is_larger_than_the_data_is_told(caplog):
    def told(*args, **settings):
        caplog.clear()
        assert fitted(Small(), *args, max_epochs=1, **settings).global_step
        return [record.getMessage() for record in caplog.records]

    assert told(Rows(rows=20, batch_size=64)) == [
        "a batch is 64 rows, and there are 20 to train on: each batch is all of them; "
        "set data.batch_size=20, or less"
    ]
    assert told(Rows(rows=20, batch_size=20)) == told(Rows(rows=20, batch_size=8)) == []
    assert told(small.Streamed(rows=20, batch_size=64)) == []


SETTINGS = [  # of the Trainer, and what a line says of their values
    ("max_epochs", "3", "=3 is text; use a whole number or null"),
    ("max_epochs", 1.5, "=1.5 is a fraction; use a whole number or null"),
    ("max_epochs", True, "=true is a truth value; use a whole number or null"),
    ("max_epochs", torch.tensor(3), "=tensor(3) is a Tensor; use a whole number or null"),
    ("max_epochs", 0, "=0 is out of range; use 1 or more"),
    ("max_steps", [3], "=[3] is a list; use a whole number or null"),
    ("accumulate", 1.5, "=1.5 is a fraction; use a whole number"),
    ("accumulate", 2.0, "=2.0 is a fraction; use a whole number"),
    ("accumulate", None, "=null is nothing; use a whole number"),
    ("validate_every_steps", 2.5, "=2.5 is a fraction; use a whole number or null"),
    ("validate_every_epochs", "1", "=1 is text; use a number"),
    ("limit_train_batches", "2", "=2 is text; use a number or null"),
    ("log_every", 2.5, "=2.5 is a fraction; use a whole number"),
    ("deterministic", "yes", "=yes is text; use true or false"),
    ("clip_norm", "1", "=1 is out of range; use a number above 0"),
    ("plateau_monitor", None, "=null is nothing; use text"),
    ("share_check", None, "=None is not one of on, strict, warn, off; did you mean on?"),
    ("accelerator", ["cpu"], "=['cpu'] is not one of auto, cpu, cuda, mps, xpu; did you mean cpu?"),
    ("precision", 16, "=16 is not one of 32, 64, bf16, fp16, bf16-true, 16-true; did you mean fp1"),
    ("gpus", "2", "=2 is neither a count, a list of different ids, auto, all nor null; use e.g. "),
]
DATA = [  # attributes of a DataModule
    ("batch_size", 0, "=0 is out of range; use 1 or more"),
    ("batch_size", "4", "=4 is text; use a whole number"),
    ("batch_size", None, "=null is nothing; use a whole number"),
    ("batch_size", 2.0, "=2.0 is a fraction; use a whole number"),
    ("eval_batch_size", 0, "=0 is out of range; use 1 or more"),
    ("workers", -1, "=-1 is out of range; use 0 or more"),
    ("workers", "2", "=2 is text; use a whole number or auto"),
    ("workers", None, "=null is nothing; use a whole number or auto"),
    ("shuffle", "no", "=no is text; use true or false"),
    ("drop_last", 1, "=1 is a whole number; use true or false"),
    ("divided", "rank", "=rank is text; use by_rank or null"),
    ("persistent_workers", "x", "=x is text; use true or false or auto"),
]
OBJECTS = [
    (lambda: EMA("0.9"), "callbacks.ema.decay=0.9 is text; use a number"),
    (lambda: EMA(2), "callbacks.ema.decay=2 is out of range; use 0 or more, and less than 1"),
    (lambda: SWA("2"), "callbacks.swa.start_epoch=2 is text; use a whole number"),
    (lambda: Checkpoint(keep=1.5), "callbacks.checkpoint.keep=1.5 is a fraction; use a whole "),
    (lambda: EarlyStopping(patience="3"), "callbacks.early_stopping.patience=3 is text; use a "),
    (lambda: EarlyStopping(min_delta="0"), "callbacks.early_stopping.min_delta=0 is text; use a "),
    (lambda: Histograms("5"), "callbacks.histograms.every_n_steps=5 is text; use a whole number"),
    (lambda: DDP("2", "cpu"), "trainer.gpus=2 is neither a count, a list of different ids, auto"),
    (lambda: DDP(2, timeout_seconds="3"), "strategy.timeout_seconds=3 is text; use a number"),
    (lambda: DataParallel(0), "trainer.gpus=0 is out of range; leave it out, and use strategy=cpu"),
    (lambda: FSDP(replicate="2"), "strategy.replicate=2 is text; use a whole number"),
    (lambda: trainer(callbacks=EMA()), "Trainer: callbacks=<dpframe.callbacks.averages.EMA objec"),
    (lambda: trainer(callbacks="ema"), "Trainer: callbacks=ema; pass a list of Callbacks"),
    (lambda: trainer(loggers=CSV()), "Trainer: loggers=<dpframe.loggers.csv.CSV object at"),
    (lambda: trainer(task=Rows(), data=Small()), "Trainer: data=Small; pass a data set, e.g. Ten"),
    (lambda: Trainer(Small(), Rows(), seed=None), "seed=null is nothing; use a whole number"),
    (lambda: Trainer(Small(), Rows(), seed=1.5), "seed=1.5 is a fraction; use a whole number"),
    (lambda: Trainer(Small(), Rows(), seed=-1), "seed=-1 is out of range; use 0 to 2**63 - 1"),
    (lambda: trainer().prepare(3), "resume=3 is a whole number; use text or a path"),
    (lambda: scaled({"batch_size": "64"}), "task.scale_lr.batch_size=64 is text; use a whole num"),
    (lambda: measuring({1: 2.0}), "a step returned 1 as a metric's name; use text, e.g. 'mae'"),
    (lambda: measuring({"n": 10**400}), "Measures.training_step returned 'n' as a whole number "),
]


def scaled(how):
    task = Small()
    task.scale_lr = how
    fitted(task)


class Measures(Small):
    def training_step(self, batch):
        return super().training_step(batch) | self.more


def measuring(more):
    task = Measures()
    task.more = more
    fitted(task)


def with_data(name, value):
    data = Rows()
    setattr(data, name, value)
    trainer(data=data).prepare()


MISUSES = [
    *((partial(TrainerSettings, **{k: v}), f"trainer.{k}{said}") for k, v, said in SETTINGS),
    *((partial(with_data, k, v), f"data.{k}{said}") for k, v, said in DATA),
    *OBJECTS,
]


@pytest.mark.parametrize(("misuse", "said"), MISUSES, ids=[said for _, said in MISUSES])
def test_a_wrong_value_from_python_is_one_line_of_what_it_is_and_what_to_use(misuse, said):
    with pytest.raises(UserError) as caught:
        misuse()
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


class OwnLoaders(Rows):
    def train_dataset(self):
        return torch.utils.data.DataLoader(self.train, self.batch_size["train"], shuffle=True)

    def val_dataset(self):
        return torch.utils.data.DataLoader(self.held_out, self.batch_size["val"])


def test_a_batch_size_that_only_the_users_own_loaders_read_may_be_anything():
    data = OwnLoaders()
    data.batch_size = {"train": 4, "val": 8}
    assert fitted(data=data, max_epochs=1).global_step == 5


def test_numbers_of_numpy_are_numbers():
    data = Rows()
    data.batch_size, data.workers = np.int64(5), np.int32(0)
    given = {"max_epochs": np.int64(1), "clip_norm": np.float32(0.5), "grace_seconds": np.int8(3)}
    given["deterministic"] = np.bool_(False)
    made = Trainer(Small(), data, seed=np.int64(2**62), threads=1, **given)
    made.fit()
    assert made.global_step == 4
    assert {key: getattr(made.settings, key) for key in given} == given
    assert all(type(getattr(made.settings, key)) in (int, float, bool) for key in given)
