"""A plan as text: what was measured, what is assumed, and what follows from it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dpframe.plugin import counted, size, time
from dpframe_plan.failures import Outcome
from dpframe_plan.measure import Measured
from dpframe_plan.model import Costs, Prediction, stops_paying
from dpframe_plan.network import Network


class Plan(NamedTuple):
    title: str
    measured: Measured
    network: Network
    least_gain: float
    predictions: list[Prediction]
    outcomes: Sequence[Outcome] = ()  # of failures
    failing: Sequence[str] = ()  # what is assumed of failures

    def __str__(self) -> str:
        notes = [*_measured(self.measured), _memory(self.measured), *_assumed(self)]
        lines = [self.title, *notes, "", *_table(self.predictions), "", verdict(self)]
        if self.outcomes:
            lines += ["", *_saved(self), "", *_survived(self.outcomes), "", _quickest(self)]
        return "\n".join(lines)


def verdict(plan: Plan) -> str:
    """Where more replicas stop paying, with the rule that says so."""
    rule = f"a doubling has to save {plan.least_gain:.0%} of an epoch, plan.least_gain"
    best = min(plan.predictions, key=lambda each: each.seconds)
    quickest = f"the quickest is {counted(best.replicas, 'replica')}, {time(best.seconds)} an epoch"
    end = stops_paying(plan.predictions, plan.least_gain)
    if end is None:
        most = counted(plan.predictions[-1].replicas, "replica")
        return f"still pays at {most} ({rule}); {quickest}"
    here, gain = end
    does = f"save {gain:.0%}" if gain >= 0 else f"cost {-gain:.0%} more"
    return (
        f"stops paying past {counted(here.replicas, 'replica')}: {2 * here.replicas} would {does} "
        f"({rule}); {quickest}"
    )


def _measured(measured: Measured) -> list[str]:
    lines: list[str] = []
    for rows, times in measured.times.items():
        parts = ", ".join(f"{name} {time(value)}" for name, value in times._asdict().items())
        lines.append(f"{'' if lines else 'measured':<10}{counted(rows, 'row')}: {parts}")
    fit = f"a line through these is wrong by at most {measured.error:.0%} of a step"
    return [*lines, f"{'':<10}{fit}"]


def _memory(measured: Measured) -> str:
    costs = measured.costs
    parts = [
        f"parameters {size(costs.parameters)}",
        f"gradients {size(costs.gradients)}",
        f"optimizer {size(costs.optimizer)}",
        f"buffers {size(costs.buffers)}",
        f"activations and batch {size(costs.activations.base)} + "
        f"{size(costs.activations.per_row)} a row",
    ]
    if costs.copies_gradients:
        parts.append(f"buckets {size(costs.gradients)} from 2 replicas on")
    peak = f"; on the GPU at most {size(costs.peak)}, all replicas' rows" if costs.peak else ""
    return f"{'memory':<10}{' + '.join(parts)}{peak}"


def _assumed(plan: Plan) -> list[str]:
    costs, network = plan.measured.costs, plan.network
    lines = [
        f"{_shared(costs)}; {_library(network)}",
        f"{network.within.bandwidth:g} bytes/s and {time(network.within.latency)} from one replica "
        "to the next (plan.bandwidth, plan.latency)",
        f"machines of {network.per_node} (plan.per_node), {network.between.bandwidth:g} bytes/s "
        f"and {time(network.between.latency)} between them (plan.node_bandwidth, "
        "plan.node_latency)",
        "every replica computes as this one did alone; training steps only",
    ]
    return [f"{'' if number else 'assumed':<10}{line}" for number, line in enumerate(lines)]


def _shared(costs: Costs) -> str:
    if costs.sharded is None:
        sizes = ", ".join(size(bucket.size) for bucket in costs.buckets[:4])
        sizes += " …" * (len(costs.buckets) > 4)
        return f"all-reduce of {counted(len(costs.buckets), 'bucket')} of {sizes} behind backward"
    *blocks, rest = (size(unit.gathered(1)) for unit in costs.sharded.units)
    groups = costs.sharded.replicate
    within = f" within each of {groups} groups (strategy.replicate)" if groups > 1 else ""
    sizes = ", ".join(blocks[:4]) + " …" * (len(blocks) > 4)
    of = f"{counted(len(blocks), 'block')} of {sizes} and " if blocks else ""
    return f"gathers of {of}the rest, {rest}{within}"


def _library(network: Network) -> str:
    if network.is_gloo:
        return "by gloo: rings, and fully_shard waits for each"
    return "by NCCL: rings, or trees where they are quicker"


def _table(predictions: list[Prediction]) -> list[str]:
    columns = {
        "replicas": [str(each.replicas) for each in predictions],
        "rows a replica": [str(each.rows) for each in predictions],
        "idle": [str(each.idle) for each in predictions],
        "steps an epoch": [str(each.steps) for each in predictions],
        "memory a replica": [size(each.memory) for each in predictions],
        "sent a step": [size(each.moved) for each in predictions],
        "waits a step": [time(each.waits) for each in predictions],
        "an epoch": [time(each.seconds) for each in predictions],
        "speed-up": [f"{each.speed_up:.2f}" for each in predictions],
        "efficiency": [f"{each.efficiency:.0%}" for each in predictions],
    }
    return _aligned(columns)


def _aligned(columns: Mapping[str, list[str]]) -> list[str]:
    cells = [[name, *column] for name, column in columns.items()]
    widths = [max(map(len, column)) for column in cells]
    return ["  ".join(map(str.rjust, row, widths)) for row in zip(*cells, strict=True)]


def _saved(plan: Plan) -> list[str]:
    saving = plan.measured.saving
    assert saving is not None
    stall, write = time(saving.stall), time(saving.write)
    return [
        f"{'a save':<10}{size(saving.size)} on one replica: training stands still for {stall}, and "
        f"the file is whole {write} later",
        *(f"{'' if n else 'failures':<10}{line}" for n, line in enumerate(plan.failing)),
    ]


def _survived(outcomes: Sequence[Outcome]) -> list[str]:
    columns = {
        "replicas": [str(each.replicas) for each in outcomes],
        "machines": [str(each.machines) for each in outcomes],
        "a failure in": [time(each.between_failures) for each in outcomes],
        "stands still": [time(each.stall) for each in outcomes],
        "whole after": [time(each.write) for each in outcomes],
    }
    if outcomes[0].goodput is not None:
        columns["saved every"] = [time(each.every or 0) for each in outcomes]
        columns["goodput"] = [f"{each.goodput or 0:.1%}" for each in outcomes]
    columns["best every"] = [time(each.best) for each in outcomes]
    columns["best goodput"] = [f"{each.best_goodput:.1%}" for each in outcomes]
    columns["an epoch"] = ["never" if e.seconds is None else time(e.seconds) for e in outcomes]
    return _aligned(columns)


def _quickest(plan: Plan) -> str:
    done = [each for each in plan.outcomes if each.seconds is not None]
    if not done:
        return "with failures no number of replicas ever ends an epoch"
    best = min(done, key=lambda each: each.seconds or 0)
    return (
        f"with failures the quickest is {counted(best.replicas, 'replica')}, "
        f"{time(best.seconds or 0)} an epoch, and callbacks.checkpoint.every_n_minutes="
        f"{best.best / 60:.2g}"
    )
