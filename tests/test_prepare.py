"""`Trainer.prepare` makes and checks all that `fit` needs, and writes nothing."""

import gc
import weakref
from copy import deepcopy
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import Adam, Hooks, Rows, Small, Streamed, fitted, is_same
from small import trainer as trainer_of
from torch.optim import LBFGS
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, TensorDataset

from dpframe import Callback, RunInfo, Trainer, TrainerSettings, UserError
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.callbacks.early_stopping import EarlyStopping
from dpframe.loggers.csv import CSV
from dpframe.loggers.tensorboard import TensorBoard
from dpframe.strategies.ddp import DDP
from dpframe.trainer.callback import HOOKS
from dpframe.trainer.resume.fingerprint import DECIDING


class Frozen(Small):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Pair(Small):
    """Two optimizers and no validation_step."""

    def configure_optimizer(self) -> Any:
        return {"first": Adam(self.net[0].parameters()), "last": Adam(self.net[3].parameters())}

    def training_step(self, batch: Any, optimizer: str) -> Any:  # type: ignore[override]
        return super().training_step(batch)


class Odd(Small):
    def configure_optimizer(self) -> Any:
        return [1]


class Broken(Small):
    def validation_step(self, batch: Any) -> Any:
        raise UserError("this batch can't be validated")


class Empty(Rows):
    def train_dataset(self) -> Dataset:
        return TensorDataset(torch.zeros(0, 3), torch.zeros(0))


class Unnamed(Rows):
    def val_dataset(self) -> Any:
        return {}


class Dropping(Rows):
    def __init__(self) -> None:
        super().__init__(batch_size=64)
        self.drop_last = True


PLATEAU = partial(Small, Adam, partial(ReduceLROnPlateau, patience=1))
WAITS = {"callbacks": [EarlyStopping("val/los")]}
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "frozen": (Frozen, Rows, {}, "has no parameter to train"),
    "no row": (Small, Empty, {}, "has no rows"),
    "no set": (Small, Unnamed, {}, "returned an empty dict"),
    "no batch": (Small, Dropping, {}, "drop_last=true leaves no batch"),
    "stream": (Small, Streamed, {"validate_every_epochs": 0.5}, "is a share of an epoch"),
    "odd": (Odd, Rows, {}, "configure_optimizer"),
    "limit": (Small, Rows, {"clip_norm": {"first": 1.0}}, "there is no such optimizer"),
    "pair": (Pair, Rows, {}, "has several optimizers"),
    "closure": (partial(Small, LBFGS), Rows, {"clip_norm": 1.0}, "can't be combined with LBFGS"),
    "block": (Small, Rows, {"checkpoint_activations": ["net.9"]}, "net.9"),
    "monitor": (Small, Rows, WAITS, "val/los"),
    "plateau": (PLATEAU, Rows, {"plateau_monitor": "val/los"}, "plateau_monitor"),
    "sanity": (Broken, Rows, {}, "this batch can't be validated"),
    "resume file": (Small, Rows, {"resume": "nowhere.ckpt"}, "nowhere.ckpt"),
    "resume last": (Small, Rows, {"resume": "last"}, "there is no whole checkpoint"),
    "resume state": (Small, Rows, {"resume": {"task": {}}}, "has no fingerprint"),
}


def made(
    folder: Path, make: Any, data: Any, callbacks: Any = (), resume: Any = None, **settings: Any
) -> tuple[Trainer, Any]:
    """With all that writes files."""
    trainer = Trainer(
        make(),
        data(),
        settings=TrainerSettings(max_epochs=1, **settings),
        callbacks=[Checkpoint(), *callbacks],
        loggers=[CSV(), TensorBoard()],
        run=RunInfo(directory=str(folder / "run")),
    )
    return trainer, resume


@pytest.mark.parametrize("name", REFUSED)
def test_what_prepare_refuses_leaves_no_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, data, given, said = REFUSED[name]
    with pytest.raises(UserError, match=f"^[^\n]*{said}[^\n]*$"):
        trainer, resume = made(tmp_path, make, data, **given)
        trainer.prepare(resume)
    assert list(tmp_path.iterdir()) == []


def test_a_resume_that_differs_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer, _ = made(tmp_path, Small, Rows, accumulate=2)
    with pytest.raises(UserError, match="differs from the one that it would continue: .*accumul"):
        trainer.prepare(fitted().state_dict())
    assert list(tmp_path.iterdir()) == []


def test_what_is_prepared_has_written_nothing_and_fit_goes_on_from_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer, _ = made(tmp_path, Small, Rows)
    training = trainer.prepare()
    assert "Training" in repr(training)  # as a notebook shows it
    assert list(tmp_path.iterdir()) == [] and trainer.global_step == 0
    trainer.fit()
    assert trainer.training is training and trainer.global_step == 5
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_cache": True}, "net"),
        ({"use_cache": True, "is_decoder": True}, "net"),
        ({"use_cache": True, "is_decoder": False}, ""),  # an encoder, which builds none
        ({"use_cache": False}, ""),
        ({}, ""),
    ],
)
def test_a_causal_model_that_builds_a_cache_in_training_is_named_before_the_first_step(
    config, named
):
    """As models of transformers do, whose outermost modules share a config with those within."""
    task: Any = Small()
    task.net.config = task.net[0].config = SimpleNamespace(**config)
    notes = trainer_of(task).prepare().notes
    line = f"builds a cache of keys and values in training: {named}; documents that position_ids"
    assert [note.startswith(line) for note in notes] == [True] * bool(named)


def test_a_fit_after_a_refused_prepare_prepares_afresh():
    trainer = trainer_of()
    with pytest.raises(UserError, match="nowhere.ckpt"):
        trainer.prepare("nowhere.ckpt")
    trainer.fit()
    assert is_same(trainer.task.state_dict(), fitted().task.state_dict())


class Failing(Small):
    """Its first validation fails: the one that is tried before training."""

    has_failed = False  # of the class: the task's own attributes are put back

    def validation_step(self, batch: Any) -> Any:
        if not self.has_failed:
            type(self).has_failed = True
            raise ValueError("a bug")
        return super().training_step(batch)


def test_a_fit_after_a_failed_try_of_the_validation_tries_it_again():
    trainer = trainer_of(Failing(), sanity_batches=1)
    with pytest.raises(ValueError, match="a bug"):
        trainer.prepare()
    assert trainer.prepare() is trainer.training
    trainer.fit()
    assert trainer.global_step == 10


def test_what_a_failed_resume_has_loaded_in_part_is_not_trained():
    def fail(_: Any) -> None:
        raise ValueError("a bug")

    state, hooks = fitted().state_dict(), Hooks(on_load=fail)
    trainer = trainer_of(callbacks=[hooks], max_epochs=3)
    with pytest.raises(ValueError, match="a bug"):
        trainer.fit(state)
    with pytest.raises(UserError, match="^this Trainer has loaded .* or make another one$"):
        trainer.fit()
    del hooks.at["on_load"]
    trainer.fit(state)
    wanted = fitted(callbacks=[Hooks()], max_epochs=3, resume=state)
    assert is_same(trainer.task.state_dict(), wanted.task.state_dict())


@pytest.mark.parametrize("between", [Trainer.validate, Trainer.test, Trainer.predict])
def test_a_fit_goes_on_from_what_prepare_has_loaded_whatever_is_evaluated_in_between(between):
    class Ends(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.global_step == 3:  # within an epoch, where random numbers are kept
                self.state = deepcopy(trainer.state_dict())

    make, ends = partial(Small, Adam, dropout=0.5), Ends()
    fitted(make=make, callbacks=[ends])
    wanted = fitted(make=make, callbacks=[Ends()], resume=ends.state)
    trainer = trainer_of(make=make, callbacks=[Ends()])
    trainer.prepare(deepcopy(ends.state))
    between(trainer)
    trainer.fit()
    assert trainer.global_step == wanted.global_step == 10
    assert is_same(trainer.task.state_dict(), wanted.task.state_dict())
    assert trainer.metrics["train/loss"] == wanted.metrics["train/loss"]


def test_a_trainer_with_ranks_of_its_own_prepares_in_them_alone():
    trainer = trainer_of(strategy=DDP(2, "cpu"))
    with pytest.raises(UserError, match=r"^Trainer.prepare: the ranks of DDP do it; call fit$"):
        trainer.prepare()


def test_what_prepare_has_loaded_is_not_trained_as_a_new_run():
    trainer = trainer_of(max_epochs=3)
    trainer.prepare(fitted().state_dict())
    with pytest.raises(UserError, match="nowhere.ckpt"):
        trainer.prepare("nowhere.ckpt")
    for begins in (trainer.fit, trainer.prepare):
        with pytest.raises(UserError, match="^this Trainer has loaded .* pass resume again"):
            begins()


def test_a_resume_that_is_refused_has_loaded_nothing_and_a_plain_fit_trains():
    trainer = trainer_of()
    with pytest.raises(UserError, match="differs from the one that it would continue"):
        trainer.prepare(fitted(accumulate=2).state_dict())
    trainer.prepare()
    trainer.fit()
    assert trainer.global_step == 10


@pytest.mark.parametrize("name", HOOKS)
def test_a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are(name):
    callback = type("One", (Callback,), {name: lambda self, trainer, *args: None})()
    gc.collect()
    gc.disable()
    try:
        trainer = fitted(callbacks=[callback])
        there = weakref.ref(trainer)
        del trainer
        assert there() is None
    finally:
        gc.enable()


FREE = """
    max_epochs max_steps max_seconds min_epochs min_steps gpus accelerator plateau_monitor threads
    validate_every_epochs validate_every_steps sanity_batches on_nonfinite log_every
    max_skipped_steps
    limit_eval_batches limit_val_batches limit_test_batches limit_predict_batches logical_replicas
    deterministic compile checkpoint_activations data_on_device skip_dynamo_import channels_last
    cudnn_benchmark profile data_timeout_seconds max_restarts hang_seconds grace_seconds share_check
    exact_layers batch_norm dropout micro_batch
"""


def test_every_setting_decides_the_numbers_or_may_change_at_a_resume():
    """Who adds one writes it in `fingerprint.DECIDING`, or here."""
    names = {each.name for each in fields(TrainerSettings)}
    unknown = names - set(DECIDING) - set(FREE.split())
    assert not unknown, "add it to fingerprint.DECIDING, or to FREE of this file"
    assert not set(DECIDING) & set(FREE.split())
