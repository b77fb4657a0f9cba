"""Recorded steps, with the recorder played by one that runs the step anew: the same numbers."""

import logging
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded import Recorder as Written
from small import Hooks, Rows, Small, fitted, is_same, trainer
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR

from dpframe import Trainer, UserError, seeding
from dpframe.trainer import graphs
from dpframe.trainer.graphs import Graphed, copied, copy_into, kind_of

# A rate that is the same in single and in double precision.
SGD = partial(torch.optim.SGD, lr=0.0625, momentum=0.5)
Adam = partial(torch.optim.Adam, lr=0.0625)
AdamW = partial(torch.optim.AdamW, lr=0.0625)
HALVES = partial(StepLR, step_size=2, gamma=0.5)


class Rerun:
    """Records nothing: replays by running the step on its static inputs, as it would be launched.

    As a recording does, it computes nothing at first, and writes the same tensor each time.
    """

    is_used = True
    fails = False
    graphed: Graphed

    def __init__(self) -> None:
        self.warmed = self.recorded = self.replayed = 0

    def warm(self, step: Any) -> None:
        self.warmed += 1
        step()

    def record(self, step: Any) -> Tensor:
        made, random_state = self.graphed._trainer, seeding.random_state()
        before = deepcopy((made.task.state_dict(), made.update.optimizer.state_dict()))
        self.recorded += 1
        self.step, self.values = step, step().clone()
        for now, then in zip(made.task.state_dict().values(), before[0].values(), strict=True):
            now.copy_(then)
        for number, kept in before[1]["state"].items():
            state = made.update.optimizer.state[made.update.parameters[number]]
            for name, then in kept.items():
                state[name].copy_(then)
        seeding.restore_random_state(random_state)
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return self.values

    def replay(self) -> None:
        self.replayed += 1
        update = self.graphed._trainer.update
        norm = update.grad_norm
        with self.graphed._recordable():
            self.values.copy_(self.step())
        if self.graphed._trainer.settings.clip_norm is not None:
            self.graphed._norm.copy_(update.grad_norm)
        update.grad_norm = norm  # Python does not see a launch


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Rerun:
    """On the CPU as on a GPU; only the runs with cuda_graph on meet it."""
    one = Rerun()

    def made(trainer: Trainer, recorder: Any) -> Graphed:
        one.graphed = Graphed(trainer, recorder)
        return one.graphed

    monkeypatch.setattr(graphs, "misfit", lambda trainer: graphs.unrecordable(trainer.update))
    monkeypatch.setattr(graphs, "Recorder", lambda device: one)
    monkeypatch.setattr(graphs, "Graphed", made)
    monkeypatch.setattr("dpframe.task.READ_AT_ONCE", set())
    return one


def outcome(optimizer: Any = SGD, scheduler: Any = None, **given: Any) -> dict[str, Any]:
    make = given.pop("make", partial(Small, optimizer, scheduler, dropout=0.5))
    logger = Written()
    made = fitted(make=make, data=Rows(40, 6), loggers=[logger], **{"log_every": 4, **given})
    counts = made.global_step, made.epoch, made.batches_done, made.rows_seen
    return {
        "weights": made.task.state_dict(),
        "optimizer": made.update.optimizer.state_dict(),
        "counts": counts,
        "written": logger.log_,
        "random": torch.get_rng_state(),
    }


# The same numbers

CASES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"optimizer": Adam},
    "adamw": {"optimizer": AdamW},
    "clip_norm": {"clip_norm": 0.1},
    "clip_value": {"clip_value": 0.1},
    "halves": {"scheduler": HALVES, "max_epochs": 5},
    "step by step": {"scheduler": HALVES, "scheduler_every": "step", "optimizer": Adam},
    "plateau": {"scheduler": partial(ReduceLROnPlateau, patience=0, factor=0.5)},
    "validates": {"validate_every_steps": 3},
    "max_steps": {"max_steps": 9},
    "limit": {"limit_train_batches": 4, "max_epochs": 4},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("name", CASES)
def test_recorded_steps_give_the_numbers_of_steps_one_by_one(recorder, name):
    plain = outcome(**CASES[name])
    assert recorder.replayed == 0
    assert is_same(outcome(**CASES[name], cuda_graph=True), plain)
    assert recorder.replayed >= 3


def test_a_rate_that_single_precision_rounds_is_right_to_seven_digits(recorder):
    given = {"scheduler": partial(CosineAnnealingLR, T_max=9), "scheduler_every": "step"}
    plain = outcome(partial(Adam, lr=0.01), **given)
    replayed = outcome(partial(Adam, lr=0.01), cuda_graph=True, **given)
    assert recorder.replayed > 3
    assert is_same(replayed["optimizer"]["param_groups"], plain["optimizer"]["param_groups"])
    for mine, other in zip(replayed["weights"].values(), plain["weights"].values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_run_that_is_recorded_resumes_to_the_bit(recorder):
    def made(**given: Any) -> Trainer:
        return trainer(
            Small(Adam, HALVES, dropout=0.5), Rows(40, 6), max_epochs=3, cuda_graph=True, **given
        )

    seeding.seed_everything(0)
    whole = made()
    whole.fit()
    seeding.seed_everything(0)
    begun = made(max_steps=11)
    begun.fit()
    assert begun.batches_done
    state = begun.state_dict()
    groups = state["optimizer"]["param_groups"]
    assert [type(groups[0]["lr"]), groups[0]["capturable"]] == [float, False]
    resumed = made()
    resumed.fit(state)
    assert is_same(resumed.task.state_dict(), whole.task.state_dict())


# Which steps

STEPS_AN_EPOCH = 7  # of Rows(40, 6): six of 6 rows and one of 4


def test_three_steps_are_warm_up_and_other_shapes_and_log_steps_run_one_by_one(recorder):
    outcome(cuda_graph="auto", max_epochs=3, log_every=10)
    log_steps, others = 2, 3
    assert [recorder.warmed, recorder.recorded] == [3, 1]
    assert recorder.replayed == 3 * STEPS_AN_EPOCH - 3 - log_steps - others


def test_with_clip_norm_the_norm_is_there_and_log_steps_are_replayed(recorder):
    outcome(cuda_graph="auto", max_epochs=3, log_every=10, clip_norm=1.0)
    assert recorder.replayed == 3 * STEPS_AN_EPOCH - 3 - 3


def test_a_weight_that_thaws_has_the_step_recorded_anew(recorder):
    def thawed(**given: Any) -> dict[str, Any]:
        def thaw(made: Trainer) -> None:
            made.task.net[0].weight.requires_grad_(made.global_step >= 10)

        hooks = Hooks(on_fit_start=thaw, on_step_end=thaw)
        return outcome(Adam, callbacks=[hooks], max_epochs=3, **given)

    plain, again = thawed(), thawed(cuda_graph="auto")
    assert is_same(again, plain)
    assert recorder.recorded == 2


def test_settings_that_keep_changing_end_it_with_one_line(recorder, caplog):
    def changing(**given: Any) -> dict[str, Any]:
        def change(made: Trainer) -> None:
            made.update.optimizer.param_groups[0]["momentum"] = 1 / 2 ** (made.global_step % 5)

        return outcome(callbacks=[Hooks(on_epoch_end=change)], max_epochs=9, **given)

    plain, again = changing(), changing(cuda_graph=True)
    assert is_same(again, plain)
    assert recorder.recorded == graphs.RECORDINGS
    assert caplog.text.count("no CUDA graph any more") == 1


# What can't be


def test_a_recording_that_fails_leaves_one_line_and_the_numbers_as_they_are(recorder, caplog):
    recorder.fails = True
    plain = outcome(Adam, clip_norm=1.0)
    assert is_same(outcome(Adam, clip_norm=1.0, cuda_graph=True), plain)
    assert [recorder.recorded, recorder.replayed] == [1, 0]
    warnings = [line.message for line in caplog.records if line.levelno == logging.WARNING]
    assert warnings == [
        "no CUDA graph, as recording one failed: operation not permitted when stream is capturing"
    ]


class Weighted(Small):
    def training_step(self, batch: Any) -> Any:
        return {**super().training_step(batch), "weight": batch[1].abs().sum()}


class Counting(Small):
    def training_step(self, batch: Any) -> Any:
        return {**super().training_step(batch), "rows": len(batch[0])}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Weighted, "Weighted.training_step returned 'weight' as a Tensor"),
        (Counting, "Counting.training_step returned 'rows' as a int"),
    ],
)
def test_what_a_recording_would_freeze_is_not_recorded(recorder, caplog, kind, said):
    caplog.set_level(logging.INFO, "dpframe")
    plain = outcome(make=partial(kind, SGD))
    assert is_same(outcome(make=partial(kind, SGD), cuda_graph="auto"), plain)
    assert recorder.replayed == 0
    assert caplog.text.count(f"no CUDA graph: {said}") == 1
    with pytest.raises(UserError, match=f"^trainer.cuda_graph=true but {said}; "):
        outcome(make=partial(kind, SGD), cuda_graph=True)


def test_the_cpu_has_no_graphs_and_says_so_where_it_was_asked(caplog):
    caplog.set_level(logging.INFO, "dpframe")
    line = "trainer.cuda_graph=true but the steps run on cpu; mend that, or use"
    with pytest.raises(UserError, match=f"^{line}"):
        fitted(cuda_graph=True)
    made = trainer(cuda_graph="auto", max_steps=2)
    made.prepare()
    assert caplog.text == ""  # run.log is not open yet
    made.fit()
    assert caplog.text.count("no CUDA graph: the steps run on cpu") == 1
    assert "_train_step" not in vars(made)


def as_if_on_a_gpu(**given: Any) -> str:
    """What keeps a run, which would do but for `given`, from being recorded."""
    strategy = {"replicas": given.pop("replicas", 1), "device": torch.device("cuda", 0)}
    made = trainer(make=given.pop("make", partial(Small, SGD)))
    made.prepare()
    precision, wrapped = given.get("precision"), given.pop("wrapped", None)
    update = SimpleNamespace(**vars(made.update))
    update.scaler = object() if precision == "fp16" else None
    facts = {"accumulate": 1, "on_nonfinite": "stop", "compile": False, "profile": False}
    return graphs.misfit(
        SimpleNamespace(  # type: ignore[arg-type]
            strategy=SimpleNamespace(name="SingleGPU", **strategy),
            settings=SimpleNamespace(**{**facts, "precision": precision, **given}),
            update=update,
            _syncs_weights=False,
            step=wrapped or made.step,
        )
    )


def nadam(**given: Any) -> Any:
    return partial(Small, partial(torch.optim.NAdam, **given))


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        ({"make": partial(Small, Adam, HALVES)}, ""),
        ({"make": nadam(capturable=True)}, ""),
        ({"replicas": 2}, "SingleGPU has 2 replicas"),
        ({"wrapped": torch.nn.Identity()}, "SingleGPU has its own way to a step"),
        ({"accumulate": 4}, "a step is trainer.accumulate=4 batches"),
        ({"precision": "fp16"}, "trainer.precision=fp16 is scaled"),
        ({"on_nonfinite": "skip"}, "trainer.on_nonfinite=skip looks at each loss"),
        ({"compile": True}, "trainer.compile=true launches the steps its own way"),
        ({"profile": True}, "trainer.profile=true waits for each part of a step"),
        ({"make": partial(Small, partial(Own, lr=0.1))}, "Own is not one of torch's optimisers"),
        ({"make": nadam()}, "NAdam is neither fused nor told task.optimizer.capturable=true"),
        (
            {"make": partial(Small, partial(torch.optim.NAdam, capturable=True), HALVES)},
            "NAdam can't have StepLR's rates but with fused=true",
        ),
        (
            {"make": partial(Small, SGD, partial(OneCycleLR, max_lr=1, total_steps=99))},
            "OneCycleLR changes the momentum; give task.scheduler.cycle_momentum=false",
        ),
    ],
    ids=str,
)
def test_what_keeps_a_run_from_being_recorded_is_named(given, said):
    assert as_if_on_a_gpu(**given) == said


# Batches


def test_a_batch_is_of_a_kind_by_all_that_is_recorded_of_it():
    def kind(value: Any) -> Any:
        return kind_of(value, torch.device("cpu"))

    x = torch.zeros(2, 3)
    assert kind({"a": [x, (x,)]}) == kind({"a": [x + 1, (x,)]})
    assert kind({"a": [x, (x,)]}) != kind({"b": [x, (x,)]})
    different = [kind(one) for one in (x, x.T, x.T.contiguous(), x.double(), [x], (x,))]
    assert len(set(different)) == len(different)
    assert kind([x, 3]) is kind([x, "name"]) is kind([[None], x]) is None
    assert kind_of([x], torch.device("cuda", 0)) is None  # it is still on the host


def test_a_batch_is_copied_into_the_place_of_another():
    here = {"a": [torch.zeros(2), (torch.zeros(3),)]}
    kept = copied(here)
    copy_into(kept, {"a": [torch.ones(2), (torch.full((3,), 2.0),)]})
    assert is_same(kept, {"a": [torch.ones(2), (torch.full((3,), 2.0),)]})
    assert is_same(here, {"a": [torch.zeros(2), (torch.zeros(3),)]})
