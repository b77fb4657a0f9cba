"""A rank that all others wait for is named, once for each cause; nothing is computed otherwise."""

import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from forked import on
from injector import _compute
from small import SGD, Rows, Small, is_same

from dpframe import Strategy, Trainer
from dpframe.stopwatch import Stopwatch
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.trainer import pace
from dpframe.trainer.pace import EVERY_SECONDS, Pace, listed
from dpframe.trainer.progress import Progress

SPIN_SECONDS = 0.01


class Told(Strategy):
    """Four ranks on two hosts, of which the test says what they measure."""

    world_size = 4

    def gather(self, value: Any) -> list[Any]:
        return [value, value, "b", "b"]

    def tally(self, numbers: list[float]) -> list[float]:
        assert len(numbers) == 8
        return [*self.computing, *self.data]


def said(
    caplog: pytest.LogCaptureFixture, *windows: tuple[Sequence[float], Sequence[float]]
) -> list[str]:
    """What a run logs whose ranks measure that, in steps of 10 ms."""
    caplog.clear()
    strategy, progress = Told(), Progress()
    compared = Pace(strategy, progress, None)
    for number, (strategy.computing, strategy.data) in enumerate(windows, 1):
        progress.global_step += int(EVERY_SECONDS / 0.01)
        compared.look(EVERY_SECONDS * number - 0.001)  # not yet
        compared.look(EVERY_SECONDS * number)
    return caplog.messages


EVEN = [1e-3, 1.1e-3, 1.2e-3, 1.1e-3]
SLOW = [1e-3, 1e-3, 1.8e-3, 2e-3]
NONE = [0.0, 0.0, 0.0, 0.0]


def test_a_node_whose_ranks_are_slow_is_told_once_and_by_how_much(caplog):
    (line,) = said(caplog, *[(SLOW, NONE)] * 9)
    assert line.startswith(
        "b (ranks 2-3) takes 1.9 times as long for a step's forward as the median: 1.9 ms, not 1 ms"
    )


def test_a_rank_alone_is_named_with_its_node(caplog):
    (line,) = said(caplog, *[([1e-3, 3e-3, 1e-3, 0.0], NONE)] * 3)
    assert line.startswith(f"rank 1 on {socket.gethostname()} takes 3.0 times as long")


def test_ranks_that_wait_for_their_data_are_told(caplog):
    (line,) = said(caplog, *[(EVEN, [1e-4, 1e-4, 6e-3, 1e-4])] * 4)
    assert line.startswith(
        "rank 2 on b waits 6 ms for the data of each step of 10 ms, and the median 0.1 ms"
    )


def test_even_ranks_and_those_that_are_slow_at_times_are_not_told(caplog):
    assert said(caplog, *[(EVEN, [1e-3, 1e-3, 2e-3, 1e-3])] * 9) == []
    assert said(caplog, *[(SLOW, NONE), (SLOW, NONE), (EVEN, NONE)] * 3) == []
    assert said(caplog, *[(NONE, NONE)] * 9) == []  # nobody has measured a forward


def test_ranks_are_listed_as_ranges():
    assert [listed([1]), listed([2, 3]), listed([0, 2, 3, 5])] == [
        "rank 1",
        "ranks 2-3",
        "ranks 0, 2-3, 5",
    ]


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_stopwatch_leaves_out_pauses_and_smaller_shares(name):
    """It reads less than passes from before a forward to its pause, and from there to after it."""

    def now() -> Any:
        if name == "cpu":
            return time.perf_counter()
        event = torch.Event(name, enable_timing=True)
        event.record()
        return event

    def seconds(first: Any, last: Any) -> float:
        return last - first if name == "cpu" else first.elapsed_time(last) / 1000

    watch = Stopwatch(8, torch.device(name))
    before = now()
    watch.begin(8)
    watch.pause()
    paused = now()
    _compute(SPIN_SECONDS)
    goes_on = now()
    watch.go_on()
    watch.end()
    after = now()
    watch.begin(5)
    _compute(SPIN_SECONDS)
    watch.end()
    if name != "cpu":
        torch.accelerator.synchronize()
    most = seconds(before, paused) + seconds(goes_on, after)
    assert 0 < watch.read() <= most + 1e-5  # an event's clock has steps
    assert watch.read() == 0.0


class Slowed(Small):
    """Rank 1 computes longer. The other one waits for it, in a gathering within the forward."""

    is_slow = True

    def training_step(self, batch: Any) -> Any:
        if self.is_slow and self.rank == 1:
            _compute(SPIN_SECONDS)
        if self.gathers:
            self.all_gather(batch[0])
        return super().training_step(batch)


def compared(strategy: Strategy) -> Any:
    """What the slow rank was told by, and whether it has the weights of even ranks."""
    pace.EVERY_SECONDS = 0.05  # this process is a test's own
    ended = []
    for is_slow in (True, False):
        torch.manual_seed(0)
        task = Slowed(SGD)
        task.is_slow, task.gathers = is_slow, isinstance(strategy, DDP)
        trainer = Trainer(task, Rows(400, val=False), strategy=strategy, max_steps=100)
        trainer.fit()
        ended.append((trainer.pace, strategy.whole(task.state_dict(), for_all=True)))
    (slow, ours), (_, theirs) = ended
    return slow.slow, is_same(ours, theirs)


@pytest.mark.parametrize(
    "strategy",
    [DDP(2, accelerator="cpu"), FSDP(2, accelerator="cpu", shard="Linear")],
    ids=["ddp", "fsdp"],
)
def test_what_a_rank_computes_is_timed_and_not_its_wait_for_the_others(strategy):
    slow, has_same_weights = on(strategy, compared)
    assert [(each["ranks"], each["cause"]) for each in slow] == [([1], "computing")]
    assert slow[0]["times"] > pace.TIMES
    assert has_same_weights
