"""mode=tune: the searches against known answers, and what the command prints and writes."""

import gc
import json
import math
import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import command
import pytest
import torch
from small import SGD, Adam, Rows, Small, Streamed, fitted
from test_preparation import Prepared, prepared
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

from dpframe import LRSchedule, Task, TrainerSettings, UserError
from dpframe.config.compose import composed
from dpframe.errors import Failure
from dpframe.modes.measure import devices_of
from dpframe.plugins.lab import tune
from dpframe.plugins.lab.tuner import Point, Rates, Tuner, find_largest, find_steepest, smooth
from dpframe.plugins.lab.tuning import Tuning, chart
from dpframe.schedules import WSD
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP


@pytest.fixture(autouse=True, scope="module")
def a_trial_has_little_garbage_to_look_through() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# ---- the searches


@pytest.mark.parametrize("bound", [0, 1, 2, 31, 32, 100, 4000, 9999])
@pytest.mark.parametrize("first", [1, 32, 5000])
def test_doubling_and_bisection_end_one_part_in_64_below_what_fits(bound, first):
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= bound

    found = find_largest(fits, first, 6000)
    true = min(bound, 6000)
    assert true - max(0, true // 64 - 1) <= found <= true
    assert len(tried) <= 2 * math.log2(6000) and max(tried) <= max(first, 2 * true + 1)
    assert len(set(tried)) == len(tried) and 0 not in tried


def falling(at: int, count: int = 60) -> list[Point]:
    return [Point(10 ** (n / 10), 1 / (1 + math.exp((n - at) / 3))) for n in range(count)]


FRESH = [Point(0.0, 1.0)] * 60


def test_the_steepest_point_is_not_shifted_by_smoothing():
    assert find_steepest(falling(23), FRESH) == falling(23)[23].rate
    assert smooth([1.0, 5.0, 3.0]) == [1.0, 3.0, 3.0]
    rises = [*falling(23)[:40], *(Point(10 ** (n / 10), n) for n in range(40, 60))]
    assert find_steepest(rises, FRESH) == falling(23)[23].rate
    assert (
        find_steepest([], [])
        is find_steepest([Point(n, float(n)) for n in range(1, 20)], FRESH)
        is None
    )


@pytest.mark.parametrize("shift", [0.0, -100.0])
def test_batches_of_several_losses_are_no_fall(shift):
    """In proportion to their losses, or by the same amount where losses are below 0."""
    draw = random.Random(0)
    sizes = [draw.uniform(0.2, 5.0) for _ in range(60)]
    fresh = [Point(0.0, size + shift) for size in sizes]
    flat = [Point(n + 1, point.loss) for n, point in enumerate(fresh)]
    assert find_steepest(flat, fresh) is None
    falls = [1 - point.loss for point in falling(30)]
    noisy = [
        Point(at.rate, size * (1 - fall) if not shift else size + shift - 100 * fall)
        for at, size, fall in zip(falling(30), sizes, falls, strict=True)
    ]
    rates = [point.rate for point in falling(30)]
    assert abs(rates.index(find_steepest(noisy, fresh)) - 30) <= 3


# ---- the trials


def tuner(make=Small, data=None, *, replicas=1, settings=None, memory=None) -> Tuner:
    return Tuner(
        make,
        data or Rows(),
        TrainerSettings(threads=1, **(settings or {})),
        accelerator="cpu",
        replicas=replicas,
        seed=0,
        limit=memory,
    )


RATES = 1e-6, 10.0, 100
NUMBERS = 3 * 8 + 8 + 8 + 1  # of Small
LASTING = 4 * (2 * NUMBERS + 2 * NUMBERS + 4)  # with gradients, Adam's moments and four counts
A_ROW = 4 * (3 + 1 + 8 + 1)  # x, y, the ReLU's output and the error


@pytest.mark.parametrize("rows, replicas", [(10, 1), (7, 1), (3, 2), (4, 8)])
def test_the_largest_batch_is_the_one_whose_memory_is_the_limit(rows, replicas):
    limit = LASTING + rows * A_ROW
    size, trials = tuner(lambda: Small(Adam), replicas=replicas, memory=limit).batch_size(8192)
    assert size == min(rows * replicas, 20)
    assert all(trial.bytes == LASTING + trial.rows * A_ROW for trial in trials)
    assert tuner(memory=1.0).batch_size(8192)[0] == 0


def test_an_optimizer_a_turn_is_counted():
    both = tuner(lambda: Small(Adam), memory=1e9).batch_size(8192)[1]

    class Two(Small):
        def configure_optimizer(self):
            first, second = list(self.parameters())[:2], list(self.parameters())[2:]
            return {"a": Adam(first), "b": Adam(second)}

        def training_step(self, batch, turn):
            return super().training_step(batch)

    turns = tuner(Two, memory=1e9)
    assert [t.bytes for t in turns.batch_size(8192)[1]] == [trial.bytes for trial in both]
    with pytest.raises(UserError, match="and Two has several optimizers: a, b; use tune.find="):
        turns.learning_rate(*RATES)


class Big(Small):
    """Its device has room for seven rows."""

    error: Exception = torch.OutOfMemoryError("CUDA out of memory")

    def training_step(self, batch):
        if len(batch[0]) > 7:
            raise self.error
        return super().training_step(batch)


def test_what_the_device_has_no_room_for_ends_no_search():
    size, trials = tuner(Big).batch_size(8192)
    assert size == 7 and {trial.bytes is None for trial in trials if not trial.fits} == {True}
    Big.error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8")
    assert tuner(Big).batch_size(8192)[0] == 7
    with pytest.raises(Failure, match="a batch of 8 rows does not fit cpu, on which learning rate"):
        tuner(Big, Rows(batch_size=8)).learning_rate(*RATES)
    Big.error = RuntimeError("another one")
    with pytest.raises(RuntimeError, match="another one"):
        tuner(Big).batch_size(8192)


def test_batches_stay_below_the_largest_that_may_be_tried():
    assert tuner().batch_size(6)[0] == 6
    assert tuner(replicas=2).batch_size(7)[0] == 7


class Valley(Task):
    """Gradient descent on 2 w^2 + 8 v^2 ends where it begins at a rate of 1/8, and beyond."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1, bias=False), SGD)
        with torch.no_grad():
            self.net.weight.fill_(1.0)

    def training_step(self, batch):
        weights = self.net.weight[0]
        return {
            "loss": 2 * weights[0] ** 2 + 8 * weights[1] ** 2 + 0 * self.net(batch[0][:, :2]).sum()
        }


def test_a_learning_rate_is_found_that_learns_and_the_test_ends_where_the_loss_grows():
    rates = tuner(Valley, settings={"accumulate": 2}).learning_rate(*RATES)
    assert rates.batch_size == 8 and rates.best is not None
    assert 0.005 < rates.best < 0.125 < rates.points[-1].rate < 5
    make = partial(Small, partial(torch.optim.SGD, lr=0.0))
    given = {"scheduler_every": "step", "max_epochs": 1}
    found = tuner(make, settings=given).learning_rate(1e-6, 1e3, 100)
    assert found.best is not None
    losses = {
        lr: fitted(make=lambda r=lr: Small(partial(SGD, lr=r))).metrics["train/loss"]
        for lr in (found.best / 100, found.best)
    }
    assert losses[found.best] < 0.5 * losses[found.best / 100]


@pytest.mark.parametrize("rows, size", [(22, 4), (2000, 8)])
def test_the_noise_of_small_batches_is_no_fall(rows, size):
    found = tuner(partial(Small, Adam), Rows(rows, size)).learning_rate(*RATES)
    assert found.best is not None and 0.01 < found.best < 0.3


def test_a_flat_loss_is_told_instead_of_a_rate():
    found = tuner(data=Rows(22, 4)).learning_rate(1e-6, 1e-5, 100)
    assert found.best is None and len(found.points) == len(found.fresh) == 100
    said = str(Tuning("flat", None, 8, None, found, takes_size=True, rate_key="task.optimizer.lr"))
    assert said.endswith("makes the loss fall by 1%; raise tune.steps or tune.max_lr")


def test_keys_that_the_data_or_the_task_lacks_are_not_printed():
    rates = Rates(falling(30), FRESH, 8, 0.5)
    said = str(Tuning("none", None, 8, (6, []), rates, takes_size=False, rate_key=""))
    assert "\nbatch size 6  " in said and "\nlearning rate 0.5  " in said and "=" not in said


class Untouched(LRSchedule):
    def factor(self, step: int, steps: int) -> float:
        raise AssertionError("mode=tune has stepped the schedule")


@pytest.mark.parametrize(
    "scheduler",
    [
        partial(OneCycleLR, max_lr=3.0, cycle_momentum=False),
        partial(SequentialLR, schedulers=[LinearLR, CosineAnnealingLR], milestones=[5]),
        None,
    ],
)
def test_no_schedule_changes_the_rates_that_are_tried(scheduler):
    def make() -> Small:
        task = Small(Adam, scheduler)
        task.lr_schedule = schedule if scheduler is None else None
        return task

    schedule, by_step = Untouched(), {"scheduler_every": "step"}
    found, plain = tuner(make, settings=by_step), tuner(partial(Small, Adam))
    assert found.learning_rate(*RATES) == plain.learning_rate(*RATES)
    assert found.schedule is (schedule if scheduler is None else None)
    assert found.total_steps == 50


def test_what_is_found_is_the_peak_of_a_schedule_which_is_drawn():
    rates = Rates(falling(30), FRESH, 8, 0.5)
    made = partial(Tuning, "drawn", None, 8, None, rates, takes_size=True)
    tuning = made(rate_key="task.optimizer.lr", schedule=WSD(warmup=2, decay=4), steps=8)
    found, told, bars = str(tuning).splitlines()[-3:]
    assert found.startswith("task.optimizer.lr=0.5  ")
    assert told == "the peak of WSD(warmup=2, decay=4, final=0.0, shape=linear), over 8 steps:"
    assert bars.split() == ["▃▆███▆▅▃"]


def test_a_scheduler_that_overwrites_the_rate_is_what_to_set():
    cycle = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1}
    task: dict[str, Any] = {"optimizer": {"lr": 0.1}, "scheduler": cycle}
    assert tune.rate_key(task) == "task.scheduler.max_lr"
    nested = {"_target_": "torch.optim.lr_scheduler.SequentialLR", "schedulers": [{}, cycle]}
    assert tune.rate_key(task | {"scheduler": nested}) == "task.scheduler.schedulers[1].max_lr"
    assert tune.rate_key(task | {"scheduler": None}) == "task.optimizer.lr"
    assert tune.rate_key({"optimizer": None}) == ""
    rates = Rates(falling(30), FRESH, 8, 0.5)
    made = partial(Tuning, "told", None, 8, None, rates, takes_size=True, rate_key="a.max_lr")
    assert str(made(scheduler="OneCycleLR")).endswith(
        "OneCycleLR overwrites task.optimizer.lr: its max_lr is what to set"
    )
    made = partial(Tuning, "told", None, 8, None, rates, takes_size=True, rate_key="a.lr")
    assert str(made(scheduler="StepLR")).endswith("\nStepLR changes it from there")


def test_a_loss_that_is_not_finite_ends_the_test_and_not_the_command():
    class Cliff(Small):
        def training_step(self, batch):
            output = super().training_step(batch)
            return {"loss": output["loss"] / (self.global_step < 30)}

    assert len(tuner(Cliff).learning_rate(*RATES).points) == 30


def test_groups_keep_the_proportions_of_their_rates_and_each_trial_begins_alike():
    made: list[Small] = []

    class Grouped(Small):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def configure_optimizer(self):
            body, head = self.net[0].parameters(), self.net[3].parameters()
            return torch.optim.SGD([{"params": body}, {"params": head, "lr": 0.5}], lr=0.05)

        def on_before_step(self, trainer):
            rates = [group["lr"] for group in trainer.update.optimizer.param_groups]
            assert rates[1] == pytest.approx(10 * rates[0])

    before = torch.get_rng_state()
    first, again = (tuner(Grouped).learning_rate(*RATES) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.points[0].rate == 1e-6 and len(made) == 4
    again = [tuner(Small).learning_rate(1e-6, 1e-3, 20).points[0] for _ in range(2)]
    assert again[0] == again[1]


def test_a_stream_is_refused():
    with pytest.raises(UserError, match=r"Streamed.train_dataset\(\) is a stream, of which no bat"):
        tuner(data=Streamed())


def test_replicas_are_counted_without_starting_any():
    assert len(devices_of(DDP(5, "cpu"))) == 5 and len(devices_of(DataParallel(3, "cpu"))) == 3


# ---- what is printed and written


def test_the_chart_has_each_point_and_the_rate_that_is_found():
    points = falling(30)
    drawn = chart(points, points[30].rate)
    assert sum(line.count("*") for line in drawn) >= 55 and max(map(len, drawn)) <= 80
    assert [line[10 + 32] for line in drawn[1:-1]].count("|") >= 7
    assert chart(points[:1], None) and chart([Point(1, 1.0), Point(2, 1.0)], None)


def test_a_setting_that_can_not_be_is_one_line():
    refused = {
        "tune.memry=1": "did you mean tune.memory?",
        "tune.find=[batch]": "tune.find=batch is not one of batch_size, lr; did you mean",
        "tune.memory=0": "tune.memory=0.0 is out of range; use more than 0 bytes, or null",
        "tune.max_batch_size=0": "tune.max_batch_size=0 is out of range; use 1 or more",
        "tune.steps=9": "tune.steps=9 is out of range; use 10 or more",
        "tune.min_lr=0": "tune.min_lr=0.0 is out of range; use more than 0",
        "tune.max_lr=1e-9": "tune.max_lr=1e-09 is out of range; use more than tune.min_lr",
    }
    for override, said in refused.items():
        with pytest.raises(UserError, match=re.escape(said)) as error:
            composed(["recipe=boston", "mode=tune", override])
        assert "\n" not in str(error.value)


def test_the_command_prints_what_to_type_and_writes_it_where_it_is_told(tmp_path):
    words = ["recipe=boston", "mode=tune", "strategy=ddp", "trainer.gpus=2", "tune.steps=20"]
    kept = tmp_path / "kept"
    (done,) = command.attempts([[*words, f"hydra.run.dir={kept}"]], tmp_path)
    assert done.code == 0 and done.files == ["kept"]
    assert done.out.startswith("tune boston: 2 replicas of DDP, measured on one on cpu")
    typed = [line.split()[0] for line in done.out.splitlines() if "=" in line.split("    ")[0]]
    assert typed[1] == "data.batch_size=404" and typed[2].startswith("task.optimizer.lr=")
    assert composed(["recipe=boston", *typed[1:]]).settings
    summary = json.loads((kept / "summary.json").read_text())["tune"]
    assert summary["batch_size"] == 404 and f"task.optimizer.lr={summary['lr']:g}" == typed[2]
    assert (kept / "tune.txt").read_text() == done.out


def test_a_checkpoint_and_torchruns_ranks_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.ckpt").write_bytes(b"")
    words = ["recipe=boston", "mode=tune", "strategy=cpu"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match="checkpoint=a.ckpt: mode=tune begins each trial with fresh"
    ):
        tune.run(composed([*words, "checkpoint=a.ckpt"]))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="in one process; start it without torchrun"):
        tune.run(composed(words))


def test_a_tuning_prepares_once_for_all_its_trials(tmp_path):
    tuner = Tuner(
        Small, Prepared(tmp_path), TrainerSettings(), accelerator="cpu", replicas=1, seed=0
    )
    tuner.batch_size(8)
    assert len(prepared(tmp_path)) == 1


def test_a_tuning_is_refused_where_the_rates_follow_the_batch(tmp_path):
    words = ["recipe=boston", "mode=tune", "task.scale_lr={batch_size:32}"]
    (tune,) = command.attempts([words], tmp_path)
    assert "add task.scale_lr=null" in tune.err and tune.code == 2
