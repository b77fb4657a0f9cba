"""`mode=compare`: one recipe over strategies and numbers of replicas, each by the same maths."""

from dataclasses import dataclass, field
from typing import Any

from dpframe.plugin import Composed, refuse_below


@dataclass
class Settings:
    """The keys `compare.…`."""

    strategies: list[str] | None = field(
        default=None,
        metadata={"help": "[ddp, data_parallel]; null: all that this machine can have"},
    )
    gpus: list[int] | None = field(
        default=None,
        metadata={"help": "[1, 2, 4] replicas; null: 2, 4 and so on, as far as there are devices"},
    )

    def __post_init__(self) -> None:
        for count in self.gpus or ():
            refuse_below("compare.gpus", count)


def run(job: Composed) -> dict[str, Any]:
    """Prints what an epoch takes by each strategy and number of replicas."""
    from dpframe.plugin import refuse_checkpoint, refuse_ranks, show
    from dpframe.plugins.lab.contest import describe
    from dpframe.plugins.lab.variants import list_variants, train_all

    refuse_checkpoint(job, "begins each training with fresh weights")
    refuse_ranks("compare")
    asked = job.settings.modes["compare"]
    entries = train_all(list_variants(job, asked.strategies, asked.gpus))
    found = {"compare": [vars(entry) for entry in entries]}
    title = f"{job.settings.recipe}: batch {job.config['data'].get('batch_size', '')}".rstrip()
    show(job, describe(title, entries, job.objective.metric), found)
    return {"metrics": {}, **found}
