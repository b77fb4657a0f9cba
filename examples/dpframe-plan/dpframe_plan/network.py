"""The links between replicas, and what collectives over them take."""

from math import ceil, log2
from typing import NamedTuple


class Link(NamedTuple):
    bandwidth: float  # bytes a second
    latency: float  # seconds


class Ring(NamedTuple):
    """Replicas that each send to the next one, in machine after machine."""

    replicas: int
    machines: int
    within: Link
    between: Link  # the part of a machine's link that this ring has
    is_gloo: bool

    def part(self, size: float) -> float:
        """The bytes that each replica sends while all parts go round once."""
        return (self.replicas - 1) / self.replicas * size

    def gather(self, size: float) -> float:
        """Seconds until every replica has all parts, which are `size` bytes together."""
        crossings = self.machines - 1
        hops = self.replicas - 1 - crossings
        latency = hops * self.within.latency + crossings * self.between.latency
        return latency + self.part(size) / self.bandwidth

    def scatter(self, size: float) -> float:
        """Seconds until each has the sum of its part. torch's gloo makes an all-reduce of it."""
        return (2 if self.is_gloo else 1) * self.gather(size)

    def scattered(self, size: float) -> float:
        """The bytes that each replica sends for that."""
        return (2 if self.is_gloo else 1) * self.part(size)

    def all_reduce(self, size: float) -> float:
        """A scatter and a gather; by NCCL a tree where that is quicker: its hops are fewer."""
        ring = 2 * self.gather(size)
        if self.is_gloo or self.replicas == 1:
            return ring
        chain = ceil(self.replicas / self.machines) - 1
        hops = chain * self.within.latency + log2(self.machines) * self.between.latency
        return min(ring, 2 * (hops + size / self.bandwidth))

    def broadcast(self, size: float, tensors: int = 1) -> float:
        """Down a tree: between machines first."""
        here = ceil(self.replicas / self.machines)
        return sum(
            ceil(log2(count)) * (tensors * link.latency + size / link.bandwidth)
            for count, link in ((self.machines, self.between), (here, self.within))
        )

    @property
    def bandwidth(self) -> float:
        """The slowest hop's: all others wait for it."""
        used = [self.within] * (self.replicas > self.machines) + [self.between] * (
            self.machines > 1
        )
        return min((link.bandwidth for link in used), default=self.within.bandwidth)


class Network(NamedTuple):
    """Machines of `per_node` replicas each. `between` is what one machine sends to the next."""

    within: Link
    between: Link
    per_node: int
    is_gloo: bool  # else NCCL

    def machines(self, replicas: int) -> int:
        return ceil(replicas / self.per_node)

    def ring(self, replicas: int, stride: int = 1) -> Ring:
        """Every `stride`-th replica; the rings of the others run at the same time."""
        here = max(1, self.per_node // stride)
        bandwidth = self.between.bandwidth / min(stride, self.per_node)
        return Ring(
            replicas,
            ceil(replicas / here),
            self.within,
            self.between._replace(bandwidth=bandwidth),
            self.is_gloo,
        )
