"""`mode=plan`: how fast 1 to 4096 replicas would be, in how much memory, and what failures cost."""

from typing import Any

from dpframe.plugin import Composed
from dpframe_plan.settings import Settings

__all__ = ["Settings", "run"]


def run(job: Composed) -> dict[str, Any]:
    """Prints what the recipe would cost on 1 to 4096 replicas."""
    from dpframe.plugin import refuse_checkpoint, refuse_ranks, show
    from dpframe_plan.plan import plan_of

    refuse_checkpoint(job, "measures what no weights change")
    refuse_ranks("plan")
    plan = plan_of(job, job.settings.modes["plan"])
    lines = [{**each._asdict(), "efficiency": each.efficiency} for each in plan.predictions]
    found = {"plan": lines, "failures": [each._asdict() for each in plan.outcomes]}
    show(job, str(plan), found)
    return {"metrics": {}, **found}
