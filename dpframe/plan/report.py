"""A plan as text: what was measured, what is assumed, and a line for each number of replicas."""

from collections.abc import Sequence
from typing import NamedTuple

from dpframe.plan.measure import Measured
from dpframe.plan.model import Line, Link, Prediction, stops_paying

COLUMNS = (
    "replicas",
    "rows a replica",
    "idle",
    "steps an epoch",
    "memory a replica",
    "sent a step",
    "waits a step",
    "an epoch",
    "speed-up",
    "efficiency",
)


class Plan(NamedTuple):
    title: str
    measured: Measured
    link: Link
    least_gain: float
    predictions: list[Prediction]

    def __str__(self) -> str:
        parts = [self.title, _measured(self.measured), _memory(self), _assumed(self)]
        return "\n".join([*parts, "", *_table(self.predictions), "", verdict(self)])


def verdict(plan: Plan) -> str:
    """Where more replicas stop paying, with the rule that says so."""
    found = plan.predictions
    rule = f"a doubling has to save {plan.least_gain:.0%} of an epoch, plan.least_gain"
    best = min(found, key=lambda each: each.seconds)
    quickest = f"the quickest is {_replicas(best.replicas)}, {time(best.seconds)} an epoch"
    end = stops_paying(found, plan.least_gain)
    if end is None:
        return f"still pays at {_replicas(found[-1].replicas)} ({rule}); {quickest}"
    here, gain = end
    does = f"save {gain:.0%}" if gain >= 0 else f"cost {-gain:.0%} more"
    return (
        f"stops paying past {_replicas(here.replicas)}: {2 * here.replicas} would {does} ({rule}); "
        f"{quickest}"
    )


def _measured(measured: Measured) -> str:
    lines: list[str] = []
    for rows, each in measured.times.items():
        parts = ", ".join(f"{name} {time(value)}" for name, value in each._asdict().items())
        lines.append(f"{'measured' if not lines else '':<10}{_counted(rows, 'row')}: {parts}")
    lines.append(
        f"{'':<10}a line through these is wrong by at most {measured.error:.0%} of a step; half of "
        f"the steps took within {measured.spread:.0%} of their median"
    )
    return "\n".join(lines)


def _memory(plan: Plan) -> str:
    costs = plan.measured.costs
    parts = [
        f"parameters {size(costs.parameters)}",
        f"gradients {size(costs.gradients)}",
        f"optimiser {size(costs.optimizer)}",
        f"buffers {size(costs.buffers)}",
        f"activations and batch {_line(costs.activations)}",
    ]
    if costs.copies_gradients:
        parts.append(f"buckets {size(costs.gradients)} from 2 replicas on")
    peak = f"; on the card at most {size(costs.peak)}, all replicas' rows" if costs.peak else ""
    return f"{'memory':<10}{' + '.join(parts)}{peak}"


def _assumed(plan: Plan) -> str:
    costs, link = plan.measured.costs, plan.link
    buckets = f"{_counted(len(costs.buckets), 'bucket')} of {_sizes(costs.buckets)}"
    return (
        f"{'assumed':<10}ring all-reduce of {buckets} behind backward; "
        f"{link.bandwidth:g} bytes/s and "
        f"{time(link.latency)} from one replica to the next (plan.bandwidth, plan.latency)\n"
        f"{'':<10}every replica computes as this one did alone; training steps only"
    )


def _sizes(buckets: Sequence) -> str:
    shown = ", ".join(size(bucket.size) for bucket in buckets[:4])
    return shown + (" …" if len(buckets) > 4 else "")


def _table(predictions: list[Prediction]) -> list[str]:
    rows = [COLUMNS, *map(_cells, predictions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, cells, widths)) for cells in rows]


def _cells(each: Prediction) -> tuple[str, ...]:
    return (
        str(each.replicas),
        str(each.rows),
        str(each.idle),
        str(each.steps),
        size(each.memory),
        size(each.moved),
        time(each.waits),
        time(each.seconds),
        f"{each.speed_up:.2f}",
        f"{each.efficiency:.0%}",
    )


def _line(line: Line) -> str:
    return f"{size(line.base)} + {size(line.per_row)} a row"


def size(count: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:.3g} {units[0]}"


def time(seconds: float) -> str:
    if seconds == 0:
        return "0"
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds / 1e-6:.3g} us"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _replicas(count: int) -> str:
    return _counted(count, "replica")
