"""Learning rates: schedules by step, by epoch and by a metric, and lengths that are filled in."""

from functools import partial

import pytest
import torch
from recorded import Recorder
from small import Rows, Small, fitted
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import IterableDataset

from dpframe import UserError

HALVES = partial(StepLR, step_size=1, gamma=0.5)
BASE = 0.05  # small.SGD's


def rates(recorder: Recorder, name: str) -> list[float]:
    return [scalars[name] for _, scalars in recorder.log_ if name in scalars]


def logged(scheduler, name: str = "progress/lr", **settings) -> list[float]:
    recorder = Recorder()
    fitted(make=lambda: Small(scheduler=scheduler), loggers=[recorder], **settings)
    return rates(recorder, name)


def test_a_schedule_by_epoch_steps_after_each_epoch():
    assert logged(HALVES, max_epochs=3) == [BASE, BASE / 2, BASE / 4]


def test_a_schedule_by_step_steps_after_each_update():
    halved = logged(
        HALVES, "step/lr", scheduler_every="step", log_every=1, max_steps=4, accumulate=2
    )
    assert halved == [BASE / 2**n for n in (1, 2, 3, 4)]


def test_an_epoch_that_is_cut_short_does_not_step_the_schedule():
    one = fitted(make=lambda: Small(scheduler=HALVES), max_epochs=3, max_steps=7)
    assert one.update.learning_rate == BASE / 2


def stuck(monitor: str = "val/loss", **settings) -> list[float]:
    """The rates of a training that never gets better."""
    plateau = partial(
        ReduceLROnPlateau, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
    )
    return logged(plateau, plateau_monitor=monitor, **settings)


@pytest.mark.parametrize("monitor", ["val/loss", "train/loss"])
def test_a_plateau_lowers_the_rate_when_its_metric_stays(monitor):
    assert stuck(monitor, max_epochs=4) == [BASE, BASE, BASE / 2, BASE / 4]


def test_a_plateau_looks_only_at_new_validations():
    assert stuck(max_epochs=6, validate_every_epochs=2) == [BASE] * 4 + [BASE / 2] * 2


def test_a_plateau_never_steps_by_update():
    assert stuck(max_epochs=2, scheduler_every="step") == [BASE, BASE]


@pytest.mark.parametrize(
    "monitor, data, said",
    [
        ("val/los", Rows(), "val/los is not measured; did you mean val/loss?"),
        ("val/loss", Rows(val=False), "val/loss is not measured; did you mean train/loss?"),
    ],
)
def test_a_plateau_over_a_metric_that_is_not_there_is_refused(monitor, data, said):
    with pytest.raises(UserError) as caught:
        stuck(monitor, data=data)
    assert str(caught.value) == f"trainer.plateau_monitor={said}"


ONE_CYCLE = partial(OneCycleLR, max_lr=0.1)


@pytest.mark.parametrize(
    "every, length", [({"scheduler_every": "step"}, 6), ({"scheduler_every": "epoch"}, 2)]
)
def test_one_cycle_is_told_how_often_it_will_be_stepped(every, length):
    one = fitted(make=lambda: Small(scheduler=ONE_CYCLE), accumulate=2, max_epochs=2, **every)
    assert one.update.scheduler.total_steps == length
    assert one.update.scheduler.last_epoch == length  # it came to its end


def test_one_cycle_ends_with_max_steps():
    one = fitted(make=lambda: Small(scheduler=ONE_CYCLE), scheduler_every="step", max_steps=7)
    assert one.update.scheduler.total_steps == 7


def test_a_length_that_was_given_is_kept():
    given = partial(ONE_CYCLE, total_steps=50)
    one = fitted(make=lambda: Small(scheduler=given), scheduler_every="step")
    assert one.update.scheduler.total_steps == 50


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Rows().train)


class Streamed(Rows):
    def train_dataset(self):
        return Stream()


def test_one_cycle_over_a_stream_asks_for_its_length():
    with pytest.raises(UserError, match="^task.scheduler needs total_steps, and nothing says how"):
        fitted(make=lambda: Small(scheduler=ONE_CYCLE), data=Streamed())


def test_one_cycle_over_a_stream_ends_with_max_steps():
    one = fitted(
        make=lambda: Small(scheduler=ONE_CYCLE),
        data=Streamed(),
        scheduler_every="step",
        max_epochs=None,
        max_steps=8,
    )
    assert one.update.scheduler.total_steps == 8
    assert (one.global_step, one.epoch) == (8, 1)


def test_a_task_may_make_its_own_optimizer_and_scheduler():
    class Own(Small):
        def configure_optimizer(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return optimizer, StepLR(optimizer, self.steps_per_epoch, gamma=0.1)

    one = fitted(Own(), scheduler_every="step", max_epochs=1)
    assert one.update.learning_rate == pytest.approx(0.05)
