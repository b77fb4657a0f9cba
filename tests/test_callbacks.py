"""Callbacks: the order of hooks, ends by a metric, a run that fails, and what is on screen."""

import csv
import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from forked import on
from recorded import Recorder, once, weights, weights_apart
from small import Clock, Hooks, Rows, Scripted, Small, fitted, is_same, trainer

from dpframe import Callback, Strategy, UserError, checkpoint
from dpframe.callbacks import progress
from dpframe.callbacks.averages import EMA
from dpframe.callbacks.banner import banner
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.callbacks.early_stopping import EarlyStopping
from dpframe.callbacks.monitor import Best, Monitor
from dpframe.callbacks.progress import Progress
from dpframe.callbacks.prune import Prune
from dpframe.loggers.csv import CSV
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU
from dpframe.trainer import callback
from dpframe.trainer.callback import HOOKS

# Hooks

BATCH = ["on_batch_start", "on_batch_end"]
STEP = [*BATCH, "on_before_step", "on_step_end"]
VALIDATION = ["on_validation_start", *["on_validation_batch_end"] * 2, "on_validation_end"]


@pytest.mark.parametrize(
    "settings, steps",
    [
        ({"validate_every_steps": 1}, [*STEP, *VALIDATION] * 2),
        ({}, [*STEP, *STEP, *VALIDATION]),
        ({"accumulate": 2}, [*BATCH, *BATCH, *STEP[2:], *VALIDATION]),
    ],
)
def test_hooks_come_in_the_order_that_is_documented(settings, steps):
    hooks = Hooks()
    fitted(data=Rows(8), callbacks=[hooks], max_epochs=2, **settings)
    epoch = ["on_epoch_start", *steps, "on_epoch_end"]
    assert [hook for hook, _ in hooks.seen] == ["on_fit_start", *epoch, *epoch, "on_fit_end"]


def test_the_documentation_names_every_hook_in_the_code():
    assert set(re.findall(r"on_\w+", callback.__doc__)) == set(HOOKS)
    loop = dedent(callback.__doc__.split("\n\n")[1])
    assert (
        f"```\n{loop}\n```" in (Path(__file__).parent.parent / "docs" / "callbacks.md").read_text()
    )


@pytest.mark.parametrize("mode", ["validate", "test", "predict"])
def test_each_other_mode_has_its_own_hooks(mode):
    hooks = Hooks()
    one = trainer(callbacks=[hooks])
    getattr(one, mode)()
    name = "on_validation" if mode == "validate" else f"on_{mode}"
    calls = [f"{name}_start", *[f"{name}_batch_end"] * 5, f"{name}_end"]
    assert hooks.seen == [(call, 0) for call in calls]
    assert one.mode == mode


def test_a_callback_that_runs_last_sees_what_the_others_decided():
    seen = []

    class Last(Callback):
        runs_last = True

        def on_step_end(self, trainer):
            seen.append(trainer.should_stop)

    stops = Hooks(on_step_end=lambda t: t.global_step == 2 and t.stop("enough"))
    fitted(callbacks=[Last(), stops])
    assert seen == [False, True]


# trainer.log


class Extra(Callback):
    """Logs a val/ number that gets worse, and one at each other hook."""

    def on_fit_start(self, trainer):
        trainer.log({"start/rows": 20})

    def on_step_end(self, trainer):
        if trainer.global_step == 2:
            trainer.log({"mine/at_2": torch.tensor(0.5)})

    def on_validation_end(self, trainer):
        trainer.log({"val/extra": float(trainer.global_step)})

    def on_epoch_end(self, trainer):
        trainer.log({"train/extra": np.float32(0.25)})

    def on_test_end(self, trainer):
        trainer.log({"test/extra": 3})


def test_what_a_callback_logs_is_in_the_steps_row_before_others_decide_on_it(tmp_path):
    """Whatever the order of the config: early stopping, checkpoint and the summary come later."""
    stopping, best = EarlyStopping("val/extra", patience=1), Best("val/extra", "max", "sweep")
    saves = Checkpoint("train/extra", keep=1, seconds_between=0)
    made = fitted(
        callbacks=[saves, stopping, best, Extra()],
        loggers=[CSV()],
        directory=tmp_path,
        max_epochs=9,
    )
    assert made.global_step == 10, "5 steps an epoch, and the second is no better"
    assert made.stop_reason.startswith("val/extra has not got better than 5 for 1 val")
    assert best.value == {"val/extra": 10.0}
    with open(tmp_path / "metrics.csv") as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file)}
    assert rows.keys() == {0, 2, 5, 10}
    assert (rows[0]["start/rows"], rows[2]["mine/at_2"]) == ("20.0", "0.5")
    assert rows[10]["val/extra"] == "10.0" and rows[10]["train/extra"] == "0.25"
    assert float(rows[10]["val/loss"]) == made.metrics["val/loss"]
    saved = torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)
    assert saved["metrics"]["train/extra"] == 0.25 and saved["metrics"]["val/extra"] == 5.0


def test_other_modes_have_what_a_callback_logs_in_their_metrics(capsys):
    made = trainer(callbacks=[Progress(), Extra()])
    assert made.test()["test/extra"] == 3.0
    assert "test/extra  3\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "scalars, said",
    [
        ({"extra": 1}, "trainer.log got the name 'extra'; use a group and a name: val/extra"),
        ({"val/a b": 1}, "trainer.log got the name 'val/a b'; use a group and a name: val/extra"),
        ({0: 1}, "trainer.log got the name 0; use a group and a name: val/extra"),
        ({"val/x": "1"}, "trainer.log got val/x with a value of type str; pass one number"),
        ({"val/x": [1]}, "trainer.log got val/x with a value of type list; pass one number"),
        ({"val/x": torch.ones(2)}, "trainer.log got val/x with a value of shape (2,); pass one nu"),
        ({"val/x": np.ones(2)}, "trainer.log got val/x with a value of shape (2,); pass one numb"),
    ],
)
def test_what_is_no_number_with_a_name_is_not_logged(scalars, said):
    made = trainer()
    with pytest.raises(UserError) as caught:
        made.log({"val/first": 1, **scalars})
    assert str(caught.value).startswith(said)
    assert made.metrics == {}


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("on_step_ends", "did you mean on_step_end?"),
        ("on_train_epoch_end", "did you mean on_epoch_end?"),
    ],
)
def test_a_misspelt_hook_is_refused_with_the_nearest_name(name, nearest):
    misspelt = type("Counts", (Callback,), {name: lambda self, trainer: None})
    with pytest.raises(UserError) as caught:
        trainer(callbacks=[misspelt()])
    assert str(caught.value) == f"Counts.{name} is no hook and would never be called; {nearest}"


@pytest.mark.parametrize("part", [Callback, Small])
def test_a_hook_with_other_arguments_is_refused_before_training(part):
    for name, method, takes, called in [
        ("on_epoch_end", lambda self: None, "", "trainer"),
        ("on_fit_start", lambda self, trainer, module: None, "trainer, module", "trainer"),
        ("on_batch_end", lambda self, trainer, n=0: None, "trainer, n", "trainer, batch, outputs"),
    ]:
        made = type("Hooks", (part,), {name: method})()
        with pytest.raises(UserError) as caught:
            trainer(callbacks=[made]) if part is Callback else trainer(task=made)
        assert str(caught.value) == (
            f"Hooks.{name} takes ({takes}) and is called with ({called}); "
            f"write {name}(self, {called})"
        )


class Broken(Exception):
    pass


class Fails(Recorder):
    def close(self, metrics, *, succeeded):
        self.succeeded = succeeded


@pytest.mark.parametrize("hook", ["on_fit_start", "on_step_end", "on_epoch_end", "on_fit_end"])
def test_a_failure_reaches_on_exception_and_closes_the_loggers_as_failed(hook):
    def fail(trainer):
        raise Broken

    caught, logger = [], Fails()

    class Notes(Callback):
        def on_exception(self, trainer, error):
            caught.append(type(error))

    with pytest.raises(Broken):
        fitted(callbacks=[Notes(), Hooks(**{hook: fail})], loggers=[logger])
    assert caught == [Broken]
    assert logger.succeeded is False
    fitted(loggers=[logger])
    assert logger.succeeded is True


def test_a_failing_on_exception_leaves_no_logger_open():
    def fail(trainer):
        raise Broken

    logger = Fails()
    with pytest.raises(Broken):
        fitted(callbacks=[Hooks(on_step_end=fail, on_exception=fail)], loggers=[logger])
    assert logger.succeeded is False


def told_apart(strategy, logs, hook):
    """What each rank is refused with; nothing if it is not."""
    try:
        watch = EarlyStopping("val/extra", "min", patience=1)
        says = Hooks(**{hook: lambda t: t.log(logs(t)) if logs(t) else None})
        fitted(strategy=strategy, callbacks=[watch, says], sanity_batches=0)
    except UserError as error:
        return strategy.collectives.gather(str(error))
    return strategy.collectives.gather("")


LOGS = {
    "alike": lambda t: {"val/extra": 0.5 + t.global_step + 1e-9 * t.strategy.rank},
    "by the main process": lambda t: {"val/extra": 0.5} if t.strategy.is_main else {},
    "by the others": lambda t: {} if t.strategy.is_main else {"val/extra": 0.5},
    "other numbers": lambda t: {"val/extra": 0.5 + t.strategy.rank},
    "other names": lambda t: {"val/extra": 0.5, f"val/{t.strategy.rank}": 0.0},
}


def all_told_apart(strategy):
    return {
        (name, hook): told_apart(strategy, logs, hook)
        for name, logs in LOGS.items()
        for hook in ("on_step_end", "on_validation_end")
    }


def test_ranks_that_log_other_numbers_are_refused_before_anything_reads_them():
    said = on(DDP(2, "cpu"), all_told_apart)
    rest = (
        ", and something else on another one; call it on all ranks with the same numbers, e.g. "
        "those of one rank by trainer.strategy.collectives.broadcast"
    )
    got = {
        "by the main process": ("val/extra=0.5", "nothing"),
        "by the others": ("nothing", "val/extra=0.5"),
        "other numbers": ("val/extra=0.5", "val/extra=1.5"),
        "other names": ("val/extra=0.5, val/0=0", "val/extra=0.5, val/1=0"),
    }
    for (name, hook), by_rank in said.items():
        lines = ["", ""]
        if name != "alike":
            lines = [f"trainer.log got {got[name][rank]} on rank {rank}{rest}" for rank in (0, 1)]
        assert by_rank == lines, (name, hook)


# trainer.stop on one rank


def stops_alone(strategy: Strategy, hook: str, *, log_every: int) -> list[tuple[int, int, str]]:
    """Where each rank ends if rank 1 wants to stop at the first of these hooks from step 3 on."""

    def stop(t):
        if t.strategy.rank == 1 and t.global_step >= (0 if hook == "on_fit_start" else 3):
            t.stop("no disk")

    hooks, rows = Hooks(**{hook: stop}), Rows(40)
    settings = {"max_epochs": 50, "log_every": log_every, "validate_every_steps": 5}
    one = fitted(data=rows, strategy=strategy, callbacks=[hooks], **settings)
    return strategy.collectives.gather((one.global_step, one.epoch, one.stop_reason))


ALONE = {  # the step after which all end: of a hook between two meetings, the next one at last
    "on_fit_start": (0, 0),
    "on_epoch_start": (11, 15),
    "on_batch_start": (4, 5),
    "on_before_step": (4, 5),
    "on_step_end": (3, 5),
    "on_validation_start": (5, 5),
    "on_validation_batch_end": (5, 5),
    "on_validation_end": (5, 5),
    "on_epoch_end": (10, 10),
}


def all_that_stop_alone(strategy: Strategy) -> dict[str, Any]:
    found = {hook: stops_alone(strategy, hook, log_every=50) for hook in ALONE}
    found["on_step_end, logged"] = stops_alone(strategy, "on_step_end", log_every=3)
    return found


@pytest.mark.parametrize("kind", [DDP, FSDP])
def test_a_rank_that_stops_alone_ends_all_of_them_at_the_same_step_with_its_reason(kind):
    found = on(kind(2, "cpu", timeout_seconds=10), all_that_stop_alone)
    for hook, (first, last) in {**ALONE, "on_step_end, logged": (3, 3)}.items():
        (step, epoch, reason), *others = found[hook]
        assert first <= step <= last and epoch == step // 10, (hook, step, epoch)
        assert reason == "no disk" and others == [(step, epoch, reason)], hook


# Early stopping


def stopped(scores: list[float], **given) -> object:
    settings = {name: given.pop(name) for name in list(given) if name.startswith("validate")}
    stopping = EarlyStopping("val/score", **given)
    return fitted(Scripted(scores), callbacks=[stopping], max_epochs=6, **settings)


NAN = float("nan")


@pytest.mark.parametrize(
    "scores, given, epochs",
    [
        ([3, 2, 1, 1, 1, 0], {"patience": 2}, 5),
        ([3, 2, 4, 1, 4, 0], {"patience": 2}, 6),
        ([1, 2, 1, 1, 9, 9], {"patience": 2, "mode": "max"}, 4),
        ([3, 2.9, 2.8, 2.7, 2, 1], {"patience": 3, "min_delta": 0.5}, 4),
        ([NAN, NAN, 1, 1, 1, 1], {"patience": 2}, 2),
        ([2, NAN, 1, 1, 1, 1], {"patience": 2}, 5),
    ],
)
def test_early_stopping_ends_when_the_metric_stays_for_its_patience(scores, given, epochs):
    assert stopped(list(scores), **given).epoch == epochs


def test_early_stopping_says_why():
    reason = stopped([3.0, 1.25, 2.0, 2.0], patience=2).stop_reason
    assert reason == "val/score has not got better than 1.25 for 2 validations"
    assert stopped([1.0, 2.0], patience=1).stop_reason.endswith(" for 1 validation")


def test_early_stopping_counts_validations_not_epochs_between_them():
    assert stopped([1.0, 2.0, 3.0], patience=2, validate_every_epochs=2).epoch == 6


def test_early_stopping_within_an_epoch_ends_it():
    one = stopped([1.0, 2.0, 3.0], patience=2, validate_every_steps=1)
    assert (one.global_step, one.epoch) == (3, 0)


def test_early_stopping_by_a_train_metric_needs_no_validation():
    one = fitted(
        data=Rows(val=False),
        callbacks=[EarlyStopping("train/loss", patience=1, min_delta=1e9)],
        max_epochs=9,
    )
    assert one.epoch == 2


def test_early_stopping_without_patience_is_refused():
    """It would stop before the first step."""
    said = "^callbacks.early_stopping.patience=0 is out of range; use 1 or more$"
    with pytest.raises(UserError, match=said):
        EarlyStopping(patience=0)


def test_early_stopping_without_the_metric_is_refused():
    with pytest.raises(UserError, match="^callbacks.early_stopping.monitor=val/loss is not meas"):
        fitted(data=Rows(val=False), callbacks=[EarlyStopping()])


# On screen


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def banner_of(replicas: int, batch_size: int, **settings) -> list[str]:
    strategy = DataParallel(replicas, accelerator="cpu")
    strategy.setup()
    made = trainer(data=Rows(batch_size=batch_size), strategy=strategy, **settings)
    made.prepare()
    return lines(banner(made))


@pytest.mark.parametrize(
    "replicas, batch_size, said",
    [
        (4, 128, "batch 128 = 4 replicas x 32"),
        (1, 128, "batch 128 = 1 replica x 128"),
        (4, 30, "batch 30 = 8 + 8 + 8 + 6"),
        (8, 10, "batch 10 = 2 + 2 + 2 + 2 + 2 + 0 + 0 + 0"),
    ],
)
def test_the_banner_says_what_each_replica_gets_of_the_batch(replicas, batch_size, said):
    assert f"step       {said}" in banner_of(replicas, batch_size)


def test_the_banner_says_how_many_batches_make_a_step():
    said = "step       batch 8 = 2 replicas x 4, 3 batches a step"
    assert said in banner_of(2, 8, accumulate=3)


@pytest.mark.parametrize(
    ("replicas", "settings", "said"),
    [
        (1, {}, "32"),
        (2, {}, "32: one replica's curve but for rounding; trainer.logical_replicas: its bits"),
        (2, {"precision": "64"}, "64"),
    ],
)
def test_the_banner_says_what_several_replicas_keep_of_the_numbers(replicas, settings, said):
    assert f"precision  {said}" in banner_of(replicas, 8, **settings)


def test_the_banner_counts_the_parameters_by_layer():
    assert banner_of(1, 4)[-5:] == [
        "layer  kind    shapes  parameters",
        "-----  ------  ------  ----------",
        "net.0  Linear  8x3 8   32",
        "net.3  Linear  1x8 1   9",
        "total                  41",
    ]


def test_a_shared_parameter_counts_once():
    task = Small()
    task.again = torch.nn.Linear(3, 8, bias=False)
    task.again.weight = task.net[0].weight
    made = trainer(task)
    made.prepare()
    text = banner(made)
    assert re.search(r"^total +41$", text, re.MULTILINE)


def said(caplog) -> list[int]:
    """The epochs that have a line."""
    told = [record.getMessage() for record in caplog.records]
    return [int(found[1]) for text in told if (found := re.match(r"epoch (\d+)/", text))]


@pytest.mark.parametrize(
    ("seconds_an_epoch", "epochs"),
    [(1.0, [1, 2, 3, 4, 5, 6, 7, 8]), (0.5, [1, 3, 8]), (0.001, [1, 3, 8])],
)
def test_each_long_epoch_has_a_line_and_of_short_ones_the_first_the_best_and_the_last(
    monkeypatch, caplog, seconds_an_epoch, epochs
):
    caplog.set_level("INFO", "dpframe")
    ticks = Hooks(on_epoch_start=Clock(monkeypatch).ticks(seconds_an_epoch))
    callbacks = [ticks, EarlyStopping("val/score"), Progress()]
    fitted(Scripted([5, 4, 1, 2, 3, 4, 5, 6]), callbacks=callbacks, max_epochs=8)
    assert said(caplog) == epochs
    marked = [record.getMessage() for record in caplog.records if "  best" in record.getMessage()]
    assert [text.split()[1] for text in marked] == ([] if epochs[1] == 2 else ["3/8"])


def test_a_hundred_short_epochs_have_a_line_every_few_seconds(monkeypatch, caplog, capsys):
    caplog.set_level("INFO", "dpframe")
    ticks = Hooks(on_epoch_start=Clock(monkeypatch).ticks(0.2))
    fitted(callbacks=[ticks, Progress()], max_epochs=100)
    assert said(caplog) == [1, *range(26, 100, 25), 100]
    assert len(lines(capsys.readouterr().out)) < 25, "the banner and the table"


def test_a_failure_comes_after_the_line_of_the_epoch_before_it(monkeypatch, caplog):
    Clock(monkeypatch)
    caplog.set_level("INFO", "dpframe")

    def fail(trainer):
        if trainer.global_step == 17:
            assert said(caplog) == [1]
            raise Broken

    with pytest.raises(Broken):
        fitted(callbacks=[Progress(), Hooks(on_step_end=fail)], max_epochs=5)
    assert said(caplog) == [1, 3]


def test_a_reader_that_has_gone_does_not_hide_the_failure(monkeypatch):
    Clock(monkeypatch)
    monkeypatch.setattr(progress.log, "hasHandlers", lambda: False)  # as in a user's own script

    def gone(*args, **kwargs):
        raise BrokenPipeError

    def fail(trainer):
        if trainer.global_step == 17:
            monkeypatch.setattr(progress, "print", gone, raising=False)
            raise Broken

    with pytest.raises(Broken):
        fitted(callbacks=[Progress(), Hooks(on_step_end=fail)], max_epochs=5)


def test_a_bar_may_be_switched_off_and_nothing_else():
    assert Progress(False).has_bar is False
    with pytest.raises(UserError, match="^callbacks.progress.bar=maybe is not one of auto, true"):
        Progress("maybe")


def test_the_modes_print_their_numbers_once(capsys):
    one = trainer(callbacks=[Progress()])
    one.validate()
    assert capsys.readouterr().out.count("val/loss") == 1
    one.test()
    assert capsys.readouterr().out.count("test/loss") == 1
    one.predict()
    assert capsys.readouterr().out == "predicted    5 batches\n"


def with_noise(strategy: Strategy) -> dict[str, Any]:
    """The weights after the noise of docs/tasks-advanced.md."""
    page = (Path(__file__).parent.parent / "docs/tasks-advanced.md").read_text()
    code = re.search(r"`mine/noise.py`:\n```python\n(.*?)```", page, re.S)
    assert code is not None
    there: dict[str, Any] = {"__name__": "noise"}
    exec(code[1], there)
    noise = there["GradientNoise"](std=0.5)
    return weights(fitted(callbacks=[noise], strategy=strategy, precision="64").task)


@once
def with_noise_on_one() -> dict[str, Any]:
    return with_noise(CPU())


@pytest.mark.parametrize("strategy", [DDP, FSDP, DataParallel])
def test_the_noise_of_the_docs_is_the_same_on_every_strategy(strategy):
    plain = weights(fitted(precision="64").task)
    assert weights_apart(with_noise_on_one(), plain) > 1e-3
    assert weights_apart(on(strategy(2, "cpu"), with_noise), with_noise_on_one()) < 1e-12


@pytest.mark.parametrize(
    "name, mode, warns",
    [
        ("val/accuracy", "min", True),
        ("val/MulticlassF1Score", "min", True),
        ("val_acc", "min", True),
        ("val/accuracy", "max", False),
        ("val/loss", "min", False),
        ("val/layer2_norm", "min", False),
        ("val/pace", "min", False),
    ],
)
def test_a_metric_of_which_more_is_better_is_warned_of_where_less_is_kept(
    name, mode, warns, caplog
):
    Monitor(name, mode, key="callbacks.checkpoint").warn_of_mode(trainer())
    line = (
        f"callbacks.checkpoint.monitor={name} is best where it is lowest, by callbacks.checkpoint."
        "mode=min; where more is better, set callbacks.checkpoint.mode=max"
    )
    assert [each.message for each in caplog.records] == [line] * warns


def test_early_stopping_checkpoints_and_pruning_warn_of_it(tmp_path, caplog):
    class Scores(Small):
        def validation_step(self, batch: Any) -> dict[str, Any]:
            return {**self.training_step(batch), "auroc": 0.5}

    kept = [EarlyStopping("val/auroc"), Checkpoint("val/auroc"), Prune("val/auroc")]
    fitted(Scores(), callbacks=kept, max_epochs=1, directory=tmp_path)
    keys = [
        each.message.partition(".monitor")[0]
        for each in caplog.records
        if each.levelname == "WARNING"
    ]
    assert sorted(keys) == [
        f"callbacks.{name}" for name in ("checkpoint", "early_stopping", "prune")
    ]


def test_a_monitor_that_is_no_name_is_one_line():
    line = r"^callbacks\.checkpoint\.monitor=None is not the name of a metric; use e\.g\. val/loss"
    with pytest.raises(UserError, match=line):
        Checkpoint(monitor=None)  # type: ignore[arg-type]


# Used again


class Counts(Callback):
    """Of epochs, and how often it was reset."""

    epochs = resets = 0

    def reset(self) -> None:
        self.epochs, self.resets = 0, self.resets + 1

    def on_epoch_end(self, trainer) -> None:
        self.epochs += 1


def used() -> list[Any]:
    stopping = EarlyStopping("val/score", patience=2)
    keeper = Checkpoint("val/score", keep=2, seconds_between=0)
    return [stopping, keeper, Prune("val/score"), Best("val/score", "min", "k"), EMA(0.5), Counts()]


def test_the_metrics_of_the_best_epoch_are_taken_from_a_checkpoint_if_they_are_numbers():
    best = Best("val/loss", "min", "callbacks.checkpoint")
    for metrics in ({"val/loss": 1.0, "val/count": 3}, {"val/loss": torch.tensor(1.0)}):
        best.load_state_dict({"best": 1.0, "epoch": 1, "step": 5, "metrics": metrics})
        assert best.metrics == metrics
    best.load_state_dict({"best": 1.0})  # of an older version
    assert best.metrics == {"val/loss": 1.0}
    for metrics in ([1.0], {"val/loss": "low"}):
        with pytest.raises(UserError, match="had metrics=.*use another checkpoint"):
            best.load_state_dict({"best": 1.0, "metrics": metrics})


def test_callbacks_that_another_trainer_has_had_begin_afresh(tmp_path):
    """A loop over folds: the second one does not know how good the first one was."""
    first, second = [1.0, 2.0, 3.0], [9.0, 8.0, 7.0, 7.5]

    def fold(name: str, scores: list[float], callbacks: list[Any]) -> tuple[Any, ...]:
        made = fitted(
            make=partial(Scripted, list(scores)),
            callbacks=callbacks,
            directory=tmp_path / name,
            max_epochs=len(scores),
        )
        files = sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
        states = [callback.state_dict() for callback in callbacks]
        return made, made.epoch, files, states, (tmp_path / name / "curve.json").read_text()

    shared = used()
    before, *_ = fold("first", first, shared)
    weights = deepcopy(before.task.state_dict())
    _, *again = fold("second", second, shared)
    _, *alone = fold("alone", second, used())
    assert again == alone and again[0] == 4 and "best.ckpt" in again[1]
    assert shared[-1].epochs == 4 and shared[-1].resets == 2
    assert is_same(before.task.state_dict(), weights), "the first fold's average"
    more = Scripted([1.0])
    state = checkpoint.load(tmp_path / "second" / "checkpoints" / "last.ckpt")
    fitted(more, callbacks=shared, directory=tmp_path / "second", max_epochs=5, resume=state)
    assert shared[-1].resets == 2, "a resume goes on"
