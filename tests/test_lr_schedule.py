"""task.schedule: stepped by step, in proportion for every group, and resumed to the bit."""

import json
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from command import attempts, write
from recorded import Recorder
from small import Hooks, Rows, Small, Streamed, fitted, is_same, trainer
from test_rates import Noted
from test_turns import Pair
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from dpframe import LRSchedule, UserError
from dpframe.schedules import WSD, Constant, InverseSqrt, Linear, WarmupCosine

HALVES = partial(StepLR, step_size=2, gamma=0.5)
GROUPS = {"first": {"match": "net.0", "lr": 0.01}}


@dataclass(frozen=True)
class Halves(LRSchedule):
    """One of a user's own."""

    every: int = 2

    def factor(self, step: int, steps: int) -> float:
        return 0.5 ** (step // self.every)


def small(schedule: LRSchedule | None, scheduler=None, **options) -> Small:
    task = Small(partial(Noted, lr=0.1, **options), scheduler)
    task.lr_schedule = schedule
    return task


def rates(schedule: LRSchedule, data=None, **settings) -> list[float]:
    made = fitted(small(schedule), data, **settings)
    return [first for (first,) in made.update.optimizer.rates]


def by_formula(schedule: LRSchedule, steps: int, lr: float = 0.1) -> list[float]:
    return [lr * schedule.factor(step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    "settings, steps",
    [
        ({"scheduler_every": "epoch"}, 10),
        ({"scheduler_every": "step"}, 10),
        ({"accumulate": 2}, 6),
        ({"max_steps": 7}, 7),
        ({"max_epochs": 1, "limit_train_batches": 0.6}, 3),
        ({"max_epochs": None, "max_steps": 8, "data": Streamed()}, 8),
    ],
)
def test_every_step_has_the_rate_of_its_place_in_all_steps(settings, steps):
    for schedule in (WarmupCosine(warmup=0.3), Halves()):
        assert rates(schedule, **settings) == by_formula(schedule, steps)


def test_groups_keep_the_proportions_of_their_rates():
    schedule = Linear(warmup=2)
    made = fitted(small(schedule, groups=GROUPS))
    wanted = zip(by_formula(schedule, 10), by_formula(schedule, 10, lr=0.01), strict=True)
    assert made.update.optimizer.rates == [list(each) for each in wanted]


def test_a_stream_without_a_length_is_refused_unless_the_schedule_needs_none():
    said = "^task.schedule needs the length of training, .* set trainer.max_steps$"
    for schedule in (WSD(), Constant(warmup=0.1)):
        with pytest.raises(UserError, match=said):
            fitted(small(schedule), Streamed())
    for schedule in (Constant(warmup=4), InverseSqrt(warmup=4)):
        assert rates(schedule, Streamed()) == by_formula(schedule, 10)


def test_each_of_several_optimizers_is_scheduled_over_its_own_turns():
    task = Pair()
    task.make_schedulers = {}
    task.lr_schedule = schedule = Linear(warmup=0)
    seen = []
    keep = Hooks(on_step_end=lambda t: seen.append(t.updates.learning_rates()))
    made = fitted(task, callbacks=[keep])
    critic, generator = (made.updates[name].scheduler for name in ("critic", "generator"))
    assert (critic.total_steps, critic.last_epoch) == (10, 10)
    assert (generator.total_steps, generator.last_epoch) == (5, 5)
    first = [each["lr/generator"] for each in seen]
    assert first == [0.05 * schedule.factor(step, 5) for step in (0, 1, 1, 2, 2, 3, 3, 4, 4, 5)]


@pytest.mark.parametrize("schedule", [WarmupCosine(warmup=3), Constant(warmup=8), Halves(3)])
@pytest.mark.parametrize("step", [1, 3, 5, 7])
def test_a_run_that_is_resumed_within_an_epoch_goes_on_to_the_bit(schedule, step):
    make = partial(small, schedule, groups=GROUPS)
    states = {}
    keep = Hooks(on_step_end=lambda t: states.update({t.global_step: deepcopy(t.state_dict())}))
    whole = fitted(make=make, callbacks=[keep])
    again = fitted(make=make, resume=states[step])
    assert is_same(again.task.state_dict(), whole.task.state_dict())
    assert whole.update.optimizer.rates[step:] == again.update.optimizer.rates
    assert is_same(again.state_dict()["scheduler"], whole.state_dict()["scheduler"])


def test_a_longer_run_is_refused_and_when_it_is_meant_goes_on_from_its_step_with_the_new_length():
    make = partial(small, WSD(warmup=2, decay=0.5))
    state = fitted(make=make, max_steps=4, max_epochs=None).state_dict()
    longer = {"max_steps": 12, "max_epochs": None}
    with pytest.raises(UserError, match="scheduler's steps=4 there, 12 here"):
        fitted(make=make, resume=state, **longer)
    task = make()
    again = trainer(task, **longer)
    again.fit(state, resume_anyway=True)
    wanted = by_formula(WSD(warmup=2, decay=0.5), 12)
    assert [first for (first,) in again.update.optimizer.rates] == wanted[4:]
    assert again.update.scheduler.total_steps == 12


def test_another_schedule_at_a_resume_is_refused_and_when_it_is_meant_goes_on_at_the_same_step():
    state = fitted(small(WarmupCosine()), max_epochs=1).state_dict()
    task = small(Linear(warmup=1, final=0.5))
    with pytest.raises(UserError, match=r"lr_schedule=WarmupCosine\(warmup=0.03, final=0.0\) the"):
        trainer(task, max_epochs=1).fit(state)
    again = trainer(task, max_steps=8)
    again.fit(state, resume_anyway=True)
    wanted = by_formula(Linear(warmup=1, final=0.5), 8)
    assert [first for (first,) in again.update.optimizer.rates] == wanted[5:]


class Falls:
    """A function with an option, as an object."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return max(0.0, 1 - step / self.steps)


def rise_and_fall(steps: int) -> partial:
    rise = partial(LinearLR, start_factor=0.25, total_iters=2)
    return partial(SequentialLR, schedulers=[rise, CosineAnnealingLR], milestones=[steps // 4])


LONGER = {  # each scheduler for a run, and for one of twice the length
    "cosine": [partial(CosineAnnealingLR, T_max=steps) for steps in (4, 8)],
    "linear": [partial(LinearLR, start_factor=1.0, end_factor=0.0, total_iters=n) for n in (4, 8)],
    "polynomial": [partial(PolynomialLR, power=2.0, total_iters=steps) for steps in (4, 8)],
    "one cycle": [partial(OneCycleLR, max_lr=0.3)] * 2,
    "another cycle": [
        partial(OneCycleLR, max_lr=0.3, pct_start=p, total_steps=8) for p in (0.2, 0.4)
    ],
    "higher cycle": [partial(OneCycleLR, max_lr=lr, total_steps=8) for lr in (0.2, 0.4)],
    "lambda": [partial(LambdaLR, lr_lambda=Falls(steps)) for steps in (4, 8)],
    "sequence": [rise_and_fall(steps) for steps in (4, 8)],
    "chain": [
        partial(ChainedScheduler, schedulers=[partial(CosineAnnealingLR, T_max=n), HALVES])
        for n in (4, 8)
    ],
    "restarts": [partial(CosineAnnealingWarmRestarts, T_0=steps) for steps in (2, 3)],
    "another kind": [HALVES, partial(CosineAnnealingLR, T_max=8)],
    "none before": [None, partial(CosineAnnealingLR, T_max=8)],
    "none after": [HALVES, None],
}


def test_an_option_of_a_scheduler_that_has_changed_is_told_by_the_name_that_one_types():
    def made(**options) -> Small:
        return Small(scheduler=partial(OneCycleLR, max_lr=0.2, **options))

    data = {"data": Rows(4, 4), "max_epochs": 4, "scheduler_every": "step"}
    state = fitted(made(), **data).state_dict()
    for option, before, after in (
        ("pct_start", 0.3, 0.4),
        ("anneal_strategy", "cos", "linear"),
        ("three_phase", "false", True),
        ("div_factor", 25.0, 10.0),
    ):
        line = (
            f"continue: scheduler.{option}={before} there, {str(after).replace('T', 't')} here; set"
        )
        with pytest.raises(UserError, match=line):
            trainer(made(**{option: after}), **data).fit(deepcopy(state))
    trainer(made(pct_start=0.3), **data).prepare(deepcopy(state))  # torch's default


@pytest.mark.parametrize("case", LONGER)
@pytest.mark.parametrize("every", ["epoch", "step"])
def test_a_resume_with_other_options_goes_on_as_if_they_had_been_there_from_the_start(case, every):
    before, after = (partial(small, None, scheduler) for scheduler in LONGER[case])
    data = {"data": Rows(4, 4), "scheduler_every": every}  # a step an epoch
    state = fitted(before(), max_epochs=4, **data).state_dict()
    again = trainer(after(), max_epochs=8, **data)
    with pytest.raises(UserError, match="scheduler.* there, .* here"):
        trainer(after(), max_epochs=8, **data).fit(deepcopy(state))
    again.fit(state, resume_anyway=True)
    whole = fitted(after(), max_epochs=8, **data)
    assert again.update.optimizer.rates == whole.update.optimizer.rates[4:]
    assert is_same(again.update.state_dict()["options"], whole.update.state_dict()["options"])
    (group,), (wanted,) = (each.update.optimizer.param_groups for each in (again, whole))
    assert all(group[name] == value for name, value in wanted.items() if name != "params")


def test_a_plateau_keeps_what_it_has_seen_and_has_the_options_of_the_resume():
    def task(lr: float, **options) -> Small:
        least = {"threshold": 100.0, "threshold_mode": "abs"}  # nothing gets better by so much
        return Small(partial(Noted, lr=lr), partial(ReduceLROnPlateau, **least, **options))

    short = fitted(task(0.1, patience=0, factor=0.5), max_epochs=4)
    assert short.update.learning_rates() == {"": 0.1 * 0.5**3}
    again = trainer(task(0.2, patience=2, factor=0.1), max_epochs=5)
    state = short.state_dict()
    again.fit(deepcopy(state), resume_anyway=True)
    assert again.update.scheduler.best == short.update.scheduler.best
    assert again.update.scheduler.num_bad_epochs == 1 and again.update.scheduler.patience == 2
    assert again.update.learning_rates() == {"": 0.2 * 0.5**3}  # what it had come to, in proportion
    with pytest.raises(UserError, match="scheduler.factor=0.5 there, 0.1 here; scheduler.patience"):
        fitted(task(0.1, patience=2, factor=0.1), resume=state)


def test_a_rate_that_a_hook_has_set_is_kept_by_a_resume_that_changes_no_option_of_it():
    def halve(t):
        if t.epoch == 1:
            t.update.optimizer.param_groups[0]["lr"] /= 2

    state = fitted(small(None, HALVES), callbacks=[Hooks(on_epoch_end=halve)]).state_dict()
    for options in ({}, {"weight_decay": 0.1}):
        again = trainer(small(None, HALVES, **options), max_epochs=3)
        again.fit(deepcopy(state), resume_anyway=True)
        assert again.update.optimizer.rates == [[0.1 / 2 / 2]] * 5
        assert again.update.optimizer.param_groups[0]["weight_decay"] == options.get(
            "weight_decay", 0.0
        )


def test_a_schedule_that_is_too_short_to_go_on_is_one_line():
    state = fitted(small(None, HALVES), scheduler_every="step").state_dict()
    again = trainer(
        small(None, partial(OneCycleLR, max_lr=0.1, total_steps=4)), scheduler_every="step"
    )
    with pytest.raises(UserError, match="resume: OneCycleLR can't go on at its step 10: Tried to"):
        again.fit(state, resume_anyway=True)


def test_a_schedule_that_needs_no_length_goes_on_in_a_longer_run():
    make = partial(small, InverseSqrt(warmup=3))
    state = fitted(make=make, max_epochs=1).state_dict()
    again = fitted(make=make, resume=state)
    assert [first for (first,) in again.update.optimizer.rates] == by_formula(
        InverseSqrt(warmup=3), 10
    )[5:]


def test_a_rate_that_is_scaled_with_the_batch_is_scheduled_as_a_whole():
    task = small(Linear(warmup=2))
    task.scale_lr = {"batch_size": 2}  # of four
    made = fitted(task)
    wanted = by_formula(Linear(warmup=2), 10)
    assert made.update.optimizer.rates == [[2 * rate] for rate in wanted]
    assert made.training.notes[-1] == "task.schedule: Linear(warmup=2, final=0.0), 10 steps in all"


def test_a_warm_up_that_training_does_not_get_through_is_said():
    made = fitted(small(Linear(warmup=12)))
    assert made.training.notes[-1] == (
        "task.schedule: Linear(warmup=12, final=0.0), 10 steps in all, which end within its warm-up"
    )


def test_a_schedule_of_ones_own_may_call_anything_its_warm_up():
    class Own(LRSchedule):
        warmup = None

        def factor(self, step: int, steps: int) -> float:
            return 1.0

    assert fitted(small(Own())).training.notes[-1] == "task.schedule: Own(), 10 steps in all"


def test_what_can_not_be_scheduled_is_refused_in_one_line():
    class ByHand(Small):
        optimizes_by_hand = True

    class Own(Small):
        def configure_optimizer(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return optimizer, StepLR(optimizer, 1)

    halves = partial(StepLR, step_size=1)
    for task, said in (
        (small(Linear(), halves), "Small has a scheduler already; leave one of them out, e.g. by "),
        (Own(), "task.schedule: Own has a scheduler already; leave one of them out"),
        (ByHand(), "task.schedule: ByHand steps its optimizers itself; schedule the rates in it"),
    ):
        task.lr_schedule = Linear()
        with pytest.raises(UserError) as caught:
            trainer(task).prepare()
        assert said in str(caught.value) and "\n" not in str(caught.value)
    task.lr_schedule = "cosine"
    with pytest.raises(UserError, match="lr_schedule=cosine is no schedule; use e.g. dpframe.sche"):
        trainer(task).prepare()


OWN = {
    "own/recipe/mine.yaml": "# @package _global_\n# Mine.\ndefaults:\n  - boston\n"
    "  - override /task/schedule: halves\n  - _self_\nrecipe: mine\n"
    "task:\n  _target_: own.parts.Mine\n  schedule: {every: 3}\ntrainer: {max_epochs: 2}\n",
    "own/task/schedule/halves.yaml": "# Mine.\n_target_: own.parts.Halves\nevery: 2\n",
    "own/task/schedule/no.yaml": "# None.\n_target_: torch.nn.Linear\nin_features: 1\n"
    "out_features: 1\n",
    "own/recipe/noisy.yaml": "# @package _global_\n# Has another schedule.\ndefaults:\n  - boston\n"
    "  - _self_\nrecipe: noisy\ntask:\n  _target_: own.parts.Noisy\n",
    "own/parts.py": "import dpframe\nfrom dpframe.recipes.boston import Boston\n\n\n"
    "class Mine(Boston):\n    pass\n\n\n"
    "class Noisy(Boston):\n"
    "    def __init__(self, net, optimizer, scheduler=None, schedule='cosine'):\n"
    "        super().__init__(net, optimizer, scheduler)\n"
    "        self.schedule = schedule\n        print('noise:', schedule)\n\n\n"
    "class Halves(dpframe.LRSchedule):\n"
    "    def __init__(self, every):\n        self.every = every\n\n"
    "    def factor(self, step, steps):\n        return 0.5 ** (step // self.every)\n",
}


def test_any_recipe_takes_one_by_its_name_and_so_does_a_folder_of_ones_own(tmp_path):
    write(tmp_path, OWN)
    line = ["trainer.accelerator=cpu", "logger=csv", "trainer.log_every=1", "callbacks=none"]
    boston, own = [*line, "recipe=boston", "trainer.max_epochs=2"], [*line, "--config-dir=own"]
    named, mine, no, dotted, noisy, both, swept, twice = attempts(
        [
            [*boston, "hydra.run.dir=a", "task/schedule=linear", "task.schedule.warmup=0.25"],
            [*own, "recipe=mine", "hydra.run.dir=b"],
            [*own, "recipe=boston", "task/schedule=no", "trainer.max_epochs=1"],
            [*boston, "task.schedule=linear"],
            [*own, "recipe=noisy", "trainer.max_epochs=1"],
            [*own, "recipe=noisy", "task/schedule=wsd", "trainer.max_epochs=1"],
            [*boston, "-m", "task/schedule=linear,wsd"],
            [*boston, "recipe=gpt", "task/schedule=wsd"],
        ],
        tmp_path,
    )
    assert (named.code, mine.code, noisy.code, both.code) == (0, 0, 0, 0), (named, mine, both)
    assert "task.schedule: Linear(warmup=0.25, final=0.0), 8 steps in all" in named.out
    assert logged(tmp_path / "a") == pytest.approx(by_formula(Linear(0.25), 8, 0.01))
    assert logged(tmp_path / "b") == pytest.approx([0.01 * 0.5 ** (n // 3) for n in range(8)])
    assert (no.code, dotted.code) == (2, 2)
    assert "is no schedule; choose one by its name, e.g. task/schedule=warmup_cosine" in no.err
    assert "task.schedule=linear is no schedule; choose one by its name, e.g. task/" in dotted.err
    assert "noise: cosine" in noisy.out and "task.schedule" not in noisy.out
    assert "noise: cosine" in both.out and "task.schedule: WSD(" in both.out
    assert swept.code == 0 and "task/schedule" in swept.out
    assert twice.code == 2 and "GPT has a scheduler already; leave one of them out" in twice.err
    assert "task.scheduler=null" in twice.err


@pytest.mark.parametrize("scaled", [None, {"batch_size": 1, "warmup_steps": 4}])
@pytest.mark.parametrize("schedule", [Linear(warmup=2), None])
def test_the_rate_that_is_logged_is_the_one_that_the_step_has_used(schedule, scaled):
    task, recorder = small(schedule, None if schedule else HALVES, groups=GROUPS), Recorder()
    task.scale_lr = scaled
    made = fitted(task, log_every=2, loggers=[recorder], scheduler_every="step")
    found = [(at, n["step/lr"], n["step/lr/first"]) for at, n in recorder.log_ if "step/lr" in n]
    used = made.update.optimizer.rates
    assert found == [(step, *used[step - 1]) for step in (2, 4, 6, 8, 10)]


def test_the_rates_of_turns_are_logged_as_they_were_used_and_of_one_without_as_it_will_be():
    task, recorder = Pair(), Recorder()
    task.make_schedulers = {}
    task.lr_schedule = schedule = Linear(warmup=0)
    fitted(task, log_every=1, loggers=[recorder])
    found = [n["step/lr/generator"] for _, n in recorder.log_ if "step/lr/generator" in n]
    # It has its turn in every second step, the first of them the second.
    assert found == [0.05 * schedule.factor(step, 5) for step in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4)]


@pytest.mark.parametrize("name", ["lr", "grad_norm", "samples_per_second"])
def test_a_number_of_a_step_with_a_name_of_the_trainers_own_is_refused_in_a_line(name):
    class Told(Small):
        def training_step(self, batch):
            return {**super().training_step(batch), name: 0.5}

    said = (
        f"^Told.training_step returned '{name}', and step/{name} is a number of the Trainer's own"
    )
    with pytest.raises(UserError, match=said):
        fitted(Told(), log_every=2)
    assert fitted(Told()).metrics[f"train/{name}"] == 0.5  # there is no other number of this name


def logged(directory) -> list[float]:
    head, *lines = (directory / "metrics.csv").read_text().splitlines()
    place = head.split(",").index("step/lr")
    return [float(line.split(",")[place]) for line in lines if line.split(",")[place]]


def test_a_run_of_the_command_is_resumed_with_its_schedule_and_another_one_has_other_keys(tmp_path):
    line = ["recipe=boston", "trainer.accelerator=cpu", "trainer.max_epochs=2", "logger=none"]
    line += ["task/schedule=wsd", "task.schedule.decay=0.5", "hydra.run.dir=run"]
    go_on = ["resume=run", "trainer.max_epochs=4"]
    first, refused, other, tested = attempts(
        [
            line,
            go_on,
            [*go_on, "task/schedule=linear", "resume_anyway=true"],
            ["mode=test", "checkpoint=run/checkpoints/last.ckpt"],
        ],
        tmp_path,
    )
    assert first.code == 0 and "resume" not in first.out.splitlines()[-1]
    assert refused.code == 2 and "scheduler's steps=8 there, 16 here" in refused.err
    assert other.code == 0, other.err
    assert "task.schedule: Linear(warmup=0.03, final=0.0), 16 steps in all" in other.out
    assert tested.code == 0, tested.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 16
