"""`mode=doctor`: what is on this machine, what each strategy would use, and what is wrong."""

from typing import Any

from dpframe import UserError
from dpframe.config.overrides import value_of
from dpframe.plugin import Composed, first_line

NEEDS_RECIPE = False


def run(job: Composed) -> dict[str, Any]:
    """Prints what this machine has; and for a recipe what a step computes."""
    from dpframe.plugin import show
    from dpframe.plugins.lab.machine import describe

    text = describe(job)
    if value_of("recipe", job.typed) is not None:
        text = f"{text}\n\nmodel      {_count_operations(job)}"
    show(job, text, None)
    return {"metrics": {}}


def _count_operations(job: Composed) -> str:
    """What a step of the recipe computes, or why that can't be told."""
    from dpframe.plugin import data_of, task_of
    from dpframe.plugins.lab.operations import describe_operations

    settings = job.settings
    try:
        return describe_operations(task_of(job), data_of(job)(), settings.trainer, settings.seed)
    except UserError as error:
        return first_line(error)
