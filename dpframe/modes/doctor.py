"""`mode=doctor`: what is on this machine, what each strategy would use, and what is wrong."""

from dataclasses import dataclass
from typing import Any

from dpframe.config.compose import Composed
from dpframe.config.start import value_of
from dpframe.errors import UserError, first_line, refuse_below

NEEDS_RECIPE = False


@dataclass
class Settings:
    steps: int = 10

    def __post_init__(self) -> None:
        refuse_below("doctor.steps", self.steps)


def run(job: Composed) -> dict[str, Any]:
    """Prints what this machine has; and for a recipe the pace of a few steps by each strategy."""
    from dpframe.modes.machine import describe
    from dpframe.modes.measure import a_few_steps
    from dpframe.modes.report import refuse_ranks, show
    from dpframe.modes.variants import list_variants, train_all

    text = describe(job)
    lines: list[dict[str, Any]] = []
    if value_of("recipe", job.typed) is not None:
        refuse_ranks("doctor")
        settings = a_few_steps(job.settings.trainer, job.settings.modes["doctor"].steps)
        trained = train_all(job, list_variants(job), settings)
        lines = [vars(entry) for entry in trained.entries]
        text = f"{text}\n\n{trained}\n\nmodel      {_count_operations(job)}"
    found = {"doctor": lines}
    show(job, text, found)
    return {"metrics": {}, **found}


def _count_operations(job: Composed) -> str:
    """What a step of the recipe computes, or why that can't be told."""
    from dpframe.config.parts import data_of, task_of
    from dpframe.modes.operations import describe_operations

    settings = job.settings
    try:
        return describe_operations(task_of(job), data_of(job)(), settings.trainer, settings.seed)
    except UserError as error:
        return first_line(error)
