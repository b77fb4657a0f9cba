"""A method that nothing would call is refused before training, and a helper of one's own is not."""

import re
import sys
from types import ModuleType

import pytest
import small
from small import Rows, Small, fitted, trainer

from dpframe import Callback, DataModule, Task, UserError
from dpframe.trainer.given import CALLED, THEIRS

BASES = {Task: Small, DataModule: Rows, Callback: Callback}


def given(base, *names):
    """The task, DataModule or callback, with methods so named, is given to a Trainer."""
    own = {name: lambda self, *args: None for name in names}
    made = type("Mine", (BASES[base],), own | {"__module__": "small"})()  # which uses none of them
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
        f"Mine.{name} is never called; rename it to {meant}, or to _{name} if it is a helper"
    )
    assert given(base, f"_{name}")
    if base is not Callback:
        assert given(base, meant.replace("setup", "collate"), *([name] if meant != "setup" else []))


@pytest.mark.parametrize("base, name", [(base, name) for base in THEIRS for name in THEIRS[base]])
def test_another_frameworks_hook_is_refused_with_what_to_do_instead(base, name):
    line = refusal(base, name)
    assert line == f"Mine.{name} is never called; {THEIRS[base][name]}"
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
    def setup(self):
        self.teardown()

    def teardown(self):
        self.is_torn_down = True

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

    def validation_epoch_end(self, numbers):
        self.seen = numbers


class Inherits(Helped):
    def teardown(self):
        super().teardown()


class ByScript(Rows):
    def validate_dataset(self):
        """A function of this file calls it."""


class Forgotten(Rows):
    __module__ = "small"

    def teardown(self):
        """Nobody calls it."""

    def vall_dataset(self):
        return super().val_dataset()


class Staged(Small):
    def on_step_end(self, trainer):
        for stage in ("training", "test"):
            getattr(self, f"{stage}_step_end")()

    def training_step_end(self): ...

    def test_step_end(self): ...


class Watched(Small):
    def val_step(self): ...


class Watcher(Callback):
    def on_test_end(self, trainer):
        trainer.task.val_step()


TYPED = """
class Typed(Small):
    def on_step_end(self, trainer):
        self.training_step_end()

    def training_step_end(self): ...
"""


@pytest.mark.parametrize("module", ["__main__", "not_imported"])
def test_what_has_no_source_is_not_refused(module, monkeypatch):
    """A cell of a notebook, or a class whose module is gone."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    names = {"__name__": module, "Small": Small}
    exec(TYPED, names)
    assert trainer(task=names["Typed"]())


def prepared():
    data = ByScript()
    data.validate_dataset()
    return data


def test_what_the_users_own_code_calls_is_a_helper_too():
    task = fitted(Epochs(), Inherits(), max_epochs=1).task
    assert task.seen and trainer(data=prepared()) and trainer(data=Watches())
    assert trainer(task=Staged()) and trainer(task=Watched(), callbacks=[Watcher()])
    for name in ("teardown", "vall_dataset"):
        with pytest.raises(UserError, match=f"^Forgotten.{name} is never called; "):
            trainer(data=Forgotten())
        delattr(Forgotten, name)
    assert trainer(data=Forgotten()) and small.Rows


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
