"""Validation as it is asked for: several sets by name, how often, how much of them, and before."""

import json
import logging
import math
import random
from copy import deepcopy
from typing import Any

import numpy
import pytest
import torch
from command import attempts, write
from forked import on
from small import Adam, Hooks, Listed, Rows, Small, Stream, Streamed, fitted, is_same, trainer
from torch import Tensor
from torch.utils.data import TensorDataset

from dpframe import Callback, RunInfo, Strategy, Trainer, TrainerSettings, UserError, seeding
from dpframe.callbacks import Checkpoint, EarlyStopping
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP

log = logging.getLogger(__name__)
STRATEGIES = [Strategy(), DataParallel(3, "cpu"), DDP(3, "cpu")]
each_strategy = pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=["cpu-1", "data_parallel-3", "ddp-3"]
)


# Several sets


class Told(Small):
    """Its steps measure which data set they are told that the batch is of."""

    def validation_step(self, batch: list[Tensor], name: str = "") -> dict[str, Any]:
        return {**self.training_step(batch), "is_clean": float(name == "clean")}

    def predict_step(self, batch: list[Tensor], name: str = "") -> Tensor:
        return torch.stack([batch[1], torch.full_like(batch[1], float(name == "clean"))], dim=1)


class Sets(Rows):
    """7 clean rows as tensors and 3 noisy ones as a stream, in batches of 4."""

    def __init__(self) -> None:
        super().__init__(shuffle=False)

    def val_dataset(self) -> Any:
        x, y = self.held_out.tensors
        noisy = TensorDataset(x[7:10], y[7:10] + 1)
        return {"clean": TensorDataset(x[:7], y[:7]), "noisy": Stream(Listed(noisy))}

    def test_dataset(self) -> Any:
        return self.val_dataset()


def history_on(strategy: Strategy) -> tuple[list[list[dict[str, float]]], bool]:
    """The numbers of each validation in each process; and whether a run from the state within the
    second epoch has the same ones, and the same weights."""
    seen: list[tuple[int, dict[str, float]]] = []
    states: list[Any] = []

    def look(trainer: Trainer) -> None:
        values = {k: v for k, v in trainer.metrics.items() if k.startswith("val/")}
        seen.append((trainer.global_step, values))
        if trainer.global_step == 6:
            states.append(deepcopy(strategy.collectives.broadcast(trainer.state_dict())))

    def run(resume: Any = None) -> Trainer:
        return fitted(
            data=Sets(),
            make=Told,
            callbacks=[Hooks(on_validation_end=look)],
            resume=resume,
            strategy=strategy,
            precision="64",
            validate_every_steps=3,
        )

    whole = run()
    before, seen[:] = seen[:], []
    again = run(states[0])
    after = [entry for entry in before if entry[0] > 6]
    weights = is_same(whole.task.state_dict(), again.task.state_dict())
    return strategy.collectives.gather(before), weights and is_same(seen, after)


def by_hand() -> list[tuple[int, dict[str, float]]]:
    made = trainer(data=Sets(), make=Told, precision="64")
    net, data = made.task.net, made.data
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x, y = (tensor.double() for tensor in data.train.tensors)
    clean = [tensor.double() for tensor in data.val_dataset()["clean"].tensors]
    noisy = [torch.stack(part).double() for part in zip(*data.val_dataset()["noisy"], strict=True)]
    both = [torch.cat(pair) for pair in zip(clean, noisy, strict=True)]
    history = []
    for step in range(1, 11):
        rows = slice(4 * ((step - 1) % 5), 4 * ((step - 1) % 5) + 4)
        optimizer.zero_grad()
        (net(x[rows])[:, 0] - y[rows]).square().mean().backward()
        optimizer.step()
        if step in (3, 5, 6, 9, 10):
            values = {"val/is_clean": 0.7, "val/clean/is_clean": 1.0, "val/noisy/is_clean": 0.0}
            for name, (inputs, target) in (("clean/", clean), ("noisy/", noisy), ("", both)):
                error = net(inputs)[:, 0].detach() - target
                values[f"val/{name}loss"] = error.square().mean().item()
                values[f"val/{name}mae"] = error.abs().mean().item()
            history.append((step, values))
    return history


@each_strategy
def test_each_set_has_the_means_that_a_loop_by_hand_has_and_all_rows_have_theirs(strategy):
    everywhere, is_resumed = on(strategy, history_on)
    for history in everywhere:
        for (step, values), (wanted_step, wanted) in zip(history, by_hand(), strict=True):
            assert step == wanted_step
            assert values == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    assert is_resumed


def test_a_hook_is_told_which_set_a_batch_is_of():
    seen: list[str] = []

    class Sees(Callback):
        def on_validation_batch_end(self, trainer: Any, batch: Any, outputs: Any) -> None:
            seen.append(batch.name)

    fitted(data=Sets(), make=Told, callbacks=[Sees()], max_epochs=1)
    assert list(dict.fromkeys(seen)) == ["clean", "noisy"]
    seen.clear()
    fitted(callbacks=[Sees()], max_epochs=1)
    assert set(seen) == {""}


def evaluations_on(strategy: Strategy) -> tuple[dict[str, float], dict[str, Any]]:
    made = Trainer(Told(), Sets(), strategy=strategy)
    hooks = Hooks()
    predicted = Trainer(Told(), Sets(), strategy=strategy, callbacks=[hooks]).predict() or {}
    return made.test(), {name: each.joined().tolist() for name, each in predicted.items()}


@each_strategy
def test_test_and_predict_take_each_set_in_turn(strategy):
    tested, predicted = on(strategy, evaluations_on)
    assert {name: value for name, value in tested.items() if name.endswith("is_clean")} == {
        "test/clean/is_clean": 1.0,
        "test/noisy/is_clean": 0.0,
        "test/is_clean": pytest.approx(0.7, rel=1e-12),
    }
    y = Rows().held_out.tensors[1]
    assert predicted == {
        "clean": [[value, 1.0] for value in y[:7].tolist()],
        "noisy": [[value, 0.0] for value in (y[7:10] + 1).tolist()],
    }


@pytest.mark.parametrize(
    "returned, said",
    [
        ({}, "returned an empty dict; return a data set for each name"),
        ({"a/b": Rows().train}, "has a data set named 'a/b'; use letters, digits, _ and -"),
        ({"": Rows().train}, "has a data set named ''; use letters"),
        ({1: Rows().train}, "has a data set named 1; use letters"),
        ({"a": None}, "['a'] returned None; return a data set"),
        ({"a": Listed([])}, "['a'] has no rows; it needs at least one"),
    ],
)
def test_names_that_would_be_no_names_of_metrics_and_sets_without_rows_are_refused(returned, said):
    class Odd(Rows):
        def val_dataset(self) -> Any:
            return returned

    with pytest.raises(UserError) as caught:
        Trainer(Small(), Odd()).validate()
    assert str(caught.value).startswith("Odd.val_dataset()")
    assert said in str(caught.value)


# Before training


class Forgets(Told):
    """Its steps leave a layer in training mode."""

    def validation_step(self, batch: list[Tensor], name: str = "") -> dict[str, Any]:
        trained = [each for each, module in self.named_modules() if module.training]
        self.net[2].train()
        return {**super().validation_step(batch, name), "trained": float(len(trained))}


def test_each_set_begins_in_evaluation_mode_whatever_a_step_has_left():
    made = fitted(Forgets(), data=Sets(), max_epochs=1)
    # Of 7 clean rows in two batches the last 3 meet it, and the 3 noisy rows are one batch.
    assert made.metrics["val/clean/trained"] == pytest.approx(3 / 7)
    assert made.metrics["val/noisy/trained"] == 0
    assert all(module.training for module in made.task.modules())


class Draws(Told):
    """Its validation draws from all three generators."""

    def validation_step(self, batch: list[Tensor], name: str = "") -> dict[str, Any]:
        noise = torch.rand(()) + numpy.random.rand() + random.random()
        return {**super().validation_step(batch, name), "noise": noise}


def tried_on(strategy: Strategy) -> tuple[bool, list[list[str]], list[float]]:
    """Of a resumed run without and one with a sanity check: whether they end alike, their hooks,
    and how many rows were tried."""
    rows: list[int] = []
    states: list[Any] = []

    class Counts(Draws):
        def validation_step(self, batch: list[Tensor], name: str = "") -> dict[str, Any]:
            rows.append(len(batch[0]))
            return super().validation_step(batch, name)

    def keep(trainer: Trainer) -> None:
        if trainer.global_step == 3:
            states.append(deepcopy(strategy.collectives.broadcast(trainer.state_dict())))

    def run(sanity_batches: int, resume: Any = None) -> tuple[Any, list[str], float]:
        tried: list[float] = []
        hooks = Hooks(on_fit_start=lambda trainer: tried.append(sum(rows)), on_step_end=keep)
        rows.clear()
        made = fitted(
            data=Sets(),
            make=lambda: Counts(dropout=0.5),
            callbacks=[hooks],
            strategy=strategy,
            sanity_batches=sanity_batches,
            share_check="off",
            resume=resume,
        )
        end = (
            made.task.state_dict(),
            made.metrics,
            strategy.collectives.gather(seeding.random_state()),
        )
        return (
            deepcopy(end),
            [name for name, _ in hooks.seen],
            strategy.collectives.sum_numbers(tried)[0],
        )

    run(0)
    without, with_it = run(0, states[0]), run(1, states[0])
    return is_same(without[0], with_it[0]), [without[1], with_it[1]], [without[2], with_it[2]]


@each_strategy
def test_the_first_batch_of_each_set_is_tried_before_training_and_changes_nothing(strategy):
    is_unchanged, hooks, rows = on(strategy, tried_on)
    assert is_unchanged
    assert hooks[0] == hooks[1]
    assert rows == [0, 4 + 3]


PLATEAU = "{_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true}"


def test_mistakes_in_validation_are_met_before_there_is_a_run_directory(tmp_path):
    needed = {
        "callbacks.checkpoint.monitor": [],
        "callbacks.early_stopping.monitor": ["callbacks=early_stopping"],
        "trainer.plateau_monitor": [f"task.scheduler={PLATEAU}"],
    }
    short = ["recipe=boston", "trainer.max_epochs=1", "callbacks.progress=null"]
    misspelt = [[*short, *words, f"{key}=val/maee"] for key, words in needed.items()]
    slip = [*short, "task.net._args_.0.in_features=12"]
    *runs, slipped = attempts([*misspelt, slip], tmp_path)
    for run, key in zip(runs, needed, strict=True):
        line = f"dpframe: {key}=val/maee is not measured; did you mean val/mae?\n"
        assert (run.code, run.out, run.err, run.files) == (2, "", line, [])
    assert slipped.code == 1 and "in training_step" in slipped.err and slipped.files == []


class Adds(Callback):
    """A metric of its own."""

    def on_validation_end(self, trainer: Trainer) -> None:
        trainer.log({"val/mine": 1.0})


class Draw(Callback):
    """Has no hook in which such a number could be added."""

    def on_fit_end(self, trainer: Trainer) -> None: ...


def test_a_monitored_number_may_come_from_a_callback_or_from_training():
    for monitor, callbacks in (("val/mine", [Adds()]), ("train/loss", [])):
        stopping = EarlyStopping(monitor)
        trainer(callbacks=[*callbacks, stopping], sanity_batches=1).prepare()
    for monitors in (["val/mine", "val/mae"], ["val/mae", "val/mine"]):
        callbacks = [Draw(), *map(EarlyStopping, monitors)]
        with pytest.raises(UserError, match="monitor=val/mine is not measured"):
            trainer(callbacks=callbacks, sanity_batches=1).prepare()


class Counts(Callback):
    """Logs nothing: its `log` is another one."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        log.info("epoch %s", trainer.epoch)

    on_validation_end = on_epoch_end


class Inherits(Adds):
    def on_epoch_end(self, trainer: Trainer) -> None: ...


class Decorated(Callback):
    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer) -> None:
        (lambda numbers: trainer.log(numbers))({"val/mine": 1.0})


class Indirect(Callback):
    logs = True

    def on_validation_end(self, trainer: Trainer) -> None:
        add_to(trainer)


def add_to(trainer: Trainer) -> None:
    trainer.log({"val/mine": 1.0})


def test_a_misspelt_monitor_is_refused_before_training_beside_callbacks_that_log_nothing():
    line = (
        "callbacks.checkpoint.monitor=val/maee is not measured, and no callback is seen to log it "
        "(one that does so by a function sets logs = True); did you mean val/mae?"
    )
    with pytest.raises(UserError) as caught:
        trainer(callbacks=[Counts(), Checkpoint("val/maee")], sanity_batches=1).prepare()
    assert str(caught.value) == line


@pytest.mark.parametrize("kind", [Adds, Inherits, Decorated, Indirect])
def test_a_callback_may_log_what_another_one_watches(kind):
    stopping = EarlyStopping("val/mine")
    made = fitted(callbacks=[Counts(), stopping, kind()], sanity_batches=1)
    assert made.metrics["val/mine"] == 1.0 == stopping.monitor.best


class Weightless(Small):
    """Its first batches count nothing."""

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {**self.training_step(batch), "weight": batch[0].new_zeros(())}


def test_names_are_those_of_the_steps_whatever_their_weights():
    trainer(Weightless(), callbacks=[EarlyStopping("val/mae")], sanity_batches=2).prepare()
    with pytest.raises(UserError, match="did you mean val/mae"):
        trainer(Weightless(), callbacks=[EarlyStopping("val/mea")], sanity_batches=2).prepare()


# How often, and how much


@pytest.mark.parametrize(
    "rows, settings, validated",
    [
        (40, {"validate_every_epochs": 0.25}, [2, 5, 8, 10, 12, 15, 18, 20]),
        (40, {"validate_every_epochs": 0.3}, [3, 6, 9, 10, 13, 16, 19, 20]),
        (40, {"validate_every_epochs": 0.5, "accumulate": 4}, [2, 3, 5, 6]),
        (12, {"validate_every_epochs": 0.1}, [1, 2, 3, 4, 5, 6]),
        (
            40,
            {"validate_every_epochs": 0.5, "validate_every_steps": 4},
            [4, 5, 8, 10, 12, 15, 16, 20],
        ),
        (40, {"validate_every_epochs": 0.5, "limit_train_batches": 0.4}, [2, 4, 6, 8]),
        (20, {"validate_every_epochs": 2.0}, [10]),
    ],
)
def test_a_share_of_an_epoch_is_at_the_nearest_step(rows, settings, validated):
    hooks = Hooks()
    fitted(data=Rows(rows, 4), callbacks=[hooks], **settings)
    assert hooks.steps("on_validation_end") == validated


class StopsAfterTwo(Callback):
    """On the main process alone."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        if trainer.epoch == 2 and trainer.strategy.is_main:
            trainer.stop("enough")


def ended(strategy: Strategy, settings: dict[str, Any]) -> tuple[int, float, float]:
    torch.manual_seed(0)
    fit = fitted(
        Small(), Rows(), strategy=strategy, callbacks=[StopsAfterTwo()], max_epochs=9, **settings
    )
    return fit.epoch, fit.metrics["val/loss"], fit.validate()["val/loss"]


@each_strategy
def test_a_training_that_a_hook_ends_has_its_validation_too(strategy):
    """Whatever comes first: this one, after epochs that are not validated, or one of the epoch."""
    epochs, loss, measured_again = on(strategy, ended, {"validate_every_epochs": 5})
    assert epochs == 2 and loss == measured_again
    assert on(strategy, ended, {"validate_every_epochs": 2}) == (epochs, loss, loss)


def test_a_run_that_a_hook_has_ended_goes_on_as_if_it_had_not(tmp_path):
    def fit(directory: Any, *callbacks: Callback, resume: Any = None) -> Trainer:
        torch.manual_seed(0)
        run = RunInfo(directory=str(tmp_path / directory))
        settings = TrainerSettings(max_epochs=7, validate_every_epochs=5)
        each = [*callbacks, Checkpoint("val/loss", "min")]
        made = Trainer(Small(Adam), Rows(), settings=settings, callbacks=each, run=run)
        made.fit(resume)
        return made

    short = fit("resumed", StopsAfterTwo())
    assert (tmp_path / "resumed/checkpoints/best.ckpt").is_file()
    assert short.progress.global_step == 2 * 5
    whole, resumed = fit("whole"), fit("resumed", resume="last")
    assert resumed.metrics == whole.metrics
    assert is_same(resumed.task.state_dict(), whole.task.state_dict())


def test_a_run_resumed_at_a_share_of_an_epoch_goes_on_to_the_bit():
    states: list[Any] = []

    def keep(trainer: Trainer) -> None:  # after the step, before its validation
        if trainer.global_step == 5:
            states.append(deepcopy(trainer.state_dict()))

    settings = {"validate_every_epochs": 0.5, "make": lambda: Draws(dropout=0.5)}
    whole = fitted(data=Rows(40, 4), callbacks=[Hooks(on_step_end=keep)], **settings)
    hooks = Hooks()
    again = fitted(data=Rows(40, 4), callbacks=[hooks], resume=states[0], **settings)
    assert hooks.steps("on_validation_end") == [5, 10, 15, 20]
    assert is_same(again.task.state_dict(), whole.task.state_dict())
    assert is_same(again.metrics, whole.metrics)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"validate_every_epochs": 0.5}, "validate_every_epochs=0.5 is a share of an epoch, and"),
        ({"limit_train_batches": 0.5}, "limit_train_batches=0.5 is a share of the batches, and"),
    ],
)
def test_a_share_of_a_stream_is_refused(settings, said):
    with pytest.raises(UserError, match=f"^trainer.{said} a stream has no known length;"):
        trainer(data=Streamed(), **settings).prepare()
    trainer(data=Streamed(val=False), validate_every_epochs=0.5).prepare()  # there is none


@pytest.mark.parametrize(
    "limits, read",
    [
        ({}, (5, 5, 5)),
        ({"limit_eval_batches": 2}, (2, 2, 2)),
        ({"limit_eval_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1.0}, (1, 5, 2)),
        ({"limit_predict_batches": 0.5, "limit_eval_batches": 0.01}, (1, 1, 2)),
        ({"limit_val_batches": 0.7, "limit_test_batches": 99}, (4, 5, 5)),
    ],
)
def test_validation_test_and_prediction_have_limits_of_their_own(limits, read):
    seen: list[str] = []

    class Notes(Small):
        def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
            seen.append("val")
            return self.training_step(batch)

        def test_step(self, batch: list[Tensor]) -> dict[str, Any]:
            seen.append("test")
            return self.training_step(batch)

    made = trainer(Notes(), **limits)
    made.validate()
    made.test()
    assert (seen.count("val"), seen.count("test"), len(made.predict().batches)) == read


@pytest.mark.parametrize(
    "key", ["limit_train_batches", "limit_val_batches", "validate_every_epochs"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, 0.0, math.nan, math.inf])
def test_what_is_neither_a_number_nor_a_share_is_refused(key, value):
    with pytest.raises(UserError, match=f"^trainer.{key}={value} is out of range; use a whole"):
        TrainerSettings(**{key: value})


class Scored(Small):
    """Its validation is always the same."""

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": torch.zeros(())}


@pytest.mark.parametrize(
    "settings, epochs",
    [({}, 3), ({"min_epochs": 5}, 5), ({"min_steps": 31}, 7), ({"min_epochs": 9}, 8)],
)
def test_early_stopping_waits_for_the_least_that_was_asked_for(settings, epochs):
    stopping = EarlyStopping(patience=2)
    assert fitted(Scored(), callbacks=[stopping], max_epochs=8, **settings).epoch == epochs


# Batches


class Read(Rows):
    """22 rows in batches of 4; evaluations have batches of 7."""

    def __init__(self, kind: str = "tensors") -> None:
        super().__init__(22, 4)
        self.drop_last, self.eval_batch_size = True, 7
        self.kind = kind

    def train_dataset(self) -> Any:
        return {"tensors": self.train, "rows": Listed(self.train)}.get(
            self.kind, Stream(Listed(self.train))
        )

    def train_sampler(self, dataset: Any) -> Any:
        return range(21, -1, -1) if self.kind == "rows" else None


def sizes_on(strategy: Strategy) -> dict[str, tuple[list[int], list[int], int]]:
    """By the kind of data set: the rows of the training and the validation batches."""
    found = {}
    for kind in ("tensors", "rows", "stream"):
        sizes: dict[bool, list[int]] = {True: [], False: []}

        class Sizes(Small):
            def on_batch_end(self, trainer: Trainer, batch: Any, outputs: Any) -> None:
                sizes[True].append(batch.rows)  # noqa: B023

            def on_validation_batch_end(self, trainer: Trainer, batch: Any, outputs: Any) -> None:
                sizes[False].append(batch.rows)  # noqa: B023

        made = fitted(Sizes(), Read(kind), strategy=strategy, max_epochs=1)
        found[kind] = sizes[True], sizes[False], made.progress.rows_seen
    return found


@each_strategy
def test_the_incomplete_batch_is_left_out_of_training_and_evaluations_have_their_own_size(strategy):
    for sizes in on(strategy, sizes_on).values():
        assert sizes == ([4] * 5, [7, 7, 7, 1], 20)


def test_leaving_out_the_only_batch_is_refused():
    data = Rows(3, 4)
    data.drop_last = True
    with pytest.raises(UserError, match=r"^drop_last=true leaves no batch: Rows.train_dataset\(\)"):
        trainer(data=data).prepare()


def test_a_run_that_leaves_out_rows_is_not_resumed_by_one_that_does_not():
    kept, state = Rows(), fitted(data=Read(), max_epochs=1).state_dict()
    kept.batch_size, kept.train = 4, Read().train
    with pytest.raises(UserError, match="data.drop_last=true there, nothing here"):
        fitted(data=kept, resume=state)


OWN_DATA = """
from dpframe.recipes.boston import BostonData

class Own(BostonData):
    def __init__(self, batch_size=32):
        super().__init__(batch_size)
"""


def test_every_data_module_has_the_keys_of_all_in_its_config(tmp_path):
    write(tmp_path, {"own.py": OWN_DATA})
    keys = "drop_last: true, eval_batch_size: 40, persistent_workers: false, pin_memory: false"
    data = f"data={{_target_: own.Own, batch_size: 100, {keys}}}"
    short = ["recipe=boston", "trainer.max_epochs=1", "callbacks.progress=null", "seed=3"]
    (run,) = attempts([[*short, "~data", f"+{data}", "hydra.run.dir=run"]], tmp_path)
    assert run.code == 0, run.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4
