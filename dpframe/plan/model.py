"""The arithmetic of a plan: shares, ring all-reduce behind backward, memory, an epoch's seconds.

And a plan as text: what was measured, what is assumed, and a line for each number of replicas."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2
from typing import NamedTuple

from dpframe.data import split

FIRST_BUCKET_BYTES = 2**20  # as DistributedDataParallel makes them
BUCKET_BYTES = 25 * 2**20

Steps = Mapping[tuple[int, ...], int]
"""The steps of an epoch: how many there are of each list of global batches."""


class Line(NamedTuple):
    """What costs `base` and `per_row` more with each row."""

    base: float
    per_row: float = 0.0

    def at(self, rows: int) -> float:
        return self.base + self.per_row * rows


class Gradient(NamedTuple):
    size: int  # bytes
    ready: float  # the part of backward after which it is there
    kind: str = ""  # only gradients of one kind share a bucket


class Bucket(NamedTuple):
    size: int
    ready: float


class Link(NamedTuple):
    bandwidth: float  # bytes a second, from each replica to the next
    latency: float  # seconds


@dataclass(frozen=True)
class Costs:
    """Of one replica, by the rows of its share; in seconds and bytes."""

    read: Line
    forward: Line
    backward: Line
    update: float
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: Line
    buckets: tuple[Bucket, ...]
    workers: int = 0  # that read while others compute
    copies_gradients: bool = False  # into the buckets, which then are memory of their own
    small_reduces: int = 0  # all-reduces of a single number, each step
    peak: int | None = None  # bytes, as a CUDA device counted them on a step of a whole batch


class Prediction(NamedTuple):
    replicas: int
    rows: int  # of a whole batch, on the replica that has most
    idle: int  # replicas without a row of it
    steps: int  # an epoch
    memory: float  # bytes a replica
    moved: float  # bytes that a replica sends, each step
    waits: float  # seconds of such a step that are spent on the link, and nothing else
    seconds: float  # an epoch
    speed_up: float

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.replicas


def predictions(costs: Costs, steps: Steps, link: Link, most: int) -> list[Prediction]:
    """For 1, 2, 4 … `most` replicas; the global batch is the same for all."""
    whole = max(max(batches) for batches in steps)
    alone = epoch_seconds(costs, steps, 1, link)
    results = []
    for replicas in (2**power for power in range(most.bit_length())):
        rows, idle = share_of(whole, replicas)
        seconds = epoch_seconds(costs, steps, replicas, link)
        results.append(
            Prediction(
                replicas=replicas,
                rows=rows,
                idle=idle,
                steps=sum(steps.values()),
                memory=memory(costs, rows, replicas),
                moved=ring_bytes(sum(bucket.size for bucket in costs.buckets), replicas),
                waits=link_seconds(costs, costs.backward.at(rows), 1, replicas, link),
                seconds=seconds,
                speed_up=alone / seconds,
            )
        )
    return results


def share_of(batch: int, replicas: int) -> tuple[int, int]:
    """The rows of the largest share, and how many replicas have none."""
    shares = split(range(batch), replicas)
    return len(shares[0]), sum(not share for share in shares)


def stops_paying(plan: Sequence[Prediction], least_gain: float) -> tuple[Prediction, float] | None:
    """The first whose doubling saves less than `least_gain` of an epoch, and what it saves."""
    for here, doubled in pairwise(plan):
        gain = 1 - doubled.seconds / here.seconds
        if gain < least_gain:
            return here, gain
    return None


# ---- time


def epoch_seconds(costs: Costs, steps: Steps, replicas: int, link: Link) -> float:
    """Of training alone: the slowest replica's, for which the others wait."""
    return sum(
        count * step_seconds(costs, batches, replicas, link) for batches, count in steps.items()
    )


def step_seconds(costs: Costs, batches: Iterable[int], replicas: int, link: Link) -> float:
    """One optimizer update of several global batches, the last of which shares the gradients."""
    shares = [share_of(batch, replicas)[0] for batch in batches]
    read = sum(costs.read.at(rows) for rows in shares)
    busy = sum(costs.forward.at(rows) + costs.backward.at(rows) for rows in shares) + costs.update
    busy += link_seconds(costs, costs.backward.at(shares[-1]), len(shares), replicas, link)
    return max(busy, read / costs.workers) if costs.workers else busy + read


def link_seconds(costs: Costs, backward: float, batches: int, replicas: int, link: Link) -> float:
    """What a step waits for others: gradients, each forward's buffers, single numbers."""
    waits = waited(costs.buckets, backward, replicas, link)
    if costs.buffers:  # from the main replica to all, down a tree
        hops = ceil(log2(replicas))
        waits += batches * hops * (link.latency + costs.buffers / link.bandwidth)
    return waits + costs.small_reduces * ring_seconds(8, replicas, link)


def waited(buckets: Iterable[Bucket], backward: float, replicas: int, link: Link) -> float:
    """What is left of the all-reduces when backward is over: one after the other, each as soon as
    its bucket is full."""
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready * backward) + ring_seconds(bucket.size, replicas, link)
    return max(0.0, end - backward)


def ring_seconds(size: float, replicas: int, link: Link) -> float:
    """Of one all-reduce: N - 1 hops that add up, N - 1 that hand round, each of size / N."""
    hops = 2 * (replicas - 1)
    return hops * link.latency + ring_bytes(size, replicas) / link.bandwidth


def ring_bytes(size: float, replicas: int) -> float:
    return 2 * (replicas - 1) / replicas * size


def buckets_of(gradients: Iterable[Gradient]) -> tuple[Bucket, ...]:
    """Filled in the order in which gradients arrive; the one that overflows is the last in."""
    full: list[Bucket] = []
    filling: dict[str, Bucket] = {}
    closed: Counter[str] = Counter()
    for size, ready, kind in gradients:
        before = filling.pop(kind, Bucket(0, 0.0))
        bucket = Bucket(before.size + size, max(before.ready, ready))
        if bucket.size >= (BUCKET_BYTES if closed[kind] else FIRST_BUCKET_BYTES):
            closed[kind] += 1
            full.append(bucket)
        else:
            filling[kind] = bucket
    return (*full, *filling.values())


# ---- memory


def memory(costs: Costs, rows: int, replicas: int) -> float:
    """At most: all of it at once."""
    buckets = costs.gradients if costs.copies_gradients and replicas > 1 else 0
    lasting = costs.parameters + costs.gradients + costs.optimizer + costs.buffers
    return lasting + buckets + costs.activations.at(rows)


# ---- measurements


def line_through(points: Mapping[int, float]) -> Line:
    """The least relative errors; neither the base nor a row costs less than nothing."""
    weights = {rows: value**-2 if value else 1.0 for rows, value in points.items()}
    total = sum(weights.values())
    mean_rows = sum(weights[rows] * rows for rows in points) / total
    mean = sum(weights[rows] * value for rows, value in points.items()) / total
    spread = sum(weights[rows] * (rows - mean_rows) ** 2 for rows in points)
    if spread == 0:
        return Line(mean)
    both = sum(weights[r] * (r - mean_rows) * (value - mean) for r, value in points.items())
    slope = both / spread
    if slope < 0:
        return Line(mean)
    if mean < slope * mean_rows:
        squares = sum(weights[rows] * rows**2 for rows in points)
        return Line(0.0, sum(weights[r] * r * value for r, value in points.items()) / squares)
    return Line(mean - slope * mean_rows, slope)
