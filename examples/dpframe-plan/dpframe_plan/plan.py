"""The plan of a composed job: it is measured, and computed for each number of replicas."""

from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from dpframe import UserError
from dpframe.plugin import (
    HOUR,
    Composed,
    callbacks_of,
    data_of,
    seeding,
    strategy_of,
    task_of,
    time,
)
from dpframe_plan.failures import outcomes
from dpframe_plan.measure import measure
from dpframe_plan.model import Prediction, predictions
from dpframe_plan.network import Link, Network
from dpframe_plan.report import Plan
from dpframe_plan.settings import Settings


def plan_of(job: Composed, asked: Settings) -> Plan:
    settings = job.settings
    wanted = strategy_of(job)()
    if wanted.sharding.cuts:
        _refuse_unknown(wanted, asked.max_replicas)
    bucket = job.config["strategy"].get("bucket_cap_mb")
    seeding.seed_everything(settings.seed)
    data = data_of(job)()
    measured = measure(
        task_of(job)(),
        data,
        settings.trainer,
        accelerator=settings.trainer.accelerator if wanted.uses_gpus else "cpu",
        seed=settings.seed,
        steps=asked.steps,
        wanted=wanted,
        copies_gradients=not job.config["strategy"].get("gradient_as_bucket_view", True),
        bucket_bytes=None if bucket is None else int(bucket * 2**20),
        saves_in=None if asked.node_mtbf_hours is None else _existing(Path(job.run_dir)),
    )
    network = _network(asked, is_gloo=measured.device == "cpu")
    lines = predictions(measured.costs, measured.steps, network, asked.max_replicas)
    threads = torch.get_num_threads()
    cores = f" with {threads} thread{'s' if threads > 1 else ''}" * (measured.device == "cpu")
    name = "fsdp" if wanted.sharding.cuts else "ddp"
    title = (
        f"plan {settings.recipe}: batches of {data.batch_size} rows over N replicas, as strategy="
        f"{name} shares them; measured on {measured.device}{cores}, trainer.precision="
        f"{settings.trainer.precision}"
    )
    plan = Plan(title, measured, network, asked.least_gain, lines)
    if asked.node_mtbf_hours is None:
        return plan
    return _with_failures(plan, job, asked, asked.node_mtbf_hours)


def _with_failures(plan: Plan, job: Composed, asked: Settings, mtbf_hours: float) -> Plan:
    saving = plan.measured.saving
    assert saving is not None
    restart = asked.restart_seconds
    if asked.disk_bandwidth is not None:
        saving = saving._replace(write=saving.size / asked.disk_bandwidth)
    saves_parts = job.config["strategy"].get("checkpoints", "whole") == "sharded"
    lines = outcomes(
        plan.predictions,
        plan.network,
        plan.measured.costs.sharded,
        saving,
        saves_parts=saves_parts,
        node_mtbf=mtbf_hours * HOUR,
        restart=restart,
        every=partial(_seconds_between, _checkpoints(job)),
    )
    failing = [
        f"one of each machine in {mtbf_hours:g} h (plan.node_mtbf_hours); {time(restart)} later "
        "(plan.restart_seconds) all go on",
        "from the last save that is whole; "
        + ("every rank saves its parts" if saves_parts else "the main rank saves all"),
    ]
    measured = plan.measured._replace(saving=saving)
    return plan._replace(measured=measured, outcomes=lines, failing=failing)


def _checkpoints(job: Composed) -> Any:
    """The callback that keeps them; None where none does."""
    return callbacks_of(job).get("checkpoint", lambda: None)()


def _seconds_between(callback: Any, line: Prediction) -> float | None:
    """Two saves of a Checkpoint; None where there are none at all."""
    step = line.seconds / line.steps
    times = [
        getattr(callback, "every_seconds", None),
        step * (getattr(callback, "every_n_steps", None) or inf),
        line.seconds * (getattr(callback, "every_n_epochs", None) or inf),
    ]
    shortest = min(each for each in times if each is not None)
    return None if shortest == inf else max(shortest, callback.seconds_between)


def _existing(path: Path) -> Path:
    """The directory on its way that is there, and so has its disk."""
    return next(each for each in (path, *path.absolute().parents) if each.is_dir())


def _refuse_unknown(fsdp: Any, most: int) -> None:
    if fsdp.sharding.cpu_offload:
        raise UserError(
            "strategy.cpu_offload=true: mode=plan does not know what it costs; leave it out"
        )
    if fsdp.replicate > most or fsdp.replicate & (fsdp.replicate - 1):
        raise UserError(
            f"strategy.replicate={fsdp.replicate} divides none of the 2, 4, 8 … {most} replicas of "
            "mode=plan; set it to a power of two, up to plan.max_replicas"
        )


def _network(plan: Settings, *, is_gloo: bool) -> Network:
    def either(value: float | None, default: float) -> float:
        return default if value is None else value

    between = Link(
        either(plan.node_bandwidth, plan.bandwidth), either(plan.node_latency, plan.latency)
    )
    return Network(Link(plan.bandwidth, plan.latency), between, plan.per_node, is_gloo)
