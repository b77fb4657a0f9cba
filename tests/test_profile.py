"""`trainer.profile=true`: every moment counted once, and not a bit of the numbers changed."""

import logging
import time

import pytest
from recorded import Recorder
from small import Hooks, Small, fitted, is_same

from dpframe import Trainer
from dpframe.trainer.profile import PARTS


def profiled(**given) -> tuple[Trainer, dict[str, float]]:
    recorder = Recorder()
    one = fitted(loggers=[recorder], profile=True, **given)
    step, scalars = recorder.log_[-1]
    assert step == one.global_step
    return one, {name.removeprefix("profile/"): value for name, value in scalars.items()}


def test_the_parts_are_all_there_is(caplog):
    with caplog.at_level(logging.INFO, "dpframe"):
        one, parts = profiled()
    assert list(parts) == [part.replace(" ", "_") for part in PARTS]
    assert all(seconds >= 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(one.seconds, rel=0.2, abs=0.02)
    table = caplog.records[-1].getMessage().splitlines()
    assert [line.split("  ")[0] for line in table] == ["where the time went", *PARTS]


class Slow(Small):
    """Takes a tenth of a second in the forward, in its first step."""

    is_first = True

    def training_step(self, batch):
        if self.is_first:
            self.is_first = False
            time.sleep(0.1)  # what is measured, not a wait for anything
        return super().training_step(batch)


def test_each_part_gets_its_own_time():
    sleeps = Hooks(on_step_end=lambda t: t.global_step == 1 and time.sleep(0.2))
    _, parts = profiled(make=Slow, callbacks=[sleeps])
    assert parts["forward"] >= 0.1
    assert parts["callbacks"] >= 0.2
    assert parts["rest"] + parts["backward"] + parts["logging"] < 0.1


def test_a_profile_changes_nothing_that_is_computed():
    plain, (one, _) = fitted(), profiled()
    assert is_same(one.task.state_dict(), plain.task.state_dict())
    assert is_same(one.metrics, plain.metrics)
