"""torch's schedulers from a config: their lengths are filled in, and they may be nested."""

from copy import deepcopy
from functools import partial

import pytest
from command import attempts
from small import Hooks, Small, Streamed, fitted, is_same
from test_rates import Noted
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from dpframe import UserError

RISE = partial(LinearLR, start_factor=0.25)


def rates(scheduler, **settings) -> list[float]:
    made = fitted(Small(partial(Noted, lr=0.1), scheduler), **settings)
    return [first for (first,) in made.update.optimizer.rates]


def by_torch(make, steps: int) -> list[float]:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def sequence(*makes, milestones):
    return lambda optimizer: SequentialLR(optimizer, [m(optimizer) for m in makes], milestones)


@pytest.mark.parametrize(
    "given, wanted",
    [
        (CosineAnnealingLR, partial(CosineAnnealingLR, T_max=10)),
        (partial(CosineAnnealingLR, T_max=4), partial(CosineAnnealingLR, T_max=4)),
        (partial(PolynomialLR, power=2.0), partial(PolynomialLR, power=2.0, total_iters=10)),
        (partial(OneCycleLR, max_lr=0.3), partial(OneCycleLR, max_lr=0.3, total_steps=10)),
        (RISE, RISE),  # which torch takes for a warm-up of 5
        (
            partial(SequentialLR, schedulers=[RISE, CosineAnnealingLR], milestones=[3]),
            sequence(
                partial(RISE, total_iters=3), partial(CosineAnnealingLR, T_max=7), milestones=[3]
            ),
        ),
        (
            partial(SequentialLR, schedulers=[RISE, ConstantLR, PolynomialLR], milestones=[0.2, 6]),
            sequence(
                partial(RISE, total_iters=2),
                ConstantLR,
                partial(PolynomialLR, total_iters=4),
                milestones=[2, 6],
            ),
        ),
        (
            partial(
                SequentialLR,
                schedulers=[partial(RISE, total_iters=4), partial(StepLR, step_size=2)],
            ),
            sequence(partial(RISE, total_iters=4), partial(StepLR, step_size=2), milestones=[4]),
        ),
        (
            partial(
                ChainedScheduler, schedulers=[CosineAnnealingLR, partial(ExponentialLR, gamma=0.9)]
            ),
            lambda optimizer: ChainedScheduler(
                [CosineAnnealingLR(optimizer, 10), ExponentialLR(optimizer, 0.9)]
            ),
        ),
    ],
)
def test_a_length_that_is_not_given_is_that_of_the_training_or_of_the_stretch(given, wanted):
    assert rates(given, scheduler_every="step") == by_torch(wanted, 10)


def test_a_length_counts_what_the_scheduler_is_stepped_by():
    def length(**settings) -> int:
        return fitted(
            make=partial(Small, scheduler=CosineAnnealingLR), **settings
        ).update.scheduler.T_max

    assert length(scheduler_every="step", accumulate=2) == 6
    assert length(scheduler_every="step", max_steps=7) == 7
    assert length(scheduler_every="epoch", max_epochs=3) == 3
    assert length(scheduler_every="epoch", max_epochs=3, data=Streamed()) == 3
    for every, limit in (("step", "max_steps"), ("epoch", "max_epochs")):
        given = {"max_epochs": None, "max_seconds": 1e6} if every == "epoch" else {}
        said = f"^task.scheduler needs T_max, and nothing says .* set trainer.{limit} or task.sch"
        with pytest.raises(UserError, match=said):
            length(scheduler_every=every, data=Streamed(), **given)


@pytest.mark.parametrize("step", [2, 3, 7])
def test_schedulers_within_one_are_resumed_within_an_epoch_to_the_bit(step):
    nested = partial(SequentialLR, schedulers=[RISE, CosineAnnealingLR], milestones=[0.3])
    make, by_step = partial(Small, scheduler=nested), {"scheduler_every": "step"}
    states = {}
    keep = Hooks(on_step_end=lambda t: states.update({t.global_step: deepcopy(t.state_dict())}))
    whole = fitted(make=make, callbacks=[keep], **by_step)
    again = fitted(make=make, resume=states[step], **by_step)
    assert is_same(again.task.state_dict(), whole.task.state_dict())
    with pytest.raises(UserError, match="scheduler's steps=10 there, 15 here"):
        fitted(make=make, resume=states[step], max_epochs=3, **by_step)
    given = partial(Small, scheduler=partial(CosineAnnealingLR, T_max=5))
    state = fitted(make=given, **by_step).state_dict()
    fitted(make=given, resume=state, max_epochs=3, **by_step)  # its length is its own


@pytest.mark.parametrize(
    "schedulers, milestones, said",
    [
        ([StepLR, StepLR], [3, 4], r"milestones=\[3, 4\] do not fit 2 schedulers; use one fewer"),
        ([StepLR, StepLR, StepLR], [4, 3], r"milestones=\[4, 3\] do not fit 3 schedulers"),
        (
            [RISE, CosineAnnealingLR],
            None,
            r"milestones is missing, and task.scheduler.schedulers\[",
        ),
        ([], None, "task.scheduler.schedulers is no list of schedulers; name the class of each"),
        ([{"gamma": 1}], [], "task.scheduler.schedulers is no list of schedulers"),
    ],
)
def test_what_can_be_no_sequence_is_one_line(schedulers, milestones, said):
    given = partial(SequentialLR, schedulers=schedulers, milestones=milestones)
    with pytest.raises(UserError, match=said):
        rates(given, scheduler_every="step")


NESTED = """\
# @package _global_
# Mine.
defaults: [boston, _self_]
recipe: mine
task:
  scheduler:
    _target_: torch.optim.lr_scheduler.SequentialLR
    _partial_: true
    schedulers:
      - {_target_: torch.optim.lr_scheduler.LinearLR, _partial_: true, start_factor: 0.25}
      - {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, _partial_: true}
    milestones: [0.25]
trainer: {scheduler_every: step, max_epochs: 2, accelerator: cpu, log_every: 1}
callbacks: {checkpoint: null}
"""


def test_a_sequence_is_written_in_yaml_and_torchs_own_refusals_are_one_line(tmp_path):
    (tmp_path / "own" / "recipe").mkdir(parents=True)
    (tmp_path / "own" / "recipe" / "mine.yaml").write_text(NESTED)
    base = "torch.optim.lr_scheduler"
    boston = ["recipe=boston", "trainer.accelerator=cpu", "trainer.max_epochs=2"]
    boston += ["++task.scheduler._partial_=true"]
    run, cosine, steps = attempts(
        [
            ["--config-dir=own", "recipe=mine", "logger=csv", "hydra.run.dir=run"],
            [*boston, f"+task.scheduler._target_={base}.CosineAnnealingLR", "logger=none"],
            [*boston, f"+task.scheduler._target_={base}.MultiStepLR"],
        ],
        tmp_path,
    )
    assert (run.code, cosine.code) == (0, 0), (run.err, cosine.err)
    head, *lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    place = head.split(",").index("step/lr")
    found = [float(line.split(",")[place]) for line in lines if line.split(",")[place]]
    wanted = by_torch(
        sequence(partial(RISE, total_iters=2), partial(CosineAnnealingLR, T_max=6), milestones=[2]),
        8,
    )
    assert found == pytest.approx([rate / 10 for rate in wanted], abs=1e-12)
    assert (
        steps.code == 2 and "task.scheduler.milestones is missing; MultiStepLR needs" in steps.err
    )
    assert MultiStepLR.__name__ in steps.err
