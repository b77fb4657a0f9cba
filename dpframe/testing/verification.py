"""Runs a strategy and the reference, and compares: the whole of `mode=verify`."""

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import torch

from dpframe import seeding
from dpframe.errors import UserError
from dpframe.strategies import ranks
from dpframe.strategies.base import Strategy
from dpframe.strategies.fault import RankFailed
from dpframe.testing.checks import chosen, judged, needed
from dpframe.testing.course import Recipe
from dpframe.testing.evidence import Evidence
from dpframe.testing.leftovers import Leftovers
from dpframe.testing.measure import Plan, measure, read
from dpframe.testing.report import TOLERANCE, Finding, Report, counted

GIVE_UP_SECONDS = 300.0


def verify(
    strategy: Callable[[], Strategy],
    *,
    recipe: Recipe | None = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    give_up_seconds: float = GIVE_UP_SECONDS,
) -> Report:
    """`strategy` and the recipe's parts are made in every process: by a class or a function.

    The job starts before this process computes anything, so that its ranks may be forked.
    """
    if ranks.is_rank():
        raise UserError("mode=verify starts its own ranks; leave torchrun out")
    names = chosen(only, skip)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="dpframe_verify_") as folder:
        plan = Plan(strategy, recipe, needed(names), Path(folder), os.getpid(), give_up_seconds)
        try:
            with seeding.seeded(0):  # what was drawn before goes on as if nothing had been
                return _report(plan, names)
        finally:
            torch.set_num_threads(threads)


def _report(plan: Plan, names: list[str]) -> Report:
    before = Leftovers(with_ports=True)
    made = plan.strategy()
    returned, failure = _launched(made, plan)
    torch.set_num_threads(1)  # no pool of threads: the next job's ranks may be forked, too
    has_failed = failure is not None
    evidence = Evidence(plan, read(plan.directory), returned, before.found(), has_failed)
    findings = [judged(name, evidence) for name in names]
    if failure is not None:
        causes = _broken(evidence, failure), judged("launch", evidence).cause
        cause = "; ".join(filter(None, causes))
        launch = Finding("launch", "the whole job", "broke off", False, cause)
        findings = [launch, *(finding for finding in findings if finding.check != "launch")]
    details = failure.details if failure is not None else ""
    return Report(_title(plan, made, evidence), findings, _remarks(evidence), details)


class Failure(NamedTuple):
    """What an exception said: itself it would keep the job's frames, threads and all, alive."""

    brief: str
    details: str
    has_hung: bool


def _launched(made: Strategy, plan: Plan) -> tuple[object, Failure | None]:
    began = time.monotonic()
    try:
        return made.launch(measure, plan), None
    except Exception as error:
        has_begun = any("facts" in note for note in read(plan.directory))
        if isinstance(error, UserError) and not has_begun:
            raise  # it was asked for what it can't do, which is no fault of its
        has_hung = time.monotonic() - began >= plan.give_up_seconds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        brief = lines[-1] if lines else type(error).__name__
        return None, Failure(brief, _traceback(error), has_hung)


def _traceback(error: Exception) -> str:
    if isinstance(error, RankFailed):
        return str(error)  # carries the rank's own
    return "".join(traceback.format_exception(error)).rstrip()


def _title(plan: Plan, made: Strategy, evidence: Evidence) -> str:
    what = f"verify {plan.recipe.name if plan.recipe else 'nothing but the kit'}"
    if not evidence.notes:
        return f"{what} on {made.name}"
    replicas = counted(evidence.replicas, "replica")
    places = f"{replicas} in {counted(evidence.processes, 'process')}"
    devices = ", ".join(dict.fromkeys(evidence.main["facts"]["devices"]))
    return (
        f"{what} on {evidence.main['facts']['strategy']}: {places} on {devices}; float64, "
        f"tolerance {TOLERANCE:g}"
    )


def _remarks(evidence: Evidence) -> list[str]:
    recipe = evidence.plan.recipe
    if recipe is None or not evidence.has("recipe"):
        return []
    remarks = []
    if evidence.separable.reason:
        remarks.append(
            f"{recipe.name} is left out of the curves: {evidence.separable.reason}; "
            "the kit's own network stands in for it"
        )
    if evidence.separable.others:
        names = ", ".join(sorted(evidence.separable.others))
        remarks.append(f"{recipe.name}'s {names}: no mean over rows, so it is not compared")
    return remarks


def _broken(evidence: Evidence, failure: Failure) -> str:
    """Where the job broke off: at the first measure that some process did not end."""
    began = {note.get("began", "setup") for note in evidence.notes}
    order = ("setup", *evidence.plan.measures, "close")
    where = next((name for name in order if name in began), "launch")
    if failure.has_hung:
        return (
            f"{where} did not end within {evidence.plan.give_up_seconds:g} seconds; where each "
            "process hung is on stderr"
        )
    if evidence.has("leftovers"):
        return f"after close() a process did not come to its end: {failure.brief}"
    return f"broke off in {where}: {failure.brief}"
