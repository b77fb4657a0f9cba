"""`mode=tune`: the largest batch that fits in memory, and a learning rate."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dpframe import UserError
from dpframe.plugin import Composed, not_one_of, refuse_below
from dpframe.values import ABOVE_0

FOUND = ("batch_size", "lr")


@dataclass
class Settings:
    """The keys `tune.…`."""

    find: list[str] = field(
        default_factory=lambda: list(FOUND), metadata={"help": "what mode=tune tries"}
    )
    memory: float | None = field(
        default=None,
        metadata={
            "help": "bytes a replica; null: all of a GPU, a quarter of the machine's on the CPU"
        },
    )
    max_batch_size: int = field(default=8192, metadata={"help": "the largest that is tried"})
    steps: int = field(
        default=100, metadata={"help": "from the smallest learning rate to the largest"}
    )
    min_lr: float = field(default=1e-6, metadata={"help": "the learning rate of the first step"})
    max_lr: float = field(default=10.0, metadata={"help": "the learning rate of the last step"})

    def __post_init__(self) -> None:
        for name in self.find:
            if name not in FOUND:
                raise not_one_of("tune.find", name, FOUND)
        refuse_below("tune.memory", self.memory, ABOVE_0, "more than 0 bytes, or null")
        refuse_below("tune.max_batch_size", self.max_batch_size)
        refuse_below("tune.steps", self.steps, 10)
        refuse_below("tune.min_lr", self.min_lr, ABOVE_0, "more than 0")
        above = math.nextafter(self.min_lr, math.inf)
        refuse_below("tune.max_lr", self.max_lr, above, "more than tune.min_lr")


def run(job: Composed) -> dict[str, Any]:
    """Prints the largest batch that fits, a learning rate, and the overrides to type."""
    from dpframe.modes.measure import devices_of
    from dpframe.plugin import (
        counted,
        data_of,
        refuse_checkpoint,
        refuse_ranks,
        show,
        strategy_of,
        task_of,
    )
    from dpframe.plugins.lab.tuner import Tuner
    from dpframe.plugins.lab.tuning import Tuning

    refuse_checkpoint(job, "begins each trial with fresh weights")
    refuse_ranks("tune")
    settings, asked = job.settings, job.settings.modes["tune"]
    if job.config["task"].get("scale_lr") is not None and "lr" in asked.find:
        raise UserError(
            "mode=tune finds a learning rate for the batch that there is, and task.scale_lr would "
            "scale it again; add task.scale_lr=null, or tune.find=[batch_size]"
        )
    strategy = strategy_of(job)()
    tuner = Tuner(
        task_of(job),
        data_of(job)(),
        settings.trainer,
        accelerator=settings.trainer.accelerator if strategy.uses_gpus else "cpu",
        replicas=len(devices_of(strategy)),
        seed=settings.seed,
        limit=asked.memory,
    )
    batch = rates = None
    if "batch_size" in asked.find:
        batch = tuner.batch_size(asked.max_batch_size)
    if "lr" in asked.find:
        rates = tuner.learning_rate(asked.min_lr, asked.max_lr, asked.steps)
    tuning = Tuning(
        title=f"tune {settings.recipe}: {counted(tuner.replicas, 'replica')} of {strategy.name}, "
        f"measured on one on {tuner.device}, trainer.precision={settings.trainer.precision}",
        limit=tuner.limit,
        max_batch_size=asked.max_batch_size,
        batch=batch,
        rates=rates,
        takes_size="batch_size" in job.config["data"],
        rate_key=rate_key(job.config["task"]),
        scheduler=_class_of(job.config["task"].get("scheduler")),
        schedule=tuner.schedule,
        steps=tuner.total_steps,
    )
    found = {"tune": tuning.summary()}
    show(job, str(tuning), found)
    return {"metrics": {}, **found}


def rate_key(task: Mapping[str, Any]) -> str:
    """Where the learning rate is set: in a scheduler that overwrites the optimizer's, if it is
    OneCycleLR or CyclicLR; "": nowhere."""
    if overwrites := list(_keys("task.scheduler", task.get("scheduler"), "max_lr")):
        return overwrites[0]
    return "task.optimizer.lr" if "lr" in (task.get("optimizer") or {}) else ""


def _keys(where: str, node: Any, name: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == name:
                yield f"{where}.{key}"
            yield from _keys(f"{where}.{key}", value, name)
    for number, value in enumerate(node) if isinstance(node, list) else ():
        yield from _keys(f"{where}[{number}]", value, name)


def _class_of(node: Any) -> str:
    path = node.get("_target_") if isinstance(node, Mapping) else None
    return str(path or "").rpartition(".")[2]
