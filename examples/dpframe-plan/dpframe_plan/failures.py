"""What failures cost: the useful part of the time, at a save interval and at the best one.

A machine fails at a rate; of several, any one that fails takes the job back to its last checkpoint
that is whole. Between the ends of two saves a job makes `interval` seconds of training and stands
still for the `stall`; the rest of the save, `write` seconds, runs beside training. What is lost
is what was trained since the last save that is whole, and `restart` seconds, which may fail, too.
Failures that come independently of each other make of one interval, in the mean,

    exp(rate (restart + write)) (exp(rate (interval + stall)) - 1) / rate

seconds: Daly's formula of 2006, and the write beside training counts as a part of the restart.
"""

from collections.abc import Callable, Sequence
from math import exp, expm1
from typing import NamedTuple

from dpframe_plan.model import Prediction
from dpframe_plan.network import Network
from dpframe_plan.sharded import Sharded

MOST = 500.0  # of an exponent: nothing is ever done
HALVINGS = 60


class Saving(NamedTuple):
    """One save: bytes, how many tensors, seconds that training stands still, and seconds after that
    until the file is whole."""

    size: int
    tensors: int
    stall: float
    write: float


class Outcome(NamedTuple):
    replicas: int
    machines: int
    between_failures: float  # seconds
    stall: float
    write: float
    every: float | None  # seconds between saves as the config has them
    goodput: float | None
    best: float
    best_goodput: float
    seconds: float | None  # an epoch, at the best; None: it never ends


def outcomes(
    plan: Sequence[Prediction],
    network: Network,
    sharded: Sharded | None,
    saving: Saving,
    *,
    saves_parts: bool,
    node_mtbf: float,
    restart: float,
    every: Callable[[Prediction], float | None],
) -> list[Outcome]:
    """`every` tells the seconds between two saves."""
    results = []
    for line in plan:
        machines = network.machines(line.replicas)
        stall, write = saved(saving, line.replicas, network, sharded, saves_parts=saves_parts)
        rate = machines / node_mtbf
        here = every(line)
        least = max(line.seconds / line.steps, write - stall)
        if here is not None:
            here = max(here, least)
        best = max(best_interval(stall, rate), least)
        at_best = goodput(best, stall, write, restart, rate)
        results.append(
            Outcome(
                replicas=line.replicas,
                machines=machines,
                between_failures=1 / rate,
                stall=stall,
                write=write,
                every=here,
                goodput=None if here is None else goodput(here, stall, write, restart, rate),
                best=best,
                best_goodput=at_best,
                seconds=line.seconds / at_best if at_best else None,
            )
        )
    return results


def saved(
    saving: Saving,
    replicas: int,
    network: Network,
    sharded: Sharded | None,
    *,
    saves_parts: bool,
) -> tuple[float, float]:
    """Seconds that training stands still, and after that until the checkpoint is whole."""
    if sharded is None:
        return saving.stall, saving.write
    ranks = sharded.ranks(replicas)
    if saves_parts:  # each rank of one group, to its machine's disk
        part = sharded.part_of(replicas)
        return saving.stall * part, saving.write * min(1.0, part * min(ranks, network.per_node))
    ring = network.ring(ranks)  # the main rank collects it, tensor by tensor
    gather = ring.gather(saving.size) + max(0, saving.tensors - 1) * ring.gather(0)
    return saving.stall + gather, saving.write


def goodput(interval: float, stall: float, write: float, restart: float, rate: float) -> float:
    """The useful part of the time."""
    if rate * (interval + stall + restart + write) > MOST:
        return 0.0
    return rate * interval / (exp(rate * (restart + write)) * expm1(rate * (interval + stall)))


def best_interval(stall: float, rate: float) -> float:
    """Where the goodput is largest: 1 - rate x = exp(-rate (x + stall)). That is about Young's
    sqrt(2 stall / rate); neither the restart nor the write changes it."""
    low, high = 0.0, 1 / rate
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if 1 - rate * middle > exp(-rate * (middle + stall)):
            low = middle
        else:
            high = middle
    return high
