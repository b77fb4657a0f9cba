"""`mode=plan`: what the recipe would cost on 1 to 4096 replicas; trains nothing that is kept."""

import json
from pathlib import Path
from typing import Any

import torch

from dpframe import seeding
from dpframe.cli.build import build
from dpframe.cli.compose import Composed
from dpframe.cli.directory import Directory
from dpframe.cli.slots import trust_of
from dpframe.data import DataModule
from dpframe.errors import UserError, printable
from dpframe.plan.measure import measure
from dpframe.plan.model import Link, predictions
from dpframe.plan.report import Plan
from dpframe.strategies import Strategy, ranks
from dpframe.strategies.cpu import CPU
from dpframe.task import Task
from dpframe.trainer import Trainer


def planned(job: Composed) -> dict[str, Any]:
    """Prints the plan, and writes it down only into a directory that was given."""
    _refuse(job)
    plan = plan_of(job)
    print(printable(str(plan)), flush=True)
    if job.is_run_dir_given:
        _keep(plan, job)
    return {"metrics": {}}


def plan_of(job: Composed) -> Plan:
    assumed = job.settings.plan
    trainer = _trainer(job)
    copies = not job.config["strategy"].get("gradient_as_bucket_view", True)
    measured = measure(trainer, steps=assumed.steps, copies_gradients=copies)
    link = Link(assumed.bandwidth, assumed.latency)
    found = predictions(measured.costs, measured.steps, link, assumed.max_replicas)
    return Plan(_title(trainer, job), measured, link, assumed.least_gain, found)


def _refuse(job: Composed) -> None:
    if job.settings.checkpoint is not None:
        raise UserError(
            f"checkpoint={job.settings.checkpoint}: mode=plan measures what no weights change; "
            "leave it out"
        )
    if ranks.are_several():
        raise UserError("mode=plan measures one replica in one process; start it without torchrun")


def _trainer(job: Composed) -> Trainer:
    """As `fit` makes it, for a single replica on a device of the kind that training would take."""
    settings, trust = job.settings, trust_of(job)
    wanted = build(job.config["strategy"], "strategy", Strategy, trust=trust)
    accelerator = "cpu" if isinstance(wanted, CPU) else settings.trainer.accelerator
    strategy = Strategy(accelerator=accelerator)
    strategy.open()
    seeding.seed_everything(settings.seed)
    task = build(job.config["task"], "task", Task, trust=trust)
    data = build(job.config["data"], "data", DataModule, trust=trust)
    trainer = Trainer(task, data, strategy=strategy, settings=settings.trainer, seed=settings.seed)
    trainer.prepare()
    return trainer


def _title(trainer: Trainer, job: Composed) -> str:
    threads = torch.get_num_threads()
    place = trainer.strategy.devices[0]
    if place == "cpu":
        place += f" with {threads} thread{'s' if threads > 1 else ''}"
    return (
        f"plan {job.settings.recipe}: batches of {trainer.data.batch_size} rows over N replicas, "
        f"as strategy=ddp shares them; measured on {place}, trainer.precision="
        f"{trainer.settings.precision}"
    )


def _keep(plan: Plan, job: Composed) -> None:
    directory = Path(Directory(Path(job.run_dir), is_given=True).make(job))
    (directory / "plan.txt").write_text(f"{plan}\n", encoding="utf-8")
    found = [{**each._asdict(), "efficiency": each.efficiency} for each in plan.predictions]
    summary = {"recipe": job.settings.recipe, "plan": found}
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
