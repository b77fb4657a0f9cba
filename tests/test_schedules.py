"""Schedules as functions of the step: their formulas by hand, and what can be none."""

import math
from dataclasses import fields

import pytest

from dpframe import LRSchedule, UserError
from dpframe.schedules import (
    KINDS,
    WSD,
    Constant,
    InverseSqrt,
    Linear,
    WarmupCosine,
    check_schedule,
    count,
)


def curve(schedule: LRSchedule, steps: int) -> list[float]:
    return [schedule.factor(step, steps) for step in range(steps)]


def test_each_schedule_has_the_factors_of_its_formula():
    cosine = [0.5 + 0.25 * (1 + math.cos(math.pi * done / 6)) for done in range(6)]
    rise = [0.2, 0.4, 0.6, 0.8]
    for schedule, wanted in (
        (WarmupCosine(warmup=4, final=0.5), [0.2, 0.4, 0.6, 0.8, *cosine]),
        (WarmupCosine(warmup=0.4, final=0.5), [0.2, 0.4, 0.6, 0.8, *cosine]),
        (Linear(warmup=0), [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (Linear(warmup=0.2, final=0.2), [1 / 3, 2 / 3, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]),
        (Constant(warmup=4), [*rise, 1, 1, 1, 1, 1, 1]),
        (InverseSqrt(warmup=4), [*rise, *(math.sqrt(4 / (4 + n)) for n in range(6))]),
        (InverseSqrt(warmup=0, timescale=2), [math.sqrt(2 / (2 + n)) for n in range(10)]),
        (InverseSqrt(warmup=0), [math.sqrt(1e4 / (1e4 + n)) for n in range(10)]),
        (WSD(warmup=4, decay=0.4), [*rise, 1, 1, 1, 0.75, 0.5, 0.25]),
        (WSD(warmup=0, decay=4, final=0.2), [1] * 7 + [0.8, 0.6, 0.4]),
        (WSD(warmup=0, decay=4, shape="sqrt"), [1] * 7 + [0.5, 1 - math.sqrt(0.5), 1 - 0.75**0.5]),
        (WSD(warmup=0, decay=2, shape="cosine"), [1] * 9 + [0.5]),
    ):
        assert curve(schedule, 10) == pytest.approx(wanted, abs=1e-15), schedule


def test_a_share_is_of_all_steps_and_a_whole_number_is_of_steps():
    assert [count(part, 50) for part in (0, 1, 7, 7.0, 0.0, 0.03, 0.5, 1.0)] == [
        *(0, 1, 7, 7, 0, 2, 25, 50)
    ]


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_training_that_is_shorter_than_its_parts_has_rates_too(kind, steps):
    """E.g. that of experiment=debug."""
    long = {name: 100 for name in ("warmup", "decay") if name in {f.name for f in fields(kind)}}
    for schedule in (kind(), kind(warmup=0), kind(**long)):
        factors = curve(schedule, steps)
        assert all(0 < factor <= 1 for factor in factors)
        assert 0 <= schedule.factor(steps + 5, steps) <= 1  # e.g. after max_steps was lowered


def test_only_parts_that_are_shares_need_the_length():
    for kind in (Constant, InverseSqrt):
        assert kind(warmup=0.1).needs_length and not kind(warmup=10).needs_length
        assert curve(kind(warmup=2), 10) == [kind(warmup=2).factor(step, 0) for step in range(10)]
    assert all(kind(warmup=10).needs_length for kind in (WarmupCosine, Linear, WSD))


@pytest.mark.parametrize(
    "given, said",
    [
        ({"warmup": -1}, "task.schedule.warmup=-1 is out of range; use a share of all steps such"),
        ({"warmup": 1.5}, "task.schedule.warmup=1.5 is out of range"),
        ({"warmup": math.nan}, "task.schedule.warmup=nan is out of range"),
        ({"warmup": True}, "task.schedule.warmup=True is out of range"),
        ({"warmup": "long"}, "task.schedule.warmup=long is out of range"),
        ({"warmup": None}, "task.schedule.warmup=None is out of range"),
        ({"decay": 0.98}, "warmup=0.03 and task.schedule.decay=0.98 are more than all steps"),
        ({"final": 1.1}, "task.schedule.final=1.1 is out of range; use a part of the peak, 0 to 1"),
        ({"shape": "cosin"}, "shape=cosin is not one of linear, cosine, sqrt; did you mean cosine"),
        ({"_target_": "dpframe.schedules.WSDs"}, "there is no such class; did you mean WSD?"),
        ({"decy": 0.1}, "task.schedule.decy: WSD takes no such argument; did you mean task.schedu"),
        ({"_target_": "dpframe.schedules.InverseSqrt", "timescale": 0}, "timescale=0 is out of"),
    ],
)
def test_what_can_be_no_schedule_is_one_line(given, said):
    with pytest.raises(UserError) as caught:
        check_schedule({"_target_": "dpframe.schedules.WSD", **given})
    assert said in str(caught.value) and "\n" not in str(caught.value)
