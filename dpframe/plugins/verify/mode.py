"""`mode=verify`: whether a strategy keeps the numbers of one process, by the conformance kit."""

import sys
from typing import Any

from dpframe.plugin import Composed, Failure


def run(job: Composed) -> dict[str, Any]:
    """Prints the kit's report, and exits with code 1 where a check fails.

    A run of a sweep doesn't exit: the other runs go on. Nor does one from Python.
    """
    from dpframe.plugin import refuse_checkpoint, show, strategy_of
    from dpframe.plugins.verify.verification import recipe_of, verify

    refuse_checkpoint(job, "starts from the recipe's own weights")
    verdict = verify(strategy_of(job), recipe=recipe_of(job))
    found = None  # a sweep takes a run without a summary for one that failed
    if verdict.passed:
        found = {"checks": {each.check: each.measured for each in verdict.findings}}
        if left_out := {each.check: each.left_out for each in verdict.findings if each.left_out}:
            found["left_out"] = left_out
    show(job, str(verdict), found)
    if not verdict.passed and job.number is None and job.history is None:
        sys.exit(1)
    if not verdict.passed:
        raise Failure("mode=verify: a check has failed")
    return {"metrics": {}, **(found or {})}
