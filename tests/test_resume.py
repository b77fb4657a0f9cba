"""A resumed run ends where it would have ended, to the bit."""

import hashlib
import math
import random
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from forked import on
from recorded import Recorder
from small import Hooks, Listed, Rows, Scripted, Small, Streamed, fitted, is_same, trainer
from test_numbers import NoisyRows
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import RandomSampler

from dpframe import Callback, Strategy, Trainer, UserError, checkpoint, seeding
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.callbacks.early_stopping import EarlyStopping
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.trainer.resume.fingerprint import significant

HALVES = partial(StepLR, step_size=2, gamma=0.5)


class Draws(Rows):
    """Rows with noise from all of the main process's generators."""

    def collate(self, rows):
        x, y = super().collate(rows)
        return [x + torch.randn_like(x) + random.random(), y]


STEPWISE = {"scheduler_every": "step"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "epochs": (HALVES, {}),
    "one_cycle": (partial(OneCycleLR, max_lr=0.1), STEPWISE),
    "plateau": (partial(ReduceLROnPlateau, patience=0), {"plateau_monitor": "train/loss"}),
    "fp16": (None, {"precision": "fp16"}),
    "float64": (None, {"precision": "64"}),
}


def long_run(case: str, callbacks: list[Callback], resume: Any = None, **settings) -> Any:
    scheduler, more = CASES[case]
    seeding.seed_everything(0 if resume is None else 1)  # the checkpoint decides, not the start
    built = Small(small.Adam, scheduler, dropout=0.4)
    return fitted(
        task=built,
        data=Draws(26, 4),  # seven batches, the last of two rows
        callbacks=callbacks,
        max_epochs=4,
        accumulate=2,
        log_every=3,
        resume=resume,
        **{**more, **settings},
    )


def comparable(one: Any) -> dict[str, Any]:
    state = one.state_dict()
    del state["progress"]["seconds"], state["progress"]["data_seconds"]
    return state


# An epoch has four steps: 4 and 8 are at ends of epochs.
POINTS = [(case, step) for case in CASES for step in (6, 8)]
POINTS += [(case, step) for case in ("epochs", "one_cycle") for step in (1, 4, 15)]


@pytest.mark.parametrize("case, step", POINTS)
def test_a_resume_ends_in_the_same_state_to_the_bit(tmp_path, case, step):
    class Takes(Callback):
        runs_last = True

        def on_step_end(self, trainer):
            if trainer.global_step == step and trainer.progress.batches_done < 7:
                checkpoint.save(trainer.state_dict(), tmp_path / "a.ckpt")

        def on_epoch_end(self, trainer):
            if trainer.global_step == step:
                checkpoint.save(trainer.state_dict(), tmp_path / "a.ckpt")

    whole = long_run(case, [Takes(), EarlyStopping(patience=50)])
    state = checkpoint.load(tmp_path / "a.ckpt")
    again = long_run(case, [Takes(), EarlyStopping(patience=50)], state)
    assert whole.global_step == again.global_step == 16
    assert is_same(comparable(again), comparable(whole))


def test_a_run_that_dies_within_an_epoch_goes_on_from_its_last_ckpt(tmp_path):
    class Dies(Exception):
        pass

    def die(trainer):
        if trainer.global_step == 7:
            raise Dies

    keepers = partial(Checkpoint, every_n_steps=2)
    whole = long_run("epochs", [keepers()], directory=tmp_path / "whole")
    with pytest.raises(Dies):
        long_run("epochs", [keepers(), Hooks(on_step_end=die)], directory=tmp_path / "dies")
    state = checkpoint.load(tmp_path / "dies" / "checkpoints" / "last.ckpt")
    assert state["progress"]["global_step"] == 6
    assert state["progress"]["batches_done"] == 4
    again = long_run("epochs", [keepers()], state, directory=tmp_path / "dies")
    assert is_same(again.task.state_dict(), whole.task.state_dict())
    best = (
        checkpoint.load(tmp_path / name / "checkpoints" / "best.ckpt") for name in ("whole", "dies")
    )
    assert is_same(*(one["task"] for one in best))


@pytest.mark.parametrize("step", [3, 5])
def test_workers_that_draw_random_numbers_are_resumed_too(step):
    taken: dict[str, Any] = {}
    at = "on_epoch_end" if step == 5 else "on_step_end"
    takes = Hooks(
        **{at: lambda t: t.global_step == step and taken.update(deepcopy(t.state_dict()))}
    )
    whole = fitted(data=NoisyRows(2), callbacks=[takes])
    again = fitted(data=NoisyRows(2), callbacks=[Hooks()], resume=taken)
    assert is_same(again.task.state_dict(), whole.task.state_dict())


def test_a_checkpoint_holds_what_callbacks_after_it_decided_at_the_same_hook(tmp_path):
    class Counts(Callback):
        epochs = 0

        def on_epoch_end(self, trainer):
            self.epochs += 1

        def state_dict(self):
            return {"epochs": self.epochs}

    fitted(callbacks=[Checkpoint(), Counts()], directory=tmp_path)
    state = checkpoint.load(tmp_path / "checkpoints" / "last.ckpt")
    assert state["callbacks"]["Counts"] == {"epochs": 2}


def test_callbacks_of_one_class_keep_their_own_states_in_whatever_order_they_stand():
    watched = "val/loss", "train/loss"
    stopping = [EarlyStopping(name, patience=9) for name in watched]
    state = fitted(callbacks=stopping).state_dict()
    again = [EarlyStopping(name, patience=9) for name in ("val/mae", *watched[::-1])]
    fitted(callbacks=again, resume=state)
    assert [c.monitor.best for c in again[1:]] == [c.monitor.best for c in stopping[::-1]]
    assert again[1].monitor.best != again[2].monitor.best


def test_seconds_and_rows_are_counted_over_all_of_a_runs_parts():
    first = fitted(max_epochs=1)
    again = fitted(max_epochs=2, resume=first.state_dict())
    assert again.progress.rows_seen == 2 * first.progress.rows_seen
    assert again.progress.seconds > first.progress.seconds


def test_a_run_that_is_done_is_resumed_to_no_further_step():
    done = fitted()
    again = fitted(resume=done.state_dict())
    assert (again.global_step, again.metrics) == (done.global_step, done.metrics)
    assert is_same(again.task.state_dict(), done.task.state_dict())


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"seed": 1}, "seed=0 there, 1 here"),
        ({"data": Rows(20, 5)}, "data.batch_size=4 there, 5 here"),
        ({"data": Rows(21, 4)}, "rows to train on=20 there, 21 here"),
        ({"data": Rows(shuffle=False)}, "data.shuffle=true there, false here"),
        ({"accumulate": 2}, "trainer.accumulate=1 there, 2 here"),
        (
            {"make": partial(Small, partial(torch.optim.SGD, lr=0.5))},
            "optimizer.lr=0.05 there, 0.5",
        ),
        ({"make": partial(Small, small.Adam)}, "optimizer=SGD there, Adam here"),
        ({"make": partial(Small, scheduler=HALVES)}, "scheduler=nothing there, StepLR here"),
        ({"make": partial(Scripted, [1.0] * 9)}, "task's code has changed"),
    ],
)
def test_a_resume_that_could_not_go_on_alike_is_refused(changed, said):
    state = fitted(max_steps=2).state_dict()
    with pytest.raises(UserError) as caught:
        fitted(resume=state, **changed)
    assert str(caught.value).startswith("resume: this run differs from the one that it would ")
    assert said in str(caught.value)
    assert str(caught.value).endswith("; set back what has changed, or set resume_anyway=true")


def test_a_checkpoint_of_weights_alone_is_no_start_for_a_resume():
    state = fitted(max_steps=2).state_dict()
    del state["optimizer"]
    with pytest.raises(UserError) as caught:
        fitted(resume=state | {"file": "a.ckpt"})
    assert str(caught.value) == (
        "resume=a.ckpt: it has no optimizer; use checkpoint=FILE to start a new run from its "
        "weights"
    )


def by_step(log: list[tuple[int, dict[str, float]]]) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    for step, numbers in log:
        steps.setdefault(step, {}).update(numbers)
    return steps


def went_on(strategy: Strategy, folder: str, max_steps: int | None, **settings: Any) -> Any:
    """Three epochs, or the rest of them, up to `max_steps`."""
    last = Path(folder) / "checkpoints" / "last.ckpt"
    return fitted(
        callbacks=[Checkpoint(every_n_steps=1)],
        directory=folder,
        strategy=strategy,
        precision="64",
        max_epochs=3,
        max_steps=max_steps,
        resume=checkpoint.load(last) if last.exists() else None,
        **settings,
    )


def resumed_on(strategy: Strategy, folder: str, max_steps: int | None) -> tuple:
    make = partial(Small, small.Adam)
    one = went_on(strategy, folder, max_steps, make=make, data=Rows(26, 4))
    return one.global_step, one.task.state_dict(), one.metrics


def test_a_run_goes_on_exactly_on_other_replica_counts_within_its_epochs(tmp_path):
    parts: list[tuple[Strategy, int | None]] = [
        (Strategy(), 3),
        (DataParallel(2, "cpu"), 9),
        (DDP(3, "cpu"), 16),
        (Strategy(), None),
    ]
    for strategy, until in parts:
        last = on(strategy, resumed_on, str(tmp_path), until)
    whole = resumed_on(Strategy(), str(tmp_path / "whole"), None)
    assert last[0] == whole[0] == 21
    torch.testing.assert_close(last[1:], whole[1:], rtol=1e-12, atol=1e-14)


def normed() -> Small:
    task = Small(dropout=0.3)
    task.net.insert(1, torch.nn.BatchNorm1d(8))
    return task


def resumed_layers(strategy: Strategy, folder: str, max_steps: int, exact: bool) -> tuple:
    data = Rows(30, 8)  # four batches, the last of six rows
    one = went_on(strategy, folder, max_steps, make=normed, data=data, exact_layers=exact)
    changes = [change for change in one.training.changes if "curve" in change]
    return one.task.state_dict(), one.metrics, changes


PARTS = [(DataParallel(2, "cpu"), 2), (DDP(3, "cpu"), 3), (DataParallel(3, "cpu"), 5)]
PARTS += [(Strategy(), 8), (DataParallel(2, "cpu"), 9)]


def test_a_resume_on_other_replicas_within_an_epoch_is_exact_with_both_keys(tmp_path):
    for strategy, until in PARTS:
        *last, changes = on(strategy, resumed_layers, str(tmp_path), until, True)
        assert not changes
    *whole, _ = resumed_layers(Strategy(), str(tmp_path / "whole"), 9, True)
    torch.testing.assert_close(last, whole, rtol=1e-12, atol=1e-14)


def test_a_resume_on_other_replicas_within_an_epoch_says_what_makes_another_curve(tmp_path):
    said = [on(each, resumed_layers, str(tmp_path), until, False)[-1] for each, until in PARTS]
    own = (
        "within an epoch, so the curve changes from here on: 1 BatchNorm and 1 Dropout "
        "layers see each replica's rows alone: trainer.batch_norm=global trainer.dropout=row"
    )
    # The third is on as many replicas, and the last one begins an epoch.
    assert said == [
        [],
        [f"replicas=2 there, 3 here, {own}"],
        [],
        [f"replicas=3 there, 1 here, {own}"],
        [],
    ]


class OwnOrder(Rows):
    """In the order of a sampler that has a generator of its own."""

    def train_sampler(self, dataset):
        return RandomSampler(dataset, generator=torch.Generator().manual_seed(3))


class Saved(Callback):
    """Takes the state after every step and every epoch: of all processes, as a file has it."""

    runs_last = True

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_step_end(self, trainer):
        self.states.append(trainer.strategy.collectives.broadcast(deepcopy(trainer.state_dict())))

    on_epoch_end = on_step_end


def not_alike(strategy: Strategy) -> list[Any]:
    """Where a run differs that saves after every step, or goes on from one of its files."""

    def run(resume: Any = None, **settings: Any) -> tuple[dict[str, float], Any, Any]:
        recorder = Recorder()
        made = fitted(
            make=partial(Small, small.Adam, width=64),  # sums over 4 ranks round by their buckets
            data=OwnOrder(27, 4),  # seven batches, two to a step: windows and epochs cross
            strategy=strategy,
            loggers=[recorder],
            precision="64",
            max_epochs=4,
            accumulate=2,
            log_every=3,
            resume=resume,
            **settings,
        )
        return made.metrics, by_step(recorder.log_), made.task.state_dict()

    whole = run()
    saved = Saved()
    found: list[Any] = [] if is_same(run(callbacks=[saved]), whole) else ["saves"]
    assert len(saved.states) == 20
    cut = Saved()
    run(callbacks=[cut], max_steps=6)  # one that ended within an epoch, and looked at its means
    every = strategy.world_size  # ranks are slow, and another run tries all of them
    for state in [*saved.states[::every], cut.states[-1]]:
        metrics, log, weights = run(deepcopy(state))
        step = state["progress"]["global_step"]
        wanted = {at: numbers for at, numbers in whole[1].items() if at > step}
        log = {at: numbers for at, numbers in log.items() if at > step}
        if not is_same((metrics, log, weights), (whole[0], wanted, whole[2])):
            found.append((step, state["progress"]["batches_done"]))
    return found


@pytest.mark.parametrize("strategy", [Strategy(), DDP(4, "cpu")], ids=["cpu", "ddp"])
def test_neither_a_save_nor_a_resume_at_any_step_changes_a_bit_of_a_run(strategy):
    """Not of its means either, nor of the order of a sampler with a generator of its own."""
    assert on(strategy, not_alike) == []


KEEPER = "callbacks.Checkpoint min val/loss"
FORGED: dict[str, tuple[str, Any]] = {
    "a file of another folder": (
        f"{KEEPER}.kept",
        [[0.1, "../../mine.txt"]],
    ),
    "a file of another kind": (f"{KEEPER}.kept", [[0.1, "last.ckpt"]]),
    "an absolute path": (
        f"{KEEPER}.kept",
        [[0.1, "/epoch0001-step1.ckpt"]],
    ),
    "a name that is a list": (
        f"{KEEPER}.kept",
        [[0.1, ["epoch0001-step1.ckpt"]]],
    ),
    "a file of another callback": (
        f"{KEEPER}.kept",
        [[0.1, "f1-2-step1.ckpt"]],
    ),
    "no list": (f"{KEEPER}.kept", "epoch0001-step1.ckpt"),
    "a removed file of another folder": (f"{KEEPER}.dropped", ["../../mine.txt"]),
    "a best that is text": (f"{KEEPER}.best", "0.1"),
    "a patience that is text": ("callbacks.EarlyStopping min val/loss.times_without_progress", "1"),
    "a callback's state that is text": ("callbacks.EarlyStopping min val/loss", "1"),
    "callbacks that are a list": ("callbacks", [1]),
    "a step that is text": ("progress.global_step", "../../1"),
    "a step below zero": ("progress.global_step", -3),
    "an epoch that is a fraction": ("progress.epoch", 1.5),
    "seconds that are none": ("progress.seconds", math.nan),
    "a logged text": ("progress.logged", {"step/loss": "\x1b[2J"}),
    "metrics that are a number": ("metrics", 3),
    "means that are none": ("progress.means", {"window": 3, "totals": {}}),
    "an optimizer that is none": ("optimizer", {"state": 3}),
    "a scheduler that is none": ("scheduler", 3),
    "random numbers that are none": ("random", [{"python": 3}]),
    "a fingerprint that is none": ("fingerprint", "{"),
    "a fingerprint that is a number": ("fingerprint", "3"),
}


def test_a_checkpoint_with_anything_else_in_it_is_refused_in_one_line(tmp_path):
    def callbacks() -> list[Callback]:
        return [Checkpoint(keep=2, every_n_steps=5), EarlyStopping(patience=50)]

    (tmp_path / "mine.txt").write_text("mine")
    long_run("epochs", callbacks(), directory=tmp_path / "a" / "run", max_steps=6)
    good = tmp_path / "a" / "run" / "checkpoints" / "last.ckpt"
    for name, (key, value) in FORGED.items():
        state = checkpoint.load(good)
        *above, leaf = key.split(".")
        node = state
        for part in above:
            node = node[part]
        assert leaf in node
        node[leaf] = value
        with pytest.raises(UserError) as caught:
            long_run("epochs", callbacks(), state, directory=tmp_path / "a" / "run")
        assert "use another checkpoint" in str(caught.value), name
    assert (tmp_path / "mine.txt").read_text() == "mine"


PLATEAU = partial(ReduceLROnPlateau, patience=0, threshold=0.9)


class DrawsToValidate(Rows):
    """Its rows draw, those that are held out too."""

    def collate(self, rows):
        x, y = super().collate(rows)
        return [x + 0.1 * torch.randn_like(x), y]

    def val_dataset(self):
        return Listed(list(self.held_out))

    def train_dataset(self):
        return Listed(list(self.train))


@pytest.mark.parametrize("monitor", ["val/loss", "train/loss"])
@pytest.mark.parametrize("first", [{"max_epochs": 4}, {"max_steps": 17}], ids=["epochs", "steps"])
def test_a_run_that_ended_and_is_extended_ends_as_one_long_run(monitor, first):
    """The validation at the end of the shorter run is one that the long run does not make."""

    def run(resume: Any = None, **settings: Any) -> tuple[Trainer, EarlyStopping]:
        stopping = EarlyStopping(monitor, patience=50, min_delta=0.01)
        made = fitted(
            make=partial(Small, scheduler=PLATEAU, dropout=0.3),
            data=DrawsToValidate(),
            callbacks=[stopping],
            plateau_monitor=monitor,
            validate_every_epochs=3,
            resume=resume,
            **{"max_epochs": 8, **settings},
        )
        return made, stopping

    whole, counted = run()
    short, _ = run(**first)
    again, counted_again = run(deepcopy(short.state_dict()))
    rates = again.update.learning_rates()
    assert rates == whole.update.learning_rates() and rates[""] < 0.05
    assert is_same(again.task.state_dict(), whole.task.state_dict())
    assert counted_again.state_dict() == counted.state_dict()
    assert is_same(again.metrics, whole.metrics)


@pytest.mark.parametrize("batch_size, read", [(3, 12), (5, 10), (2, 12), (8, 8)])
def test_a_resume_with_another_batch_size_reads_on_from_the_same_row_or_a_part_of_a_batch_before(
    batch_size, read
):
    class Reads(Small):
        def training_step(self, batch):
            if self.training:
                self.rows += batch[1].tolist()
            return super().training_step(batch)

    state = fitted(Small(), Rows(shuffle=False), max_steps=3, max_epochs=1).state_dict()
    data, task = Rows(batch_size=batch_size, shuffle=False), Reads()
    task.rows = []
    trainer(task, data, max_epochs=1).fit(state, resume_anyway=True)
    assert task.rows == data.train.tensors[1][read:].tolist()


@pytest.mark.parametrize("scheduler, rate", [(None, 0.1), (partial(StepLR, step_size=1), 0.01)])
def test_a_learning_rate_of_0_may_be_raised_at_a_resume(scheduler, rate):
    def task(lr: float) -> Small:
        return Small(partial(torch.optim.SGD, lr=lr), scheduler)

    frozen = Trainer(task(0.0), Rows(), max_epochs=1)
    frozen.fit()
    again = Trainer(task(0.1), Rows(), max_epochs=2)
    again.prepare(frozen.state_dict(), resume_anyway=True)
    assert again.update.learning_rates() == {"": pytest.approx(rate)}


def test_a_stream_that_ended_at_its_epochs_last_step_counts_that_epoch_when_it_is_extended():
    def run(resume: Any = None, **settings: Any) -> tuple[Trainer, EarlyStopping]:
        stopping = EarlyStopping(patience=50, min_delta=100.0)  # nothing gets better
        data = Streamed(16, 4)
        made = fitted(data=data, callbacks=[stopping], resume=resume, max_epochs=4, **settings)
        return made, stopping

    whole, counted = run()
    short, _ = run(max_steps=whole.global_step // 2)
    again, counted_again = run(deepcopy(short.state_dict()))
    assert again.global_step == whole.global_step
    assert counted_again.state_dict() == counted.state_dict()
    assert is_same(again.metrics, whole.metrics)


# What is compared of the code


def test_a_state_that_a_run_resumes_from_stays_as_it_is():
    states: list[Any] = []
    look = Hooks(
        on_step_end=lambda t: t.global_step == 3 and states.append(deepcopy(t.state_dict()))
    )
    settings = {"make": partial(Small, small.Adam), "max_epochs": 1}
    fitted(callbacks=[look], **settings)
    [state], before = states, deepcopy(states[0])
    first, second = (fitted(resume=state, **settings) for _ in range(2))
    assert first.global_step == 5 and is_same(state, before)
    assert is_same(first.task.state_dict(), second.task.state_dict())


SOURCE = '''\
"""A task.

  With a blank line, and spaces at an end:  \n"""

import torch  # heavy

def net(width: int) -> str:
    #  how wide

    sizes = [
        width,  # in
        # then

        "#2",
    ]
    return f"a # {width:>{4}} {sizes!r}" \\
        "b"

'''
WITHOUT = '''\
"""A task.

  With a blank line, and spaces at an end:  \n"""
import torch
def net(width: int) -> str:
    sizes = [
        width,
        "#2",
    ]
    return f"a # {width:>{4}} {sizes!r}" \\
        "b"
'''


def test_comments_blank_lines_and_spaces_at_the_ends_of_lines_are_not_significant():
    assert significant(SOURCE) == WITHOUT.rstrip("\n")
    assert significant(SOURCE.replace(" -> str:", " -> str:  # text  ")) == significant(SOURCE)
    assert significant(SOURCE.replace("\n    return", "  \n\n    return")) == significant(SOURCE)
    assert significant(SOURCE.rstrip("\n") + "# the end") == significant(SOURCE)


@pytest.mark.parametrize(
    "old, new", [("width,", "width + 1,"), ("#2", "#3"), ("a #", "a  #"), (".\n\n  W", ".\n  W")]
)
def test_whatever_else_changes_is_significant(old, new):
    assert old in SOURCE
    assert significant(SOURCE.replace(old, new, 1)) != significant(SOURCE)


def test_the_digest_of_a_source_is_no_fact_of_the_version_of_python():
    """3.11 takes an f-string for one token, 3.12 for several; ast.dump differs in each of them."""
    assert hashlib.sha256(significant(SOURCE).encode()).hexdigest()[:16] == "f1d4bbbf3d0255b1"
