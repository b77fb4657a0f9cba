"""Weights that are frozen, thawed and averaged, beside a loop by hand; and their resumes."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from recorded import Recorder, once, weights, weights_apart
from small import Hooks, Rows, Streamed, fitted, is_same, trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dpframe import Callback, Strategy, Task, UserError, checkpoint
from dpframe.callbacks.averages import EMA, SWA
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.callbacks.freeze import Freeze
from dpframe.data import permutation
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU

EXACT = 1e-12
GROUPS = {
    "backbone": {"match": "net.backbone", "lr": 0.003},
    "vectors": {"match": "1d", "weight_decay": 0.0},
}
AdamW = partial(torch.optim.AdamW, lr=0.03, weight_decay=0.1, groups=GROUPS)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Tuned(Task):
    """The statistics of its norm are not those of its data: training them shows."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(nn.Sequential(), optimizer)
        norm = nn.BatchNorm1d(4)
        for part in (norm.bias, norm.running_mean, norm.num_batches_tracked):
            nn.init.constant_(part, 2)
        self.net.add_module("backbone", nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh()))
        self.net.add_module("head", nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        return {"loss": (self.net(x)[:, 0] - y).square().mean()}


class Resting(Tuned):
    """Its norm is in evaluation mode, as a frozen backbone or a teacher is."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.net.backbone[1].requires_grad_(False).eval()


def norm_alone() -> Freeze:
    return Freeze("net.backbone.1")


def always(epoch: int, step: int) -> bool:
    return True


# An epoch has five steps. The optimizer, the callbacks, and when the linear layer is trained.
CASES: dict[str, tuple[Any, Any, Any]] = {
    "frozen": (AdamW, lambda: [Freeze("net.backbone")], lambda epoch, step: False),
    "thawed at an epoch": (
        SGD,
        lambda: [norm_alone(), Freeze("net.backbone.0", thaw_at_epoch=2)],
        lambda epoch, step: epoch >= 2,
    ),
    "thawed within an epoch": (
        AdamW,
        lambda: [Freeze("*backbone*", thaw_at_step=7), Freeze(["*", "!*0*", "!net.head"])],
        lambda epoch, step: step >= 7,
    ),
    "in evaluation mode": (SGD, list, always),
    "ema": (AdamW, lambda: [EMA(0.9), norm_alone()], always),
    "swa": (SGD, lambda: [norm_alone(), SWA(start_epoch=1)], always),
    "swa by steps": (AdamW, lambda: [SWA(1, every_n_steps=3), norm_alone()], always),
}
AVERAGES: dict[str, tuple[Any, Any]] = {  # torch's own, and after which steps it is updated
    "ema": (get_ema_multi_avg_fn(0.9), range(21)),  # 0: from the first weights
    "swa": (None, (10, 15, 20)),
    "swa by steps": (None, (6, 9, 12, 15, 18)),
}
SETTINGS: dict[str, Any] = {"max_epochs": 4, "precision": "64", "validate_every_steps": 3}
ROWS = partial(Rows, 18)


@once
def by_hand(name: str) -> tuple[dict[str, Any], float]:
    """The weights that the task has after training, and their loss on what is held out."""
    make, _, is_trained = CASES[name]
    torch.manual_seed(0)
    task = Tuned(make).double()
    if make is AdamW:
        linear, norm = task.net.backbone[0], task.net.backbone[1]
        groups = [
            {"params": [linear.weight], "lr": 0.003},
            {"params": [linear.bias, *norm.parameters()], "lr": 0.003, "weight_decay": 0.0},
            {"params": [task.net.head.weight]},
            {"params": [task.net.head.bias], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.03, weight_decay=0.1)
    else:
        optimizer = make(task.parameters())
    update, steps = AVERAGES.get(name, (None, ()))
    average = AveragedModel(task, multi_avg_fn=update)
    if 0 in steps:
        average.update_parameters(task)
    x, y = (column.double() for column in ROWS().train.tensors)
    step = 0
    for epoch in range(4):
        for rows in permutation(18, seed=0, epoch=epoch).split(4):
            task.net.backbone.requires_grad_(False)
            task.net.backbone[0].requires_grad_(is_trained(epoch, step))
            task.net.backbone[1].eval()
            task.training_step([x[rows], y[rows]])["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step in steps:
                average.update_parameters(task)
    done = average.module if name in AVERAGES else task
    held_out = [column.double() for column in ROWS().held_out.tensors]
    return weights(done), done.eval().training_step(held_out)["loss"].item()


class Saved(Callback):
    """The states that checkpoints of these steps would hold."""

    runs_last = True

    def __init__(self, *steps: int) -> None:
        self.states: dict[int, Any] = dict.fromkeys(steps)

    def on_step_end(self, trainer):
        if trainer.global_step in self.states:
            state = deepcopy(trainer.state_dict())
            self.states[trainer.global_step] = trainer.strategy.collectives.broadcast(state)


def tuned(strategy: Strategy, name: str, *more: Callback, **settings: Any) -> Any:
    """The weights and the loss at the end, and what a checkpoint would hold of the weights."""
    make, callbacks, _ = CASES[name]
    one = fitted(
        make=partial(Resting if name == "in evaluation mode" else Tuned, make),
        data=ROWS(),
        strategy=strategy,
        callbacks=[*callbacks(), *more],
        **{**SETTINGS, **settings},
    )
    state = {key: deepcopy(one.state_dict().get(key)) for key in ("task", "averaged", "optimizer")}
    return weights(one.task), one.metrics["val/loss"], state


def with_resumes(strategy: Strategy, name: str) -> tuple[dict[str, Any], float, list[int]]:
    """The weights and the loss, and the steps from which a resume ends with others: ranks are
    slow, and try two of the steps that one process tries."""
    saved = Saved(*(7, 10) if strategy.world_size > 1 else (6, 7, 9, 10))
    whole = tuned(strategy, name, saved)
    apart = [
        step
        for step, state in saved.states.items()
        if not is_same(tuned(strategy, name, resume=state)[1:], whole[1:])
    ]
    return *whole[:2], apart


def all_of_them(strategy: Strategy) -> dict[str, Any]:
    return {name: with_resumes(strategy, name) for name in CASES}


@once
def on_place(place: str) -> dict[str, Any]:
    kind, _, count = place.partition("-")
    kinds = {"cpu": CPU, "data_parallel": partial(DataParallel, int(count or 1), "cpu")}
    ranks = partial({"ddp": DDP, "fsdp": FSDP}.get(kind, DDP), 2, "cpu")
    return on(kinds.get(kind, ranks)(), all_of_them)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", ["cpu", "data_parallel-3", "ddp-2", "fsdp-2"])
def test_frozen_thawed_and_averaged_weights_are_those_by_hand_and_resume_to_the_bit(place, name):
    mine, loss, apart = on_place(place)[name]
    assert weights_apart(mine, by_hand(name)[0]) < EXACT
    assert loss == pytest.approx(by_hand(name)[1], rel=EXACT)
    assert apart == []


class FrozenItself(Tuned):
    """Its norm and a bias are frozen for good; at epoch 2 a hook freezes the linear layer."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.net.backbone[1].requires_grad_(False).eval()
        self.net.backbone[0].bias.requires_grad_(False)

    def on_epoch_start(self, trainer: Any) -> None:
        if trainer.epoch == 2:
            self.net.backbone[0].weight.requires_grad_(False)


def test_what_the_task_has_frozen_is_not_thawed():
    saved, trained = Saved(3, 8), []

    def note(trainer: Any) -> None:
        weights = dict(trainer.task.named_parameters())
        trained.append([name for name in weights if weights[name].requires_grad])
        assert trainer.task.training and not trainer.task.net.backbone[1].training

    def run(*more: Callback, resume: Any = None) -> Any:
        thaws = [Freeze("net.backbone", thaw_at_epoch=1), Freeze("*0*", thaw_at_epoch=1)]
        callbacks = [*thaws, Hooks(on_step_end=note), *more]
        return fitted(FrozenItself(SGD), ROWS(), callbacks=callbacks, max_epochs=3, resume=resume)

    whole = run(saved)
    head = ["net.head.weight", "net.head.bias"]
    assert trained == [head] * 5 + [["net.backbone.0.weight", *head]] * 5 + [head] * 5
    for state in saved.states.values():
        again = run(resume=state)
        assert is_same(again.task.state_dict(), whole.task.state_dict())


@pytest.mark.parametrize("sanity_batches", [0, 2])
@pytest.mark.parametrize("mode", ["validate", "test"])
def test_a_validation_leaves_each_module_in_the_mode_that_it_was_in(mode, sanity_batches, caplog):
    caplog.set_level("INFO", "dpframe")
    modes = Hooks(on_batch_end=lambda t, *_: seen.append([m.training for m in t.task.modules()]))
    one = trainer(Resting(SGD), ROWS(), callbacks=[modes], sanity_batches=sanity_batches)
    seen: list[list[bool]] = []
    as_made = [module.training for module in one.task.modules()]
    getattr(one, mode)()
    one.fit()
    assert seen == [as_made] * 10 and not all(as_made)
    assert "stays in evaluation mode in training: net.backbone.1; " in caplog.text


class Backbone(nn.Sequential):
    """Keeps its norm in evaluation mode, as backbones for detection do."""

    def train(self, mode: bool = True) -> "Backbone":
        super().train(mode)
        self[1].eval()
        return self


def test_a_module_that_says_itself_what_rests_is_heeded_from_the_first_step_on(caplog):
    caplog.set_level("INFO", "dpframe")
    task = Tuned(SGD)
    task.net.backbone = Backbone(*task.net.backbone)
    task.net.head.eval()
    before = task.net.backbone[1].running_mean.clone()
    run = fitted(task, ROWS(), max_steps=1, sanity_batches=0)
    assert "evaluation mode in training: net.backbone.1, net.head; " in caplog.text
    assert torch.equal(run.task.net.backbone[1].running_mean, before)


@pytest.mark.parametrize(
    ("prepared", "named"),
    [
        (lambda task: task.net.backbone.requires_grad_(False), "net.backbone"),
        (lambda task: task.net.backbone[1].requires_grad_(False), "net.backbone.1"),
        (lambda task: task.eval().net.backbone.requires_grad_(False), "net.backbone"),
        (lambda task: task.net.backbone.requires_grad_(False).eval(), ""),
        (lambda task: task.net.backbone[0].requires_grad_(False), ""),
    ],
)
def test_a_norm_whose_weights_alone_are_frozen_is_told_of(prepared, named, caplog):
    caplog.set_level("INFO", "dpframe")
    task = Tuned(SGD)
    prepared(task)
    fitted(task, ROWS(), max_steps=1)
    said = [each.message for each in caplog.records if "running statistics move" in each.message]
    assert len(said) == bool(named)
    assert all(f"requires_grad=False: {named}; add it to callbacks.freeze" in each for each in said)
    caplog.clear()
    fitted(Tuned(SGD), ROWS(), callbacks=[Freeze("net.backbone")], max_steps=1)
    assert "running statistics" not in caplog.text


def test_a_task_that_is_in_evaluation_mode_is_put_into_training_mode():
    one = fitted(Tuned(SGD).eval(), ROWS())
    assert all(module.training for module in one.task.modules())


def test_rates_are_logged_by_group_and_a_changed_one_goes_on_in_proportion():
    """Its own schedule halves each rate after every epoch."""

    def run(resume: Any = None, rate: float = 0.03, **own: float) -> dict[str, float]:
        groups = {**GROUPS, "backbone": {**GROUPS["backbone"], **own}}
        recorder = Recorder()
        task = Tuned(partial(AdamW, lr=rate, groups=groups))
        task.make_scheduler = partial(StepLR, step_size=1, gamma=0.5)
        one = trainer(task, ROWS(), callbacks=[saved], loggers=[recorder], max_epochs=2)
        one.fit(resume, resume_anyway=True)
        *_, (_, last) = recorder.log_
        return {name: rate for name, rate in last.items() if "/lr" in name}

    saved = Saved(7)
    rates = {"progress/lr": 0.015, "progress/lr/backbone": 0.0015}
    assert run() == pytest.approx(rates)
    state = saved.states[7]  # in the second epoch
    assert run(deepcopy(state), rate=0.3) == pytest.approx({**rates, "progress/lr": 0.15})
    assert run(deepcopy(state), weight_decay=0.2) == pytest.approx(rates)
    assert run(state, lr=0.03) == pytest.approx({**rates, "progress/lr/backbone": 0.015})


@pytest.mark.parametrize(
    ("freeze", "line"),
    [
        (lambda: Freeze(), ".patterns is not set; name what to freeze, e.g. net.backbone"),
        (lambda: Freeze("net.bakbone"), ".patterns=net.bakbone matches no parameter; did you mean "
            "net.backbone?"),
        (lambda: Freeze("*"), ".patterns=* leaves nothing to train; leave out a part, e.g. "
            "patterns=['*','!net.head']"),
        (lambda: Freeze("net", thaw_at_step=0), ".thaw_at_step=0 is out of range; use "
            "1 or more, or null"),
    ],
)  # fmt: skip
def test_what_can_not_be_frozen_is_one_line(freeze, line):
    with pytest.raises(UserError) as caught:
        fitted(Tuned(SGD), callbacks=[freeze()])
    assert str(caught.value) == f"callbacks.freeze{line}"


def test_a_checkpoint_gives_the_average_to_all_but_a_resume(tmp_path):
    one = fitted(Tuned(SGD), ROWS(), callbacks=[EMA(0.9), Checkpoint()], directory=tmp_path)
    state = checkpoint.load(tmp_path / "checkpoints" / "best.ckpt")
    best = trainer(Tuned(SGD), ROWS())
    checkpoint.load_task(best.task, state)
    assert best.test()["test/loss"] == pytest.approx(one.metrics["val/loss"])  # the last is best
    assert is_same(best.task.state_dict(), one.task.state_dict())  # as it is after training
    assert is_same(one.state_dict()["averaged"], dict(one.task.state_dict()))
    resumed = trainer(Tuned(SGD), ROWS(), max_epochs=3)
    resumed.prepare(state)  # without the callback, too
    assert is_same(dict(resumed.task.state_dict()), state["task"])
    assert not is_same(state["task"], state["averaged"])


@pytest.mark.parametrize("average", [EMA(0.9), SWA(0)])
def test_running_statistics_are_those_of_training_or_averaged_with_the_weights(average):
    whole = []

    def note(trainer):
        state = {name: value.clone() for name, value in trainer.task.state_dict().items()}
        whole.append(state["net.backbone.1.running_mean"])

    saved = Saved(7)
    one = fitted(Tuned(SGD), ROWS(), callbacks=[average, saved, Hooks(on_epoch_end=note)])
    again = fitted(Tuned(SGD), ROWS(), callbacks=[type(average)()], resume=saved.states[7])
    assert is_same(again.state_dict()["task"], one.state_dict()["task"])
    mean = one.task.net.backbone[1].running_mean
    torch.testing.assert_close(mean, whole[-1] if isinstance(average, EMA) else sum(whole) / 2)


@pytest.mark.parametrize("average", [EMA(0.9), SWA(0, every_n_steps=2)])
def test_a_trainer_whose_task_has_the_average_resumes_with_the_weights(average):
    saved = Saved(7)
    one = fitted(Tuned(SGD), ROWS(), callbacks=[average, saved])
    ended = {name: value.clone() for name, value in one.task.state_dict().items()}
    one.fit(saved.states[7])
    assert is_same(dict(one.task.state_dict()), ended)


def test_a_validation_that_fails_leaves_the_weights_of_training():
    def fail(trainer, *_):
        raise KeyboardInterrupt

    seen = []
    hooks = Hooks(on_step_end=lambda t: seen.append(weights(t.task)), on_validation_end=fail)
    one = trainer(Tuned(SGD), ROWS(), callbacks=[hooks, EMA(0.9)])
    with pytest.raises(KeyboardInterrupt):
        one.fit()
    assert weights_apart(weights(one.task), seen[-1]) == 0.0


@pytest.mark.parametrize(
    ("callbacks", "settings", "line"),
    [
        (lambda: [EMA(), SWA()], {}, "callbacks: EMA and SWA can't be combined; keep one"),
        (lambda: [EMA(1.0)], {}, "callbacks.ema.decay=1.0 is out of range; use 0 or more, and less "
            "than 1"),
        (lambda: [SWA(every_n_steps=0)], {}, "callbacks.swa.every_n_steps=0 is out of range; use "
            "1 or more"),
        (lambda: [SWA()], {"data": Streamed()}, "callbacks.swa: nothing tells when an epoch of a "
            "stream is about to end; set callbacks.swa.every_n_steps"),
        (lambda: [EMA()], {"precision": "bf16-true"}, "callbacks.ema: an average of weights that "
            "are torch.bfloat16 would lose its small steps; use trainer.precision=bf16, whose "
            "weights are float32"),
    ],
)  # fmt: skip
def test_what_can_not_be_averaged_is_one_line(callbacks, settings, line):
    with pytest.raises(UserError) as caught:
        fitted(Tuned(SGD), callbacks=callbacks(), **settings)
    assert str(caught.value) == line


def test_an_average_begins_with_the_weights_of_a_checkpoint_that_has_none():
    """Also where the callback has averaged in another run before."""
    average = EMA(0.5)
    fitted(Tuned(SGD), callbacks=[average])
    plain = fitted(Tuned(SGD), max_epochs=1)
    began = []
    begin = Hooks(on_step_end=lambda t: began.append((average.count, average.averages[0].clone())))
    again = trainer(Tuned(SGD), callbacks=[begin, average], max_steps=plain.global_step + 1)
    again.fit(plain.state_dict())
    [(count, first)] = began
    assert (count, average.count) == (1, 2)
    assert torch.equal(first, next(plain.task.parameters()))
