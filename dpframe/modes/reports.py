"""`mode=verify`, `plan`, `tune`, `compare` and `doctor`: reports that train nothing to keep."""

import json
import sys
from collections.abc import Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dpframe import memory, seeding
from dpframe.callbacks import Callback
from dpframe.config.build import build
from dpframe.config.compose import Composed
from dpframe.config.locate import locate
from dpframe.config.schema import is_off
from dpframe.config.start import value_of
from dpframe.config.trust import trust_of
from dpframe.data import DataModule
from dpframe.errors import Failure, UserError, first_line, printable
from dpframe.launch import environment
from dpframe.modes import compare, doctor
from dpframe.modes.directory import Directory
from dpframe.plan.contest import a_few_steps
from dpframe.plan.curve import svg
from dpframe.plan.failures import outcomes
from dpframe.plan.measure import measure
from dpframe.plan.model import Prediction, predictions
from dpframe.plan.network import Link, Network
from dpframe.plan.operations import operations
from dpframe.plan.report import HOUR, Plan, Tuning, counted, time
from dpframe.plan.settings import PlanSettings
from dpframe.plan.tune import Tuner
from dpframe.strategies import Strategy
from dpframe.task import Task

if TYPE_CHECKING:
    from dpframe.testing import Recipe


def verified(job: Composed) -> dict[str, Any]:
    """Prints the conformance kit's report, and exits with code 1 where a check fails.

    A run of a sweep doesn't exit: the other runs go on. Nor does one from Python.
    """
    from dpframe.testing import verify  # only this mode needs the kit

    _refuse_checkpoint(job, "starts from the recipe's own weights")
    maker = locate(job.config["task"]["_target_"], "task")  # a class, or a function
    if getattr(maker, "needs_trainer", False):
        raise UserError(
            "mode=verify compares with steps that no Trainer makes, which a LightningModule needs; "
            "verify the strategy by another recipe, or compare runs by mode=compare"
        )
    report = verify(strategy_of(job), recipe=recipe_of(job))
    summary = None  # a sweep takes a run without a summary for one that failed
    if report.passed:
        summary = {"checks": {finding.check: finding.measured for finding in report.findings}}
    _show(str(report), summary, job)
    if not report.passed and job.number is None and job.history is None:
        sys.exit(1)
    if not report.passed:
        raise Failure("mode=verify: a check has failed")
    return {"metrics": {}, **(summary or {})}


def planned(job: Composed) -> dict[str, Any]:
    """Prints what the recipe would cost on 1 to 4096 replicas."""
    _refuse_checkpoint(job, "measures what no weights change")
    _refuse_ranks("plan")
    plan = plan_of(job)
    lines = [{**each._asdict(), "efficiency": each.efficiency} for each in plan.predictions]
    found = {"plan": lines, "failures": [each._asdict() for each in plan.outcomes]}
    _show(str(plan), found, job)
    return {"metrics": {}, **found}


def tuned(job: Composed) -> dict[str, Any]:
    """Prints the largest batch that fits, a learning rate, and the overrides to type."""
    _refuse_checkpoint(job, "begins each trial with fresh weights")
    _refuse_ranks("tune")
    tuning = tuning_of(job)
    texts = {}
    if tuning.rates is not None and tuning.rates.points:
        texts["lr.svg"] = svg(tuning.rates.points, tuning.rates.best, tuning.title)
    _show(str(tuning), {"tune": tuning.summary()}, job, texts)
    return {"metrics": {}, "tune": tuning.summary()}


def compared(job: Composed) -> dict[str, Any]:
    """Prints what an epoch takes by each strategy and number of replicas."""
    _refuse_checkpoint(job, "begins each training with fresh weights")
    _refuse_ranks("compare")
    asked = job.settings.compare
    found = compare.variants(job, asked.strategies, asked.gpus)
    contest = compare.contest(job, found, job.settings.trainer)
    contest.metric = job.objective.metric
    lines = [vars(entry) for entry in contest.entries]
    _show(str(contest), {"compare": lines}, job, {"compare.svg": contest.svg()})
    return {"metrics": {}, "compare": lines}


def examined(job: Composed) -> dict[str, Any]:
    """Prints what this machine has; and for a recipe the pace of a few steps by each strategy."""
    text = doctor.report(job)
    lines: list[dict[str, Any]] = []
    if value_of("recipe", job.typed) is not None:
        _refuse_ranks("doctor")
        settings = a_few_steps(job.settings.trainer, job.settings.plan.steps)
        contest = compare.contest(job, compare.variants(job), settings)
        lines = [vars(entry) for entry in contest.entries]
        text = f"{text}\n\n{contest}\n\nmodel      {_counted(job)}"
    _show(text, {"doctor": lines}, job)
    return {"metrics": {}, "doctor": lines}


def _counted(job: Composed) -> str:
    """What a step of the recipe computes, or why that can't be told."""
    recipe = recipe_of(job)
    try:
        return operations(recipe.task, recipe.data(), recipe.settings, recipe.seed)
    except UserError as error:
        return first_line(error)


def make(job: Composed) -> dict[str, Any]:
    with memory.explain(
        CPU, f"mode={job.settings.mode}", "take a smaller task, or a smaller batch"
    ):
        return MODES[job.settings.mode](job)


CPU = torch.device("cpu")
MODES = {
    "verify": verified,
    "plan": planned,
    "tune": tuned,
    "compare": compared,
    "doctor": examined,
}


def recipe_of(job: Composed) -> "Recipe":
    from dpframe.testing import Recipe

    settings, trust = job.settings, trust_of(job)
    return Recipe(
        settings.recipe,
        partial(build, job.config["task"], "task", Task, trust=trust),
        partial(build, job.config["data"], "data", DataModule, trust=trust),
        settings.trainer,
        settings.seed,
    )


def strategy_of(job: Composed, arguments: Mapping[str, Any] | None = None) -> partial[Strategy]:
    """`arguments` are set in the config's node."""
    node = {**job.config["strategy"], **(arguments or {})}
    return partial(build, node, "strategy", Strategy, trust=trust_of(job))


def plan_of(job: Composed) -> Plan:
    settings, trust = job.settings, trust_of(job)
    wanted = build(job.config["strategy"], "strategy", Strategy, trust=trust)
    if wanted.sharding is not None:
        _refuse_unknown(wanted, settings.plan.max_replicas)
    bucket = job.config["strategy"].get("bucket_cap_mb")
    seeding.seed_everything(settings.seed)
    data = build(job.config["data"], "data", DataModule, trust=trust)
    measured = measure(
        build(job.config["task"], "task", Task, trust=trust),
        data,
        settings.trainer,
        accelerator=settings.trainer.accelerator if wanted.uses_gpus else "cpu",
        seed=settings.seed,
        steps=settings.plan.steps,
        wanted=wanted,
        copies_gradients=not job.config["strategy"].get("gradient_as_bucket_view", True),
        bucket_bytes=None if bucket is None else int(bucket * 2**20),
        saves_in=None if settings.plan.node_mtbf_hours is None else _existing(Path(job.run_dir)),
    )
    network = _network(settings.plan, is_gloo=measured.device == "cpu")
    lines = predictions(measured.costs, measured.steps, network, settings.plan.max_replicas)
    threads = torch.get_num_threads()
    cores = f" with {threads} thread{'s' if threads > 1 else ''}" * (measured.device == "cpu")
    name = "fsdp" if wanted.sharding is not None else "ddp"
    title = (
        f"plan {settings.recipe}: batches of {data.batch_size} rows over N replicas, as strategy="
        f"{name} shares them; measured on {measured.device}{cores}, trainer.precision="
        f"{settings.trainer.precision}"
    )
    plan = Plan(title, measured, network, settings.plan.least_gain, lines)
    if settings.plan.node_mtbf_hours is None:
        return plan
    return _with_failures(plan, job, settings.plan.node_mtbf_hours)


def _with_failures(plan: Plan, job: Composed, mtbf_hours: float) -> Plan:
    settings, saving = job.settings.plan, plan.measured.saving
    assert saving is not None
    restart = settings.restart_seconds
    if settings.disk_bandwidth is not None:
        saving = saving._replace(write=saving.size / settings.disk_bandwidth)
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
    node: Any = job.settings.callbacks.get("checkpoint")
    return (
        None if is_off(node) else build(node, "callbacks.checkpoint", Callback, trust=trust_of(job))
    )


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


def _network(plan: PlanSettings, *, is_gloo: bool) -> Network:
    def either(value: float | None, default: float) -> float:
        return default if value is None else value

    between = Link(
        either(plan.node_bandwidth, plan.bandwidth), either(plan.node_latency, plan.latency)
    )
    return Network(Link(plan.bandwidth, plan.latency), between, plan.per_node, is_gloo)


def tuning_of(job: Composed) -> Tuning:
    settings, trust = job.settings, trust_of(job)
    wanted = build(job.config["strategy"], "strategy", Strategy, trust=trust)
    replicas = replicas_of(wanted)
    if job.config["task"].get("scale_lr") is not None and "lr" in settings.tune.find:
        raise UserError(
            "mode=tune finds a learning rate for the batch that there is, and task.scale_lr would "
            "scale it again; add task.scale_lr=null, or tune.find=[batch_size]"
        )

    def make_task() -> Task:
        seeding.seed_everything(settings.seed)
        return build(job.config["task"], "task", Task, trust=trust)

    data = build(job.config["data"], "data", DataModule, trust=trust)
    tuner = Tuner(
        make_task,
        data,
        settings.trainer,
        settings.tune,
        accelerator=settings.trainer.accelerator if wanted.uses_gpus else "cpu",
        replicas=replicas,
        seed=settings.seed,
    )
    title = (
        f"tune {settings.recipe}: {counted(replicas, 'replica')} of {wanted.name}, measured on one "
        f"on {tuner.device}, trainer.precision={settings.trainer.precision}"
    )
    find = settings.tune.find
    return Tuning(
        title,
        tuner.limit,
        settings.tune.max_batch_size,
        tuner.batch_size() if "batch_size" in find else None,
        tuner.learning_rate() if "lr" in find else None,
        takes_size="batch_size" in job.config["data"],
        takes_rate="lr" in (job.config["task"].get("optimizer") or {}),
    )


def replicas_of(strategy: Strategy) -> int:
    """How many replicas the strategy has, without starting them."""
    if strategy.launches_ranks:
        return len(strategy.choose_devices(default=None))
    with strategy:
        return strategy.replicas


def _refuse_checkpoint(job: Composed, why: str) -> None:
    settings = job.settings
    if settings.checkpoint is not None:
        raise UserError(
            f"checkpoint={settings.checkpoint}: mode={settings.mode} {why}; leave it out"
        )


def _refuse_ranks(mode: str) -> None:
    if environment.is_one_of_several():
        raise UserError(
            f"mode={mode} begins in one process; start it without {environment.find_launcher()}"
        )


def _show(
    text: str, summary: dict[str, Any] | None, job: Composed, texts: Mapping[str, str] | None = None
) -> None:
    """Writes a report, and `texts` by the names of their files, only into a directory that was
    given."""
    print(printable(text), flush=True)
    if job.is_run_dir_given:
        directory = Directory(Path(job.run_dir), is_given=True)
        path = Path(directory.make(job.notes))
        (path / f"{job.settings.mode}.txt").write_text(f"{text}\n", encoding="utf-8")
        for name, content in (texts or {}).items():
            (path / name).write_text(content, encoding="utf-8")
        if summary is not None:
            lines = json.dumps({"recipe": job.settings.recipe} | summary, indent=2)
            (path / "summary.json").write_text(f"{lines}\n", encoding="utf-8")
        directory.release()
