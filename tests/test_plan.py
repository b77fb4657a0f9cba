"""mode=plan: its arithmetic against numbers by hand, its measurements against a known network."""

import json
import random
import re
from dataclasses import replace
from functools import partial
from math import inf

import command
import forked
import pytest
import small
import torch
from small import Stream
from test_fsdp import Deep
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpframe import DataModule, TrainerSettings, UserError
from dpframe.config.compose import composed
from dpframe.modes.reports import planned
from dpframe.plan import failures, model, report
from dpframe.plan.measure import measure
from dpframe.plan.model import Bucket, Costs, Gradient, Line
from dpframe.plan.network import Link, Network, Ring
from dpframe.plan.sharded import Call, Sharded, Unit, Weight
from dpframe.strategies.fsdp import FSDP

LINK = Link(bandwidth=1000.0, latency=0.5)
ALIKE = Network(LINK, LINK, per_node=8, is_gloo=True)
COSTS = Costs(
    read=Line(1.0, 0.1),
    forward=Line(2.0, 0.2),
    backward=Line(4.0, 0.4),
    update=3.0,
    parameters=100,
    gradients=80,
    optimizer=160,
    buffers=0,
    activations=Line(10.0, 5.0),
    buckets=(Bucket(40, 0.5), Bucket(40, 1.0)),
)


# ---- the arithmetic


@pytest.mark.parametrize(
    ("batch", "replicas", "rows", "idle"),
    [(30, 1, 30, 0), (30, 4, 8, 0), (10, 8, 2, 3), (128, 100, 2, 36), (20, 64, 1, 44)],
)
def test_the_largest_share_and_the_idle_replicas_of_uneven_splits(batch, replicas, rows, idle):
    assert model.share_of(batch, replicas) == (rows, idle)


def test_a_ring_moves_each_byte_less_than_twice():
    assert [2 * ALIKE.ring(count).part(80) for count in (1, 2, 4)] == [0, 80, 120]
    assert ALIKE.ring(4).all_reduce(80) == 6 * 0.5 + 120 / 1000
    assert ALIKE.ring(1).all_reduce(80) == 0


def test_a_ring_waits_for_its_slowest_hop_and_crosses_from_machine_to_machine():
    slow = Network(LINK, Link(100.0, 2.0), per_node=2, is_gloo=True)
    assert slow.ring(2).gather(80) == 0.5 + 40 / 1000
    assert slow.ring(8).gather(80) == pytest.approx(4 * 0.5 + 3 * 2 + 70 / 100)
    assert slow.ring(8).scatter(80) == 2 * slow.ring(8).gather(80)  # by gloo
    assert slow._replace(is_gloo=False).ring(8).scatter(80) == slow.ring(8).gather(80)
    # Two groups' rings leave a machine at once, and each has half of its link.
    assert slow.ring(4, 2) == Ring(4, 4, LINK, Link(50.0, 2.0), is_gloo=True)
    assert slow.ring(4, 1).machines == 2


def test_a_tree_is_taken_where_its_fewer_hops_are_quicker():
    nccl = Network(LINK, LINK, per_node=1, is_gloo=False)
    assert nccl.ring(8).all_reduce(80) == pytest.approx(2 * (3 * 0.5 + 80 / 1000))
    assert nccl.ring(8).all_reduce(80_000) == pytest.approx(2 * (7 * 0.5 + 70))


def test_only_what_backward_does_not_hide_is_waited_for():
    # Two replicas: a bucket takes 2 x 0.5 s of latency and 0.04 s of its 40 bytes.
    buckets, two = (Bucket(40, 0.5), Bucket(40, 1.0)), ALIKE.ring(2)
    assert model.waited(buckets, 10.0, two) == pytest.approx(1.04)
    # The first is ready after 1 s, is through at 2.04, and the second is through at 3.08.
    assert model.waited(buckets, 2.0, two) == pytest.approx(1.08)
    assert model.waited((Bucket(40, 0.0),), 10.0, two) == 0
    assert model.waited(buckets, 10.0, ALIKE.ring(1)) == 0


def test_a_step_is_the_sum_of_its_parts_on_the_largest_share():
    whole = (1 + 1) + (2 + 2) + (4 + 4) + 3
    assert model.step_seconds(COSTS, (10,), 1, ALIKE) == pytest.approx(whole)
    half = (1 + 0.5) + (2 + 1) + (4 + 2) + 3 + 1.04
    assert model.step_seconds(COSTS, (10,), 2, ALIKE) == pytest.approx(half)
    accumulated = half + (1 + 0.3) + (2 + 0.6) + (4 + 1.2)  # 5 rows on 2: 3 and 2
    assert model.step_seconds(COSTS, (5, 10), 2, ALIKE) == pytest.approx(accumulated)


def test_only_the_last_batch_of_a_step_hides_the_link():
    quick = replace(COSTS, backward=Line(0.0, 0.4))
    # Its 2 rows take 0.8 s, of which the first bucket waits for 0.4: 0.4 + 2 x 1.04 - 0.8.
    seconds = model.step_seconds(quick, (10, 4), 2, ALIKE)
    parts = (1 + 0.5) + (2 + 1) + 2 + (1 + 0.2) + (2 + 0.4) + 0.8 + 3
    assert seconds == pytest.approx(parts + 1.68)


def test_an_epoch_has_the_steps_that_it_has_alone_and_the_uneven_last_one():
    plans = model.predictions(COSTS, {(10,): 3, (4,): 1}, ALIKE, 8)
    shares = [(each.replicas, each.rows, each.idle) for each in plans]
    assert shares == [(1, 10, 0), (2, 5, 0), (4, 3, 0), (8, 2, 3)]
    assert {each.steps for each in plans} == {4}
    assert plans[0].seconds == pytest.approx(3 * 17 + (1.4 + 2.8 + 5.6 + 3))
    assert plans[0].speed_up == 1 and plans[0].moved == plans[0].waits == 0
    assert plans[1].moved == 80 and plans[1].waits == pytest.approx(1.04)
    assert plans[1].speed_up == pytest.approx(plans[0].seconds / plans[1].seconds)
    assert plans[1].efficiency == plans[1].speed_up / 2


def test_buffers_and_single_numbers_are_waited_for_by_several_replicas_alone():
    costs = replace(COSTS, buffers=20, small_reduces=1, buckets=())
    twice = [(0.0, 4.0)] * 2
    assert model.link_seconds(costs, twice, 1, ALIKE) == 0
    # Two forwards send 20 bytes down 2 hops; one number of 8 bytes goes round 6.
    expected = 2 * 2 * (0.5 + 0.02) + 6 * 0.5 + 12 / 1000
    assert model.link_seconds(costs, twice, 4, ALIKE) == pytest.approx(expected)


def test_workers_read_while_others_compute():
    busy = (2 + 2) + (4 + 4) + 3
    read_by = partial(model.step_seconds, batches=(10,), replicas=1, network=ALIKE)
    assert read_by(replace(COSTS, workers=2)) == pytest.approx(busy)
    assert read_by(replace(COSTS, workers=2, read=Line(60.0))) == 30


def test_memory_is_all_of_it_at_once():
    assert model.memory(COSTS, 10, 1) == 100 + 80 + 160 + 10 + 50
    copied = replace(COSTS, copies_gradients=True)
    assert model.memory(copied, 10, 2) == model.memory(COSTS, 10, 2) + 80
    assert model.memory(copied, 10, 1) == model.memory(COSTS, 10, 1)


def test_a_better_link_never_makes_an_epoch_longer():
    steps = {(10,): 3, (7, 7): 2}
    links = [ALIKE._replace(within=Link(10.0**p, 10.0**-p)) for p in range(6)]
    links = [each._replace(between=each.within) for each in links]
    for fast, slow in zip(links[1:], links, strict=False):
        plans = (model.predictions(COSTS, steps, link, 4096) for link in (fast, slow))
        for quick, late in zip(*plans, strict=True):
            assert quick.seconds <= late.seconds and quick.waits <= late.waits


def test_more_replicas_never_take_more_memory_or_send_less():
    plans = model.predictions(COSTS, {(100,): 1}, ALIKE, 4096)
    assert len(plans) == 13 and plans[-1].replicas == 4096
    for here, doubled in zip(plans, plans[1:], strict=False):
        assert doubled.memory <= here.memory and doubled.moved > here.moved
        assert doubled.idle >= here.idle and doubled.moved < 2 * 80


# Two blocks of 4 and 3 rows of 10 bytes, whose forwards and backwards take a quarter each of 8 s;
# and a rest of 20 bytes.
BLOCKS = Sharded(
    units=tuple(Unit((Weight(rows, 10, 10, 10),)) for rows in (4, 3, 2)),
    calls=(Call(0, 0.25, 0.5, 0.75), Call(1, 0.5, 0.75, 0.5)),
)
TIMES = [(8.0, 8.0)]
NCCL = Network(Link(10.0, 0.0), Link(10.0, 0.0), per_node=8, is_gloo=False)


def test_parts_are_as_large_as_the_padding_makes_them():
    four, three, two = BLOCKS.units
    assert [unit.gathered(2) for unit in BLOCKS.units] == [40, 40, 20]
    assert three.kept(2) == three.trained(2) == 20 and two.kept(4) == 10 and four.kept(1) == 40
    assert BLOCKS.part_of(2) == 50 / 90
    frozen = Unit((Weight(4, 10, 10, 0),))
    assert frozen.gathered(2) == 40 and frozen.reduced(2) == frozen.trained(2) == 0
    assert replace(BLOCKS, replicate=2).part_of(2) == 1


def test_fsdp_keeps_parts_and_has_some_blocks_whole():
    # Parts of weights and gradients of 50 bytes, the rest's 20 twice, and in the backward of the
    # first block 40 of weights, 40 of gradients and 40 that the other's scatter reads.
    assert BLOCKS.memory(90, 2) == 2 * 50 + 50 + 40 + 120
    kept = replace(BLOCKS, blocks_again=False)
    assert kept.memory(90, 2) == 150 + 40 + 80 + 80
    assert replace(BLOCKS, accumulates=True).memory(90, 2) == 150 + 40 + 80 + 120
    costs = replace(COSTS, sharded=BLOCKS, optimizer=90)
    assert model.memory(costs, 10, 2) == BLOCKS.memory(90, 2) + 60


def test_gloo_waits_for_each_gather_and_scatter():
    gloo = NCCL._replace(is_gloo=True)  # a byte of a part takes 0.1 s
    gathers, scatters = 2 * (2 + 2) + 1, 2 * (2 + 2 + 1)
    assert BLOCKS.waits(TIMES, 2, gloo) == pytest.approx(gathers + scatters)
    assert BLOCKS.moved(2, gloo) == 10 * (gathers + scatters)
    twice = BLOCKS.waits(TIMES * 2, 2, gloo)
    assert twice == pytest.approx(2 * gathers + scatters)  # gradients are shared once
    assert BLOCKS.waits(TIMES, 1, gloo) == 0
    clipped = replace(BLOCKS, norms=8)
    assert clipped.waits(TIMES, 2, gloo) == pytest.approx(gathers + scatters + 0.8)


def test_on_gpus_only_what_computation_does_not_hide_is_waited_for():
    # The rest's gather, and the last scatter: blocks' gathers of 2 s hide behind 2 s each, but
    # for the backward's first one, which nothing hides; and so do their scatters.
    assert BLOCKS.waits(TIMES, 2, NCCL) == pytest.approx(1 + 2 + 1)
    slow = NCCL._replace(within=Link(5.0, 0.0))
    # forward: 2, 2 s alone; then 4 + 4 s of gathers from 2 to 10, 2 and 2 s of computing: 14.
    # backward: a gather until 4, 4 s of computing and another gather until 8, where the scatter
    # begins; computing until 10, the scatters until 12, 16 and 18.
    assert BLOCKS.waits(TIMES, 2, slow) == pytest.approx((14 - 8) + (18 - 8))
    # Blocks of 1 s: a gather until 4, the next one until 8, a scatter until 12. The second block
    # is done at 9, and waits until 12, where its scatter begins; then come 8 s and the last one.
    first, second = BLOCKS.calls
    early = first._replace(done=0.2), second._replace(done=0.1)
    hasty = replace(BLOCKS, calls=early)
    assert hasty.waits([(8.0, 10.0)], 2, slow) == pytest.approx((14 - 8) + (22 - 10))


def test_groups_gather_within_themselves_and_add_up_between_machines():
    machines = Network(Link(10.0, 0.0), Link(5.0, 0.0), per_node=2, is_gloo=True)
    hybrid = replace(BLOCKS, replicate=2)
    within = 2 * (2 + 2) + 1 + 2 * (2 + 2 + 1)
    # Halves of 20, 20 and 10 bytes, of which each of two has half of 5 bytes a second.
    between = (20 + 20 + 10) / 2.5
    assert hybrid.waits(TIMES, 4, machines) == pytest.approx(within + between)
    assert hybrid.moved(4, machines) == 10 * within + 50
    lines = model.predictions(replace(COSTS, sharded=hybrid), {(10,): 1}, machines, 8)
    assert [line.replicas for line in lines] == [1, 2, 4, 8]
    hybrid = replace(hybrid, replicate=4)
    lines = model.predictions(replace(COSTS, sharded=hybrid), {(10,): 1}, machines, 8)
    assert [line.replicas for line in lines] == [1, 4, 8]


# ---- failures


def simulated(interval, stall, write, restart, rate, *, failures=4000):
    """The useful part of the time, of failures that are drawn one by one."""
    draw = random.Random(7).expovariate
    clock, done, saved, kept, whole_at, seen = 0.0, 0.0, 0.0, 0.0, inf, 0
    failure = draw(rate)
    while seen < failures:
        stop = clock + interval + stall
        if whole_at <= min(failure, stop):
            kept, whole_at = saved, inf
        if stop <= failure:
            clock, done = stop, done + interval
            saved, whole_at = done, stop + write
            continue
        clock, seen, whole_at = failure, seen + 1, inf
        failure = clock + draw(rate)
        while failure < clock + restart:
            clock, seen = failure, seen + 1
            failure = clock + draw(rate)
        clock, done = clock + restart, kept
    return kept / clock


@pytest.mark.parametrize(
    "setting",
    [(100, 5, 20, 60, 1e-3), (100, 0.1, 90, 30, 1 / 300), (1000, 60, 300, 600, 2e-4)],
)
def test_the_goodput_is_that_of_failures_drawn_one_by_one(setting):
    assert failures.goodput(*setting) == pytest.approx(simulated(*setting), abs=0.01)


@pytest.mark.parametrize(("stall", "rate"), [(5, 1e-3), (30, 1 / 200), (0.01, 1 / 3600)])
def test_no_interval_is_better_than_the_best(stall, rate):
    best = failures.best_interval(stall, rate)
    at = partial(failures.goodput, stall=stall, write=0, restart=60, rate=rate)
    assert all(at(best) > at(best * factor) for factor in (0.5, 0.99, 1.01, 2))
    assert best == pytest.approx((2 * stall / rate) ** 0.5, rel=0.2)  # Young's
    others = (simulated(best * factor, stall, 0, 60, rate) for factor in (0.2, 5))
    assert simulated(best, stall, 0, 60, rate) > max(others)


def test_nothing_is_done_where_a_restart_never_ends():
    assert failures.goodput(10, 1, 1, 60, 100.0) == 0.0


SAVING = failures.Saving(size=1000, tensors=3, stall=1.0, write=8.0)


def test_the_main_rank_collects_a_whole_checkpoint_and_parts_are_written_at_once():
    within, between = Link(100.0, 0.5), Link(10.0, 2.0)
    network = Network(within, between, per_node=2, is_gloo=True)
    saved = partial(failures.saved, SAVING, network=network, saves_parts=False)
    assert saved(4, sharded=None) == (1.0, 8.0)
    hops = 2 * 0.5 + 1 * 2
    assert saved(4, sharded=BLOCKS) == (pytest.approx(1 + 3 * hops + 750 / 10), 8.0)
    parts = partial(failures.saved, SAVING, network=network, sharded=BLOCKS, saves_parts=True)
    assert parts(1) == (1.0, 8.0)
    part = 30 / 90  # of four ranks, of which two write to one disk
    assert parts(4) == (pytest.approx(part), pytest.approx(8 * 2 * part))


def test_more_machines_fail_more_often_and_a_save_ends_before_the_next():
    plan = model.predictions(COSTS, {(100,): 1}, ALIKE, 4096)
    lines = failures.outcomes(
        plan,
        ALIKE,
        None,
        SAVING,
        saves_parts=False,
        node_mtbf=1e6,
        restart=60,
        every=lambda line: 1.0,
    )
    for line, there in zip(lines, plan, strict=True):
        assert line.machines == max(1, line.replicas // 8)
        assert line.between_failures == pytest.approx(1e6 / line.machines)
        assert line.every == max(there.seconds, 7)
        assert line.goodput <= line.best_goodput < 1
        assert line.seconds == there.seconds / line.best_goodput
    goodputs = [line.best_goodput for line in lines]
    assert goodputs == sorted(goodputs, reverse=True)


def test_it_stops_paying_at_the_first_doubling_that_saves_too_little():
    plans = [
        model.Prediction(2**power, 1, 0, 1, 0.0, 0.0, 0.0, seconds, 1.0)
        for power, seconds in enumerate((10.0, 6.0, 5.5, 1.0))
    ]
    here, gain = model.stops_paying(plans, 0.1)
    assert here.replicas == 2 and gain == pytest.approx(1 - 5.5 / 6)
    assert model.stops_paying(plans, 0.05) is None
    assert model.stops_paying(plans[:1], 0.1) is None


def test_buckets_are_those_of_torch():
    dist = pytest.importorskip("torch.distributed")
    sizes = [300_000, 10, 9_000_000, 200, 2_000_000, 700_000, 7_000_000, 5, 64]
    tensors = [torch.empty(count, device="meta") for count in sizes]
    tensors[3] = tensors[3].double()
    limits = [model.FIRST_BUCKET_BYTES, model.BUCKET_BYTES]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(sizes))
    expected = sorted(sum(tensors[i].nbytes for i in bucket) for bucket in buckets)
    gradients = [Gradient(t.nbytes, i / 10, str(t.dtype)) for i, t in enumerate(tensors)]
    filled = model.buckets_of(gradients)
    assert sorted(bucket.size for bucket in filled) == expected
    assert len(filled) >= 4
    assert model.FIRST_BUCKET_BYTES == dist._DEFAULT_FIRST_BUCKET_BYTES


def test_a_size_of_buckets_of_the_users_counts_for_the_first_one_too():
    gradients = [Gradient(2**20, i / 4) for i in range(4)]
    assert [bucket.size for bucket in model.buckets_of(gradients, 2**21)] == [2**21] * 2
    assert [bucket.size for bucket in model.buckets_of(gradients)] == [2**20, 3 * 2**20]


def test_a_bucket_is_ready_with_its_last_gradient():
    buckets = model.buckets_of([Gradient(2**20, 0.2), Gradient(8, 0.6), Gradient(8, 0.9)])
    assert buckets == (Bucket(2**20, 0.2), Bucket(16, 0.9))


def test_a_line_goes_through_points_that_are_on_one():
    line = model.line_through({2: 7.0, 8: 13.0, 32: 37.0})
    assert line.base == pytest.approx(5) and line.per_row == pytest.approx(1)
    assert model.line_through({4: 3.0}) == Line(3.0)


def test_neither_the_base_nor_a_row_of_a_line_is_below_zero():
    falling = model.line_through({2: 4.0, 8: 2.0})
    assert falling.per_row == 0 and 2 <= falling.base <= 4
    steep = model.line_through({2: 1.0, 8: 40.0})
    assert steep.base == 0 and steep.per_row > 0


# ---- the measurements


def measured(make=small.Small, data=None, *, steps=1, wanted=None, **settings):
    kept = TrainerSettings(**{"max_epochs": 1, "threads": 1, **settings})
    data = data or small.Rows()
    return measure(make(), data, kept, accelerator="cpu", seed=0, steps=steps, wanted=wanted)


def test_the_memory_of_a_known_network_is_exact():
    """3-8-1 with Adam: float32, and four batches of 4 rows and one of 2."""
    small_plan = measured(lambda: small.Small(small.Adam), small.Rows(rows=18))
    costs = small_plan.costs
    assert costs.parameters == costs.gradients == (3 * 8 + 8 + 8 + 1) * 4
    assert costs.optimizer == 2 * costs.parameters + 4 * 4  # two moments, a count a tensor
    assert costs.buffers == 0
    # x and y, the ReLU's output, which the second layer shares, and the error that is squared.
    assert costs.activations.at(4) == pytest.approx(4 * (3 + 1 + 8 + 1) * 4)
    assert costs.activations.at(2) == pytest.approx(2 * (3 + 1 + 8 + 1) * 4)
    assert sum(bucket.size for bucket in costs.buckets) == costs.gradients
    assert small_plan.steps == {(4,): 4, (2,): 1}


def test_gradients_arrive_from_the_last_layer_to_the_first():
    class Deep(small.Small):
        def __init__(self):
            super().__init__(partial(torch.optim.SGD, lr=1e-5))
            self.net = nn.Sequential(nn.Linear(3, 700), nn.Linear(700, 800), nn.Linear(800, 1))

    buckets = measured(Deep).costs.buckets
    assert [bucket.size for bucket in buckets] == [(800 + 1 + 700 * 800 + 800) * 4, 2800 * 4]
    assert 0 < buckets[0].ready <= buckets[1].ready <= 1


class Log(TorchDispatchMode):
    """What a step sends to other ranks: the operations, and the bytes of the larger tensor."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        for name in ("allgather_base", "reduce_scatter_base", "all_reduce", "allreduce"):
            if "c10d" in str(function) and name in str(function):
                tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
                self.sent.append((name.replace("_", ""), max(t.nbytes for t in tensors)))
        return function(*args, **(kwargs or {}))


def sent_in_a_step(strategy):
    with Log() as log:
        steps = small.Hooks(on_step_end=lambda trainer: log.sent.append(("end", 0)))
        settings = {"clip_norm": 1.0, "max_epochs": 1, "sanity_batches": 0, "log_every": 50}
        small.fitted(
            None, small.Rows(), make=Deep, strategy=strategy, callbacks=[steps], **settings
        )
    ends = [at for at, (name, _) in enumerate(log.sent) if name == "end"]
    return log.sent[ends[1] + 1 : ends[2]]


def test_a_plan_of_fsdp_has_the_collectives_of_a_real_step():
    strategy = FSDP(2, "cpu")
    costs = measured(Deep, wanted=strategy, clip_norm=1.0).costs
    assert costs.sharded is not None and costs.small_reduces == 1  # the scalar
    rest, *blocks = reversed(costs.sharded.units)
    assert [call.unit for call in costs.sharded.calls] == [2, 1, 0]
    again = measured(Deep, wanted=strategy, checkpoint_activations=True).costs.sharded
    assert [call.unit for call in again.calls] == [2, 1, 0]  # not those within the backward
    ends = [call.done for call in costs.sharded.calls]
    assert 0 < ends[2] <= ends[1] <= ends[0] <= 1
    sizes = [unit.gathered(2) for unit in blocks]
    gathers = sorted([rest.gathered(2), *sizes, *sizes])
    scatters = sorted([rest.reduced(2), *(unit.reduced(2) for unit in blocks)])
    real = forked.on(strategy, sent_in_a_step)
    assert sorted(size for name, size in real if name == "allgatherbase") == gathers
    assert sorted(size for name, size in real if name == "reducescatterbase") == scatters
    sums = [size for name, size in real if name == "allreduce"]
    assert sums[-2:] == [4, costs.sharded.norms]  # before these a look at the clock, now and then


def test_steps_are_counted_with_accumulation_and_limits():
    assert measured(accumulate=2).steps == {(4, 4): 2, (4,): 1}
    assert measured(limit_train_batches=3).steps == {(4,): 3}


def test_a_schedule_that_ends_with_training_does_not_end_the_measurements():
    def once(optimizer, total_steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1)

    task = partial(small.Small, scheduler=once)
    assert measured(task, small.Rows(rows=4), steps=4, scheduler_every="step").steps == {(4,): 1}


def test_measuring_leaves_the_random_numbers_as_they_were():
    task = small.Small(dropout=0.5)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    measured(lambda: task)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_with_a_weight_reduces_one_number_more():
    class Weighted(small.Small):
        def training_step(self, batch):
            return super().training_step(batch) | {"weight": 3}

    assert measured().costs.small_reduces == 0
    assert measured(Weighted).costs.small_reduces == 1


def test_a_stream_of_unknown_length_is_refused():
    class Streamed(DataModule):
        def train_dataset(self):
            return Stream([(torch.ones(3), torch.ones(()))] * 8)

    with pytest.raises(UserError, match=r"Streamed\.train_dataset\(\) is a stream, so the steps"):
        measured(data=Streamed(batch_size=4))


def test_several_optimizers_are_refused():
    class Two(small.Small):
        def configure_optimizer(self):
            return {"a": small.Adam(self.net[0].parameters()), "b": small.Adam([self.net[3].bias])}

        def training_step(self, batch, turn):
            return super().training_step(batch)

    with pytest.raises(UserError, match="with one optimizer, and Two has several: a, b; try"):
        measured(Two)


# ---- what is printed


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (25 * 2**40, "25 TiB")]
)
def test_bytes_have_their_unit(count, text):
    assert report.size(count) == text


DAYS = "11.6 days"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (5e-5, "50 us"),
        (0.25, "250 ms"),
        (2345.6, "2346 s"),
        (12345.6, "3.43 h"),
        (1e6, "11.6 days"),
    ],
)
def test_seconds_have_their_unit(seconds, text):
    assert report.time(seconds) == text


def test_an_assumption_that_can_not_be_is_one_line_before_torch_is_there(tmp_path):
    refused = {
        "plan.bandwith=1": "did you mean plan.bandwidth?",
        "plan.bandwidth=10Gbit": "plan.bandwidth=10Gbit is text; use a number",
        "plan.bandwidth=0": "plan.bandwidth=0.0 is out of range; use more than 0 bytes a second",
        "plan.latency=-1": "plan.latency=-1.0 is out of range; use 0 seconds or more",
        "plan.latency=nan": "plan.latency=nan is out of range; use 0 seconds or more",
        "plan.max_replicas=0": "plan.max_replicas=0 is out of range; use 1 to 1048576",
        "plan.least_gain=1": "plan.least_gain=1.0 is out of range",
        "plan.steps=0": "plan.steps=0 is out of range; use 1 or more",
        "plan.per_node=0": "plan.per_node=0 is out of range; use 1 or more replicas",
        "plan.node_bandwidth=-1": "plan.node_bandwidth=-1.0 is out of range; use more than 0 bytes",
        "plan.node_latency=nan": "plan.node_latency=nan is out of range; use 0 seconds or more",
        "plan.disk_bandwidth=0": "plan.disk_bandwidth=0.0 is out of range; use more than 0 bytes",
        "plan.node_mtbf_hours=0": "plan.node_mtbf_hours=0.0 is out of range; use more than 0 hours",
        "plan.restart_seconds=inf": "plan.restart_seconds=inf is out of range; use 0 seconds",
        "plan=3": "plan=3 is one value",
    }
    lines = [["recipe=boston", "mode=plan", override] for override in refused]
    tried, heavy = command.cold_attempts(lines, tmp_path)
    assert heavy == []
    for attempt, said in zip(tried, refused.values(), strict=True):
        assert (attempt.code, said in attempt.err) == (2, True), attempt
        assert attempt.err.count("\n") == 1 and attempt.files == []


def test_the_command_prints_a_table_and_leaves_nothing(tmp_path):
    kept = tmp_path / "kept"
    fast = ["recipe=boston", "mode=plan", "strategy=cpu", "plan.steps=2"]
    plain, *others = command.attempts(
        [
            [*fast, "plan.bandwidth=1e9", "plan.latency=50e-6"],
            [*fast, f"hydra.run.dir={kept}", "plan.max_replicas=2", "plan.node_mtbf_hours=100"],
            ["recipe=shapes", *fast[1:]],
            [*fast[:2], "strategy=fsdp", "strategy.shard=Linear", *fast[3:], "plan.per_node=2"],
            ["recipe=lenet", "mode=plan", "strategy=ddp", "strategy.bucket_cap_mb=0.01", *fast[3:]],
            [*fast[:2], "strategy=fsdp", "strategy.replicate=3"],
            [*fast[:2], "strategy=fsdp", "strategy.cpu_offload=true"],
        ],
        tmp_path,
    )
    assert plain.code == 0 and plain.err == "" and plain.files == []
    rows = [line.split() for line in plain.out.splitlines() if re.match(r" *\d+  ", line)]
    assert [int(row[0]) for row in rows] == [2**power for power in range(13)]
    assert [int(row[1]) for row in rows[:4]] == [128, 64, 32, 16]
    assert rows[8][2] == "128" and {row[3] for row in rows} == {"4"}
    assert "1e+09 bytes/s and 50 us" in plain.out
    assert re.search(r"stops paying past \d+ replicas?: .* \(a doubling has to save 10%", plain.out)
    written, trains_nothing, parts, buckets, thirds, offloaded = others
    assert written.code == 0
    assert json.loads((kept / "summary.json").read_text())["plan"][1]["replicas"] == 2
    assert (kept / "plan.txt").read_text() == written.out
    one, two = json.loads((kept / "summary.json").read_text())["failures"]
    assert one["machines"] == two["machines"] == 1 and one["every"] == 0.5  # seconds_between
    assert 0 < one["goodput"] < one["best_goodput"] < 1
    assert "a save    " in written.out and "one of each machine in 100 h" in written.out
    assert re.search(r"with failures the quickest is . replicas?, .*every_n_minutes=", written.out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    assert max(map(len, written.out.splitlines()[-3:-1])) <= 120
    assert trains_nothing.code == 2 and "returned None; return a data set" in trains_nothing.err
    assert "as strategy=fsdp shares them" in parts.out and "machines of 2 (plan.per" in parts.out
    assert re.search(r"gathers of \d blocks of .* and the rest, .*; by gloo: rings", parts.out)
    assert int(re.search(r"all-reduce of (\d+) buckets", buckets.out)[1]) > 1  # of 1 MiB it is one
    assert "strategy.replicate=3 divides none of the 2, 4, 8 … 4096 replicas" in thirds.err
    assert thirds.code == offloaded.code == 2 and "cpu_offload=true: mode=plan" in offloaded.err


def test_a_checkpoint_and_torchruns_ranks_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.ckpt").write_bytes(b"")
    words = ["recipe=boston", "mode=plan", "strategy=cpu"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="checkpoint=a.ckpt: mode=plan measures what no weights"):
        planned(composed([*words, "checkpoint=a.ckpt"]))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="in one process; start it without torchrun"):
        planned(composed(words))
