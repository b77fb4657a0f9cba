"""What strategy=fsdp costs: fully_shard's gathers and scatters around blocks, and its memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpframe_plan.network import Network


class Weight(NamedTuple):
    """`rows` are what ranks divide: as many each, where the last ones may be padding."""

    rows: int
    kept: int  # bytes of a row
    gathered: int
    reduced: int  # of its gradient; 0: it is frozen

    def padded(self, ranks: int) -> int:
        return -(-self.rows // ranks) * ranks


class Unit(NamedTuple):
    """Weights that are gathered together."""

    weights: tuple[Weight, ...]

    def gathered(self, ranks: int) -> int:
        return sum(weight.padded(ranks) * weight.gathered for weight in self.weights)

    def reduced(self, ranks: int) -> int:
        return sum(weight.padded(ranks) * weight.reduced for weight in self.weights)

    def kept(self, ranks: int) -> int:
        """The bytes kept by the rank that has most."""
        return sum(weight.padded(ranks) // ranks * weight.kept for weight in self.weights)

    def trained(self, ranks: int) -> int:
        """The bytes of these that have a gradient."""
        return Unit(tuple(weight for weight in self.weights if weight.reduced)).kept(ranks)


class Call(NamedTuple):
    """The call of a block; its times are fractions of the forward and of the backward."""

    unit: int
    begins: float
    ends: float
    done: float  # its backward


@dataclass(frozen=True)
class Sharded:
    units: tuple[Unit, ...]  # the blocks, and what is in none
    calls: tuple[Call, ...]
    replicate: int = 1  # groups of ranks that each have all weights
    blocks_again: bool = True  # whether a backward gathers them
    rest_again: bool = False
    accumulates: bool = False
    norms: int = 0  # bytes that clipping adds up
    buffers: int = 0  # how many tensors

    def ranks(self, replicas: int) -> int:
        """How many ranks share one copy of the weights."""
        return max(1, replicas // self.replicate)

    def part_of(self, replicas: int) -> float:
        """The fraction of the trained weights that one rank has."""
        ranks = self.ranks(replicas)
        whole = sum(unit.trained(1) for unit in self.units)
        return sum(unit.trained(ranks) for unit in self.units) / whole if whole else 1.0

    # ---- bytes

    def memory(self, optimizer: int, replicas: int) -> float:
        """At most: the parts, and while a block's backward runs its weights and gradients, the
        gather of the next one and the scatter of the one before."""
        ranks = self.ranks(replicas)
        kept = sum(unit.kept(ranks) + unit.trained(ranks) for unit in self.units)
        *blocks, rest = ((unit.gathered(ranks), unit.reduced(ranks)) for unit in self.units)
        whole = sum(rest)
        if not self.blocks_again:
            whole += sum(weights for weights, _ in blocks)
            blocks = [(0, gradients) for _, gradients in blocks]
        if self.accumulates:  # they stay until the last batch
            whole += sum(gradients for _, gradients in blocks)
        order = [(0, 0), *(blocks[call.unit] for call in reversed(self.calls)), (0, 0)]
        around = zip(order, order[1:], order[2:], strict=False)
        whole += max(
            (before[1] + sum(here) + after[0] for before, here, after in around), default=0
        )
        return kept + optimizer * self.part_of(replicas) + whole

    def moved(self, replicas: int, network: Network) -> float:
        """Bytes of weights and gradients that a rank sends."""
        ranks = self.ranks(replicas)
        ring, across = network.ring(ranks), network.ring(replicas // ranks, ranks)
        sent = sum(
            ring.part(self.units[call.unit].gathered(ranks)) * (1 + self.blocks_again)
            for call in self.calls
        )
        sent += ring.part(self.units[-1].gathered(ranks)) * (1 + self.rest_again)
        for unit in self.units:
            sent += ring.scattered(unit.reduced(ranks))
            sent += 2 * across.part(unit.reduced(ranks) / ranks)
        return sent

    # ---- seconds

    def waits(self, times: Sequence[tuple[float, float]], replicas: int, network: Network) -> float:
        """Seconds that a step waits for weights and gradients; `times` are those of its batches."""
        ranks = self.ranks(replicas)
        ring, across = network.ring(ranks), network.ring(replicas // ranks, ranks)
        gathers = [ring.gather(unit.gathered(ranks)) for unit in self.units]
        scatters = [ring.scatter(unit.reduced(ranks)) for unit in self.units]
        sums = [across.all_reduce(unit.reduced(ranks) / ranks) for unit in self.units]
        waits = ring.all_reduce(self.norms) if self.norms else 0.0
        for number, (forward, backward) in enumerate(times, 1):
            is_last = number == len(times)
            if network.is_gloo:  # each collective is waited for
                waits += sum(gathers[c.unit] for c in self.calls) * (1 + self.blocks_again)
                waits += gathers[-1] * (1 + self.rest_again)
                waits += (sum(scatters) + sum(sums)) * is_last
            else:
                waits += self._forward(gathers, forward) - forward
                waits += self._backward(gathers, scatters, sums, backward, is_last) - backward
        return waits

    def _forward(self, gathers: list[float], seconds: float) -> float:
        """A gather runs beside the call before; what it fills is free once the one before that has
        copied its weights."""
        now = wire = gathers[-1]
        begun: list[float] = []
        before = 0.0
        for number, call in enumerate(self.calls):
            now += (call.begins - before) * seconds
            wire = max([wire, *begun[: number - 1][-1:]]) + gathers[call.unit]
            now = max(now, wire)
            begun.append(now)
            now += (call.ends - call.begins) * seconds
            before = call.ends
        return now + (1 - before) * seconds

    def _backward(
        self,
        gathers: list[float],
        scatters: list[float],
        sums: list[float],
        seconds: float,
        is_last: bool,
    ) -> float:
        """A block's gather begins with the backward of the one before it, then comes that one's
        scatter: they are on one wire. A second scatter waits for the first; sums over groups have
        a wire of their own."""
        now = wire = gathers[-1] * self.rest_again
        scattered = summed = before = 0.0
        order = list(reversed(self.calls))
        gathered = wire
        if order and self.blocks_again:
            gathered = wire = wire + gathers[order[0].unit]

        def reduce(unit: int) -> None:
            nonlocal now, wire, scattered, summed
            now = max(now, scattered)
            scattered = wire = max(wire, now) + scatters[unit]
            summed = max(summed, scattered) + sums[unit]

        for call, after in zip(order, [*order[1:], None], strict=True):
            now = max(now, gathered)
            if after is not None and self.blocks_again:
                gathered = wire = max(wire, now) + gathers[after.unit]
            now += max(0.0, call.done - before) * seconds
            before = max(before, call.done)
            if is_last:
                reduce(call.unit)
        now += (1 - before) * seconds
        if is_last:
            reduce(len(self.units) - 1)
        return max(now, scattered, summed)
