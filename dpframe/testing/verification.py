"""Runs a strategy and the reference, and compares: `check_strategy`, and `mode=verify`."""

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpframe import seeding
from dpframe.errors import UserError
from dpframe.strategies import Strategy, ranks
from dpframe.strategies.fault import RankFailed
from dpframe.testing.checks import Evidence, chosen, judged, needed
from dpframe.testing.course import TOLERANCE, Recipe
from dpframe.testing.leftovers import Leftovers
from dpframe.testing.measure import Plan, measure, read
from dpframe.testing.report import Finding, Report, counted

GIVE_UP_SECONDS = 300.0


def check_strategy(
    strategy: Callable[..., Strategy] | str,
    *,
    recipe: Recipe | str | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    give_up_seconds: float = GIVE_UP_SECONDS,
    **arguments: Any,
) -> Report:
    """Raises an AssertionError, with a table and the causes, if the strategy is not exact.

    `strategy` is a class, or a function that makes one, called with `arguments`; or the name of a
    config, e.g. `check_strategy("ddp", recipe="boston", gpus=2)`. A `recipe` is checked beside
    the kit's own networks: a name with `overrides`, or a Recipe. `only` and `skip` name checks.

    Ranks import all of these by name: pass no lambda and no class of a function.
    """
    make: Callable[[], Strategy] | None = None
    if isinstance(recipe, str):
        from dpframe.cli.compose import composed  # the command line imports this module
        from dpframe.cli.reports import recipe_of, strategy_of

        named = [f"strategy={strategy}"] if isinstance(strategy, str) else []
        job = composed([f"recipe={recipe}", *named, *overrides], config_dir=config_dir)
        recipe, make = recipe_of(job), strategy_of(job, arguments)
    elif overrides or config_dir:
        raise UserError("overrides and config_dir belong to a recipe's config; pass recipe=NAME")
    if not isinstance(strategy, str):
        make = partial(strategy, **arguments)
    elif make is None:
        raise UserError(f"strategy={strategy} is looked up in a recipe's config; pass recipe=NAME")
    report = verify(make, recipe=recipe, only=only, skip=skip, give_up_seconds=give_up_seconds)
    if not report.passed:
        raise AssertionError(f"\n{report}")
    return report


def verify(
    strategy: Callable[[], Strategy],
    *,
    recipe: Recipe | None = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    give_up_seconds: float = GIVE_UP_SECONDS,
) -> Report:
    """Every process calls `strategy` and the recipe's functions to make its own.

    The job starts before this process computes anything, so that its ranks may be forked.
    """
    if ranks.is_rank():
        raise UserError("mode=verify starts its own ranks; start it without torchrun")
    names = chosen(only, skip)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="dpframe_verify_") as folder:
        plan = Plan(strategy, recipe, needed(names), Path(folder), os.getpid(), give_up_seconds)
        try:
            with seeding.seeded(0):  # leaves the caller's random state as it was
                return _report(plan, names)
        finally:
            torch.set_num_threads(threads)


def _report(plan: Plan, names: list[str]) -> Report:
    before = Leftovers(with_ports=True)
    strategy = plan.strategy()
    returned, failure = _launched(strategy, plan)
    torch.set_num_threads(1)  # no thread pool: the next job's ranks may be forked, too
    evidence = Evidence(
        plan, read(plan.directory), returned, before.new(), has_failed=failure is not None
    )
    findings = [judged(name, evidence) for name in names]
    title, details = _title(plan, strategy, evidence), ""
    if failure is not None:
        causes = _where(evidence, failure), judged("launch", evidence).cause
        cause = "; ".join(filter(None, causes))
        launch = Finding("launch", "the whole job", "failed", False, cause)
        findings = [launch, *(finding for finding in findings if finding.check != "launch")]
        details = failure.details
    return Report(title, findings, _notes(evidence), details)


class Failure(NamedTuple):
    """What an exception said; the exception itself would keep the job's frames alive."""

    brief: str
    details: str
    has_hung: bool


def _launched(strategy: Strategy, plan: Plan) -> tuple[object, Failure | None]:
    began = time.monotonic()
    try:
        return strategy.launch(measure, plan), None
    except Exception as error:
        has_begun = any("facts" in note for note in read(plan.directory))
        if isinstance(error, UserError) and not has_begun:
            raise  # the caller asked for what the strategy can't do
        has_hung = time.monotonic() - began >= plan.give_up_seconds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        brief = lines[-1] if lines else type(error).__name__
        if isinstance(error, RankFailed):  # carries the rank's traceback
            return None, Failure(brief, str(error), has_hung)
        return None, Failure(brief, "".join(traceback.format_exception(error)).rstrip(), has_hung)


def _where(evidence: Evidence, failure: Failure) -> str:
    """Where the job failed: at the first measure that some process did not finish."""
    began = {note.get("began", "setup") for note in evidence.notes}
    order = ("setup", *evidence.plan.measures, "close")
    where = next((name for name in order if name in began), "launch")
    if failure.has_hung:
        return (
            f"{where} did not end within {evidence.plan.give_up_seconds:g} seconds; stderr shows "
            "where each process hung"
        )
    if evidence.has("leftovers"):
        return f"a process did not exit after close(): {failure.brief}"
    return f"failed in {where}: {failure.brief}"


def _title(plan: Plan, strategy: Strategy, evidence: Evidence) -> str:
    what = f"verify {plan.recipe.name if plan.recipe else 'nothing but the kit'}"
    if not evidence.notes:
        return f"{what} on {strategy.name}"
    facts = evidence.main["facts"]
    places = f"{counted(facts['replicas'], 'replica')} in {counted(len(evidence.notes), 'process')}"
    devices = ", ".join(dict.fromkeys(facts["devices"]))
    return f"{what} on {facts['name']}: {places} on {devices}; float64, tolerance {TOLERANCE:g}"


def _notes(evidence: Evidence) -> list[str]:
    recipe, notes = evidence.plan.recipe, []
    if recipe is None or not evidence.has("recipe"):
        return []
    if evidence.separable.reason:
        notes.append(
            f"{recipe.name} is left out of the curves: {evidence.separable.reason}; "
            "the kit's own network stands in for it"
        )
    if evidence.separable.others:
        names = ", ".join(sorted(evidence.separable.others))
        notes.append(f"{recipe.name}'s {names}: no mean over rows, so it is not compared")
    return notes
