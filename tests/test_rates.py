"""task.scale_lr: rates for another batch, for every optimizer, schedule and group."""

import json
import re
from copy import deepcopy
from functools import partial

import pytest
import torch
from command import attempts
from small import Hooks, Rows, Small, fitted, is_same, trainer
from test_turns import Pair
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from dpframe import Task, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.trainer.optim.rates import ScaledRates

TWICE = {"batch_size": 2}  # an update has 4 rows
SLOWLY = {"batch_size": 1, "factor": 1.5, "warmup_steps": 4}


class Noted(torch.optim.SGD):
    """Keeps the rates of its groups at each step."""

    def __init__(self, parameters, lr, **options) -> None:
        super().__init__(parameters, lr, **options)
        self.rates: list[list[float]] = []

    def step(self, closure=None):
        self.rates.append([group["lr"] for group in self.param_groups])
        return super().step(closure)


def rates(scale_lr, *, scheduler=None, groups=None, **settings) -> list[list[float]]:
    task = Small(partial(Noted, lr=0.1, **({"groups": groups} if groups else {})), scheduler)
    task.scale_lr = scale_lr
    return fitted(task, Rows(), **settings).update.optimizer.rates


def test_the_rates_rise_from_what_is_set_to_the_factor_for_each_doubling():
    found = [first for (first,) in rates(SLOWLY)]
    goal = 1.5**2  # four times the rows
    wanted = [0.1 * (1 + (goal - 1) * min(step, 4) / 4) for step in range(10)]
    assert found == pytest.approx(wanted, rel=1e-15)
    fewer = {"batch_size": 8, "warmup_steps": 4}
    assert rates(fewer) == [[0.05]] * 10  # no warm-up down to a lower rate
    assert rates(None) == rates({"batch_size": 4}) == [[0.1]] * 10


@pytest.mark.parametrize(
    "scheduler, every",
    [
        (partial(StepLR, step_size=1, gamma=0.5), "epoch"),
        (partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)), "step"),
        (partial(OneCycleLR, max_lr=[0.3, 0.03]), "step"),
    ],
)
def test_a_schedule_is_multiplied_as_a_whole_in_every_group(scheduler, every):
    given = {"scheduler": scheduler, "scheduler_every": every, "max_epochs": 3}
    given["groups"] = {"first": {"match": "net.0", "lr": 0.01}}
    plain, scaled = rates(None, **given), rates(TWICE, **given)
    assert len(plain) == 15 and len(set(map(tuple, plain))) > 2
    assert scaled == [[2 * rate for rate in each] for each in plain]


def test_an_update_has_the_rows_of_all_replicas_and_of_all_its_batches():
    assert rates({"batch_size": 4}, strategy=DataParallel(2, "cpu")) == [[0.1]] * 10
    assert rates({"batch_size": 4}, accumulate=2) == [[0.2]] * 6


def test_an_error_in_the_step_leaves_the_rates_that_are_set():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError(self.param_groups[0]["lr"])

    task, seen = Small(partial(Broken, lr=0.1)), []
    task.scale_lr = TWICE
    note = Hooks(on_exception=lambda t: seen.append(t.update.optimizer.param_groups[0]["lr"]))
    with pytest.raises(ArithmeticError, match="0.2"):
        fitted(task, Rows(), callbacks=[note])
    assert seen == [0.1]


def test_each_of_several_optimizers_is_scaled_and_told():
    task = Pair()
    task.scale_lr = TWICE
    seen = []
    hooks = Hooks(on_step_end=lambda t: seen.append(t.updates.learning_rates()))
    fitted(task, callbacks=[hooks], max_epochs=1)
    plain = trainer(Pair())
    plain.prepare()
    assert seen[-1] == {name: 2 * rate for name, rate in plain.updates.learning_rates().items()}
    assert len(seen[-1]) == 2


@pytest.mark.parametrize("stop", [3, 6])
def test_a_run_that_is_resumed_goes_on_with_its_warm_up(stop):
    def make():
        task = Small()
        task.scale_lr = SLOWLY
        return task

    states = {}
    keep = Hooks(on_step_end=lambda t: states.update({t.global_step: deepcopy(t.state_dict())}))
    whole = fitted(make=make, callbacks=[keep])
    again = fitted(make=make, resume=states[stop])
    assert is_same(again.task.state_dict(), whole.task.state_dict())
    with pytest.raises(UserError, match="scale_lr.factor=1.5 there, nothing here"):
        fitted(resume=states[stop])


@pytest.mark.parametrize(
    "given, said",
    [
        (128, "task.scale_lr=128 does not say for which batch the learning rates are; use e.g. "),
        ({"factor": 2}, "does not say for which batch"),
        ({"batch_size": 4, "warmup": 1}, "task.scale_lr.warmup: there is no such key; did you "),
        ({"batch_size": 0}, "task.scale_lr.batch_size=0 is out of range; use 1 or more"),
        (
            {"batch_size": 4, "factor": 0.5},
            "task.scale_lr.factor=0.5 is out of range; use 1 or more",
        ),
        ({"batch_size": 4, "warmup_steps": -1}, "warmup_steps=-1 is out of range; use 0 or more"),
    ],
)
def test_what_can_be_no_scale_is_refused_in_one_line(given, said):
    task = Small()
    task.scale_lr = given
    with pytest.raises(UserError) as caught:
        trainer(task).prepare()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_task_that_steps_by_itself_scales_by_itself():
    class ByHand(Task):
        optimizes_by_hand = True
        scale_lr = TWICE

    with pytest.raises(UserError, match="ByHand steps its optimizers itself; scale the rates"):
        ScaledRates.of(ByHand(), trainer().settings, 4)


def test_every_recipe_takes_it_from_the_config_and_says_what_it_did(tmp_path):
    line = ["recipe=boston", "trainer.accelerator=cpu", "trainer.max_epochs=1", "logger=csv"]
    scaled = [*line, "hydra.run.dir=run", "task.scale_lr.batch_size=32"]
    fit, unknown = attempts(
        [
            [*scaled, "task.scale_lr.factor=1.5", "trainer.log_every=1"],
            [*scaled, "task.scale_lr.warmup=9"],
        ],
        tmp_path,
    )
    assert fit.code == 0, fit.err
    said = (
        "task.scale_lr: an update has 128 rows, 4 times the 32 that the rates are for: they are "
        "2.25 times what is set (1.5 for twice the rows)"
    )
    assert said in fit.out.splitlines()
    assert re.search(r",0\.0225[,\n]", (tmp_path / "run" / "metrics.csv").read_text())
    assert "task.scale_lr.warmup; did you mean task.scale_lr.warmup_steps?" in unknown.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
