"""The loop: when it validates, logs and ends, what an update is, and users' mistakes."""

import gc
import weakref
from functools import partial

import pytest
import torch
from recorded import Recorder, logs_apart
from small import Clock, Hooks, Rows, Small, fitted, gradients, trainer
from torch.optim.lr_scheduler import StepLR

from dpframe import Callback, Logger, Task, TrainerSettings, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.trainer.compute import placement

# The four modes


def test_fit_validate_test_and_predict_work_on_one_trainer():
    one = trainer()
    fit = dict(one.fit())
    assert {"train/loss", "train/mae", "val/loss", "val/mae"} == fit.keys()
    assert one.validate()["val/loss"] == fit["val/loss"]
    assert one.test()["test/loss"] == fit["val/loss"]  # the same rows
    batches = one.data.held_out.tensors[0].split(one.data.batch_size)
    assert torch.equal(one.predict().joined(), torch.cat([one.task.net(x) for x in batches]))


def test_evaluation_turns_dropout_off_and_training_turns_it_on_again():
    seen = []

    class Watched(Small):
        def training_step(self, batch):
            seen.append((self.training, torch.is_grad_enabled()))
            return super().training_step(batch)

    fitted(Watched(), Rows(8), validate_every_steps=1, max_epochs=1, share_check="off")
    assert seen == [(True, True), *[(False, False)] * 2] * 2
    assert torch.is_grad_enabled()


# When it ends


@pytest.mark.parametrize(
    "ends, epochs, steps",
    [
        ({"max_epochs": 3}, 3, 15),
        ({"max_epochs": 3, "max_steps": 7}, 1, 7),
        ({"max_epochs": 1, "max_steps": 7}, 1, 5),
        ({"max_epochs": None, "max_steps": 10}, 2, 10),
    ],
)
def test_epochs_or_steps_end_training_whichever_come_first(ends, epochs, steps):
    one = fitted(**ends)
    assert (one.epoch, one.global_step) == (epochs, steps)
    assert one.progress.validated_step == steps  # however it ends, it ends validated


@pytest.mark.parametrize("seconds_a_step, steps", [(1.0, [2]), (0.04, range(38, 44))])
def test_seconds_end_training_at_the_next_look(monkeypatch, seconds_a_step, steps):
    one = fitted(
        callbacks=[Hooks(on_step_end=Clock(monkeypatch).ticks(seconds_a_step))],
        max_epochs=None,
        max_seconds=1.5,
        validate_every_epochs=100,
    )
    assert one.global_step in steps
    assert one.stop_reason == "trainer.max_seconds=1.5 are over"
    assert one.progress.validated_step == one.global_step


def test_what_was_logged_is_written_a_few_times_a_second(monkeypatch):
    clock, waiting, flushed = Clock(monkeypatch), [], []

    class Notes(Logger):
        def log(self, scalars, *, step):
            waiting.append(clock.now)

        def flush(self):
            flushed.append(clock.now - min(waiting, default=clock.now))
            waiting.clear()

    fitted(
        callbacks=[Hooks(on_step_end=clock.ticks(0.01))],
        loggers=[Notes()],
        data=Rows(400),
        max_epochs=2,
        log_every=1,
    )
    assert clock.now - min(waiting, default=clock.now) < 0.41
    assert 4 <= len(flushed) <= 12  # of 200 steps in two seconds
    assert max(flushed) < 0.41


@pytest.mark.parametrize("step, epoch, batches_done", [(3, 0, 3), (5, 1, 0)])
def test_a_callback_stops_training_after_its_step(step, epoch, batches_done):
    """At the last batch of an epoch, it ends the epoch."""
    hooks = Hooks(on_step_end=lambda t: t.global_step == step and t.stop("enough"))
    one = fitted(callbacks=[hooks])
    assert (one.global_step, one.epoch, one.stop_reason) == (step, epoch, "enough")
    assert one.progress.batches_done == batches_done


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_end", "on_epoch_end"])
def test_a_callback_stops_training_around_a_validation(hook):
    one = fitted(callbacks=[Hooks(**{hook: lambda t: t.stop("enough")})], max_epochs=3)
    assert (one.global_step, one.epoch, one.stop_reason) == (5, 1, "enough")


# When it validates and logs


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 5, "validate_every_epochs": 2}, [10, 20, 25]),  # and at the end
        ({"max_epochs": 2, "validate_every_steps": 2}, [2, 4, 5, 6, 8, 10]),  # never twice at one
    ],
)
def test_validation_comes_every_n_epochs_or_steps_and_is_logged_then_alone(settings, steps):
    hooks, recorder = Hooks(), Recorder()
    fitted(callbacks=[hooks], loggers=[recorder], **settings)
    assert hooks.steps("on_validation_end") == steps
    assert [step for step, scalars in recorder.log_ if "val/loss" in scalars] == steps


def test_step_numbers_are_means_since_the_last_log_step():
    recorder, losses = Recorder(), []

    class Watched(Small):
        def training_step(self, batch):
            measured = super().training_step(batch)
            if self.training:
                losses.append(float(measured["loss"].detach()))
            return measured

    fitted(Watched(), loggers=[recorder], log_every=2, max_epochs=1)
    logged = {step: s["step/loss"] for step, s in recorder.log_ if "step/loss" in s}
    assert logged == {2: sum(losses[:2]) / 2, 4: sum(losses[2:4]) / 2}


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_hook_that_takes_the_state_leaves_the_step_numbers_whole(every):
    recorder, disturbed = Recorder(), Recorder()
    fitted(loggers=[recorder], log_every=2)
    hooks = Hooks(on_step_end=lambda t: t.global_step % every == 0 and t.state_dict())
    fitted(loggers=[disturbed], log_every=2, callbacks=[hooks])
    assert logs_apart(disturbed.log_, recorder.log_) < 1e-15


def test_limits_count_batches():
    hooks = Hooks()
    one = fitted(callbacks=[hooks], limit_train_batches=2, limit_eval_batches=3, max_epochs=2)
    assert one.global_step == 4
    x, y = (column[:12] for column in one.data.held_out.tensors)
    error = one.task.net(x).detach()[:, 0] - y
    assert one.metrics["val/loss"] == pytest.approx(float(error.square().mean()), rel=1e-6)


# What an update is


def test_a_step_is_one_update_and_the_tail_is_one_too():
    one = fitted(accumulate=2, max_epochs=2)
    assert (one.global_step, one.steps_per_epoch, one.total_steps) == (6, 3, 6)
    assert len(gradients(accumulate=2)) == 3
    one = fitted(accumulate=2, max_steps=2)  # max_steps counts updates, not batches
    assert (one.global_step, one.progress.batches_done, one.progress.rows_seen) == (2, 4, 16)


def test_clipping_by_norm_bounds_the_norm_and_keeps_the_direction():
    seeds = {"limit_train_batches": 1}
    (free,), (clipped,) = gradients(**seeds), gradients(**seeds, clip_norm=0.5)
    assert free.norm() > 0.5
    assert clipped.norm() == pytest.approx(0.5, rel=1e-5)
    assert torch.allclose(clipped, free * (0.5 / free.norm()))


def test_clipping_by_value_bounds_each_number():
    (free,) = gradients(limit_train_batches=1)
    (clipped,) = gradients(limit_train_batches=1, clip_value=0.1)
    assert free.abs().max() > 0.1
    assert torch.equal(clipped, free.clamp(-0.1, 0.1))


def test_no_gradient_is_left_over_for_the_next_step():
    left = []

    class Looks(Callback):
        def on_step_end(self, trainer):
            left.append([p.grad for p in trainer.task.parameters()])

    fitted(callbacks=[Looks()], max_epochs=1)
    assert left == [[None] * 4] * 5


def test_a_parameter_that_thaws_during_training_is_clipped_and_trained():
    def thaw(trainer):
        if trainer.global_step == 2:
            trainer.task.net[0].requires_grad_(True)

    class Frozen(Small):
        def configure_optimizer(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    task = Frozen()
    task.net[0].requires_grad_(False)
    before = task.net[0].weight.detach().clone()
    fitted(task, callbacks=[Hooks(on_step_end=thaw)], max_epochs=1, clip_norm=1e-3)
    moved = float((task.net[0].weight.detach() - before).norm())
    assert 0 < moved <= 3 * 1.01e-3  # three steps of at most the clipped norm


# Users' mistakes, each one line


@pytest.mark.parametrize(
    "make, said",
    [
        (
            lambda: Small(optimizer=None),
            "Small has no optimizer; set task.optimizer or write configure_",
        ),
        (lambda: Small().requires_grad_(False), "Small has no parameter to train"),
    ],
)
def test_a_fit_that_cannot_start_says_why_in_one_line(make, said):
    with pytest.raises(UserError) as caught:
        fitted(make())
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


LIGHTNINGS = "{'optimizer': SGD, 'lr_scheduler': StepLR}"
RETURN = "return one optimizer, (optimizer, scheduler), or a dict with one of these for each name"


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda sgd, step: "adam", "a str"),
        (lambda sgd, step: type(sgd), "the class SGD"),
        (lambda sgd, step: (sgd, sgd), "(SGD, SGD)"),
        (lambda sgd, step: (sgd, sgd, sgd), "(SGD, SGD, SGD)"),
        (lambda sgd, step: [sgd], "[SGD]"),
        (lambda sgd, step: ([sgd], [step]), "(list, list)"),
        (lambda sgd, step: {"optimizer": sgd, "lr_scheduler": step}, LIGHTNINGS),
        (lambda sgd, step: {}, "an empty dict"),
        (lambda sgd, step: (sgd, {"scheduler": step}), "(SGD, dict)"),
        (lambda sgd, step: (sgd, type(step)), "(SGD, type)"),
        (lambda sgd, step: (sgd, partial(type(step), step_size=1)), "(SGD, partial)"),
    ],
)
def test_what_is_no_optimiser_and_scheduler_is_refused_with_what_to_return(make, said):
    class Mistaken(Small):
        def configure_optimizer(self):
            sgd = super().configure_optimizer()
            return make(sgd, StepLR(sgd, 1))

    with pytest.raises(UserError) as caught:
        fitted(Mistaken())
    assert str(caught.value) == f"Mistaken.configure_optimizer returned {said}; {RETURN}"


def test_a_configure_optimizers_that_nobody_would_call_is_refused():
    class Lightnings(Small):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.07)

    with pytest.raises(UserError) as caught:
        fitted(Lightnings())
    assert str(caught.value) == (
        "Lightnings.configure_optimizers is never called; rename it to configure_optimizer, "
        "or call it _configure_optimizers if it is a helper"
    )


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_a_step_with_other_arguments_is_refused_before_training(step):
    hooks = Hooks()
    with pytest.raises(UserError) as caught:
        fitted(type("Indexed", (Small,), {step: lambda self, batch, i: None})(), callbacks=[hooks])
    assert str(caught.value) == (
        f"Indexed.{step} takes (batch, i) and is called with (batch); write {step}(self, batch)"
    )
    assert not hooks.seen


class NeedsMore(torch.optim.SGD):
    def step(self, losses):
        return super().step()


def test_an_optimiser_whose_step_needs_more_is_refused_before_anything_begins():
    hooks = Hooks()
    with pytest.raises(UserError) as caught:
        fitted(Small(partial(NeedsMore, lr=0.1)), callbacks=[hooks])
    assert str(caught.value) == (
        "NeedsMore.step needs a losses, and dpframe calls it without; "
        "use an optimizer whose step() needs nothing, e.g. torch.optim.Adam"
    )
    assert not hooks.seen
    scheduled = Small(partial(torch.optim.SGD, lr=0.1), partial(StepLR, step_size=1))
    assert fitted(scheduled).global_step  # a scheduler wraps its optimizer's step


@pytest.mark.parametrize(
    "given, said",
    [
        ({"precision": "fp8"}, "trainer.precision=fp8 is not one of 32, 64, bf16, fp16, bf16-true"),
        (
            {"precision": "16-mixed"},
            "trainer.precision=16-mixed is not one of 32, 64, bf16, fp16, bf16-true, 16-true; "
            "did you mean fp16?",
        ),
        ({"matmul_precision": "hi"}, "trainer.matmul_precision=hi is not one of highest, high, me"),
        (
            {"deterministic": True, "cudnn_benchmark": True},
            "trainer.deterministic=true with trainer.cudnn_benchmark=true: kernels that are chosen",
        ),
        ({"compile": "fast"}, "trainer.compile=fast is not one of default, reduce-overhead"),
        ({"compile": {"mode": "reduce"}}, "trainer.compile.mode=reduce is not one of default"),
        (
            {"compile": {"mod": 1}},
            "trainer.compile.mod is not an option of torch.compile",
        ),
        ({"compile": {"mode": "default", "dynamic": 1}}, "trainer.compile.dynamic=1 is not one of"),
        (
            {"compile": {"fullgraph": True}},
            "trainer.compile.fullgraph=true but trainer.compile",
        ),
        ({"scheduler_every": "day"}, "trainer.scheduler_every=day is not one of epoch, step"),
        ({"accumulate": 0}, "trainer.accumulate=0 is out of range; use 1 or more"),
        ({"clip_norm": 0.0}, "trainer.clip_norm=0.0 is out of range; use a number above 0"),
        ({"max_epochs": None}, "trainer.max_epochs, max_steps and max_seconds are all null"),
    ],
)
def test_settings_refuse_what_makes_no_sense(given, said):
    with pytest.raises(UserError) as caught:
        TrainerSettings(**given)
    assert str(caught.value).startswith(said)
    assert "there is:" not in str(caught.value)  # the choices are listed once


def test_the_trainer_sees_one_thread_for_a_small_model_and_leaves_a_large_one_alone(monkeypatch):
    before = torch.get_num_threads()
    try:
        for allowed, wanted in ((4, 3), (2, 2)):  # by a container
            monkeypatch.setattr(placement, "cores", partial(int, allowed))
            torch.set_num_threads(3)
            trainer(Small(width=20_000), threads=None)
            assert torch.get_num_threads() == wanted
        trainer(Small(), threads=None)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_number_of_threads_that_is_set_already_is_not_set_again(monkeypatch):
    # set_num_threads(n) makes attention on the CPU slower by a half, even where n threads were set.
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail(f"set to {count}"))
    trainer(Small(width=20_000), threads=torch.get_num_threads())


NET = torch.nn.Linear(1, 1)
MADE = torch.optim.SGD(NET.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"optimizer": MADE}, r"was given a SGD as optimizer; pass what makes one, e.g. .*SGD, lr"),
        ({"optimizers": {"0": MADE}}, "was given a SGD as optimizer"),
        ({"optimizer": "adam"}, "was given 'adam' as optimizer; pass what makes one"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR(MADE, 1)},
            "was given a StepLR as scheduler; .*StepLR, step_si",
        ),
        ({"scheduler": "cosine"}, "was given 'cosine' as scheduler; pass what makes one"),
        ({"metrics": [1]}, "^task.metrics is a list; name each metric: {'mae': ...}$"),
    ],
)
def test_what_is_no_function_that_makes_a_part_is_refused_in_one_line(given, said) -> None:
    with pytest.raises(UserError, match=said):
        Task(NET, **given)


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        (False, None),
        (True, "default"),
        ("reduce-overhead", "reduce-overhead"),
        ({"mode": None}, None),
        ({"mode": "max-autotune"}, "max-autotune"),
        ({"mode": True, "dynamic": False}, "default"),
    ],
)
def test_compile_is_a_switch_or_a_mode_of_torch_compile(value, mode):
    assert TrainerSettings(compile=value).compile_mode == mode


class Noisy(Small):
    def training_step(self, batch):
        return {**super().training_step(batch), "noise": torch.rand(())}


@pytest.mark.parametrize("strategy", [None, DataParallel(2, "cpu")])
def test_a_trainer_that_nobody_has_is_gone_at_once(strategy):
    """With its weights and data workers, and without a cycle that Python would look for later."""
    fitted(make=Noisy, max_epochs=1, strategy=strategy)
    gc.collect()
    gc.disable()
    try:
        made = weakref.ref(fitted(make=Noisy, max_epochs=1, strategy=strategy))
        assert made() is None
    finally:
        gc.enable()
