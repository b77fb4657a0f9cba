"""The arithmetic of a plan against numbers by hand, and of failures against drawn ones."""

import random
from dataclasses import replace
from functools import partial
from math import inf

import pytest
import torch
from dpframe_plan import failures, model
from dpframe_plan.model import Bucket, Costs, Gradient, Line
from dpframe_plan.network import Link, Network, Ring
from dpframe_plan.sharded import Call, Sharded, Unit, Weight

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
