"""The arithmetic of a plan: shares, collectives behind backward, memory, an epoch's seconds."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dpframe.plugin import split
from dpframe_plan.network import Network, Ring
from dpframe_plan.sharded import Sharded

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


@dataclass(frozen=True)
class Costs:
    """The costs of one replica by the rows of its share, in seconds and bytes."""

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
    sharded: Sharded | None = None  # where each replica keeps a part of the weights
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


def predictions(costs: Costs, steps: Steps, network: Network, most: int) -> list[Prediction]:
    """For 1, 2, 4 … `most` replicas, as far as their groups divide them; the global batch is the
    same for all."""
    whole = max(max(batches) for batches in steps)
    alone = epoch_seconds(costs, steps, 1, network)
    groups = costs.sharded.replicate if costs.sharded else 1
    results = []
    for replicas in (2**power for power in range(most.bit_length())):
        if replicas > 1 and replicas % groups:
            continue
        rows, idle = share_of(whole, replicas)
        seconds = epoch_seconds(costs, steps, replicas, network)
        times = costs.forward.at(rows), costs.backward.at(rows)
        results.append(
            Prediction(
                replicas=replicas,
                rows=rows,
                idle=idle,
                steps=sum(steps.values()),
                memory=memory(costs, rows, replicas),
                moved=moved(costs, replicas, network),
                waits=link_seconds(costs, [times], replicas, network),
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


def epoch_seconds(costs: Costs, steps: Steps, replicas: int, network: Network) -> float:
    """Seconds of an epoch's training, by the slowest replica, for which the others wait."""
    return sum(
        count * step_seconds(costs, batches, replicas, network) for batches, count in steps.items()
    )


def step_seconds(costs: Costs, batches: Iterable[int], replicas: int, network: Network) -> float:
    """Seconds of an optimizer update over several global batches; the last shares the gradients."""
    shares = [share_of(batch, replicas)[0] for batch in batches]
    read = sum(costs.read.at(rows) for rows in shares)
    times = [(costs.forward.at(rows), costs.backward.at(rows)) for rows in shares]
    part = costs.sharded.part_of(replicas) if costs.sharded else 1.0
    busy = sum(map(sum, times)) + costs.update * part
    busy += link_seconds(costs, times, replicas, network)
    return max(busy, read / costs.workers) if costs.workers else busy + read


def link_seconds(
    costs: Costs, times: Sequence[tuple[float, float]], replicas: int, network: Network
) -> float:
    """What a step waits for others: weights, gradients, each forward's buffers, single numbers.
    `times` are the forward and backward of each of its batches."""
    ring = network.ring(replicas)
    if costs.sharded:
        waits = costs.sharded.waits(times, replicas, network)
    else:
        waits = waited(costs.buckets, times[-1][1], ring)
    if costs.buffers:
        tensors = costs.sharded.buffers if costs.sharded else 1  # ddp sends them as one
        waits += len(times) * ring.broadcast(costs.buffers, tensors)
    return waits + costs.small_reduces * ring.all_reduce(8)


def waited(buckets: Iterable[Bucket], backward: float, ring: Ring) -> float:
    """What is left of the all-reduces when backward is over: one after the other, each as soon as
    its bucket is full."""
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready * backward) + ring.all_reduce(bucket.size)
    return max(0.0, end - backward)


def moved(costs: Costs, replicas: int, network: Network) -> float:
    """The bytes of weights and gradients that a replica sends in a step of one batch."""
    if costs.sharded:
        return costs.sharded.moved(replicas, network)
    return 2 * network.ring(replicas).part(sum(bucket.size for bucket in costs.buckets))


def buckets_of(gradients: Iterable[Gradient], cap: int | None = None) -> tuple[Bucket, ...]:
    """Filled in the order in which gradients arrive; the one that overflows is the last in. `cap`
    is a size in bytes of the user's, which counts for the first one, too."""
    first, others = (FIRST_BUCKET_BYTES, BUCKET_BYTES) if cap is None else (cap, cap)
    full: list[Bucket] = []
    filling: dict[str, Bucket] = {}
    closed: Counter[str] = Counter()
    for size, ready, kind in gradients:
        before = filling.pop(kind, Bucket(0, 0.0))
        bucket = Bucket(before.size + size, max(before.ready, ready))
        if bucket.size >= (others if closed[kind] else first):
            closed[kind] += 1
            full.append(bucket)
        else:
            filling[kind] = bucket
    return (*full, *filling.values())


# ---- memory


def memory(costs: Costs, rows: int, replicas: int) -> float:
    """An upper bound of bytes: everything at once."""
    if costs.sharded:
        lasting = costs.sharded.memory(costs.optimizer, replicas)
        return lasting + costs.buffers + costs.activations.at(rows)
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
