"""Runs a strategy and the reference, and compares: `check_strategy`, and `mode=verify`."""

import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpframe import Strategy, UserError
from dpframe.errors import OutOfMemory
from dpframe.plugin import (
    Composed,
    RankFailed,
    composed,
    data_of,
    environment,
    seeding,
    strategy_of,
    task_of,
)
from dpframe.plugins.verify.checks import choose, judge, list_measures
from dpframe.plugins.verify.course import TOLERANCE, Recipe, dropouts
from dpframe.plugins.verify.evidence import Evidence, Finding, format_count
from dpframe.plugins.verify.measure import Plan, find_leftovers, list_resources, measure, read

GIVE_UP_SECONDS = 300.0
COLUMNS = ("check", "what was compared", "largest difference", "result")


@dataclass
class Verdict:
    """A table with a line a check, and the cause of each failure."""

    title: str
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)
    details: str = ""  # the traceback of a job that failed

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.passed is False]

    def __getitem__(self, check: str) -> Finding:
        return next(finding for finding in self.findings if finding.check == check)

    def __str__(self) -> str:
        rows = [COLUMNS, *((f.check, f.compared, f.measured, f.result) for f in self.findings)]
        first, second, third, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        table = [f"{a:<{first}}  {b:<{second}}  {c:>{third}}  {d}" for a, b, c, d in rows]
        lines = [self.title, "", *table, ""]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"FAIL {finding.check}: {finding.cause}" for finding in self.failed]
        lines += [self.details] if self.details else []
        passed = sum(finding.passed is True for finding in self.findings)
        left_out = Counter(f.left_out.partition(":")[0] for f in self.findings if f.left_out)
        count = passed + len(self.failed) + left_out.total()
        ways = {"by choice": "left out by choice"}
        rest = [f", {number} {ways.get(how, how)}" for how, number in left_out.items()]
        return "\n".join([*lines, f"{passed} of {count} checks passed{''.join(rest)}"])


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
) -> Verdict:
    """Raises an AssertionError, with a table and the causes, if the strategy is not exact.

    `strategy` is a class, or a function that makes one, called with `arguments`; or the name of a
    config, e.g. `check_strategy("ddp", recipe="boston", gpus=2)`. A `recipe` is checked beside
    the kit's own networks: a name with `overrides`, or a Recipe. `only` and `skip` name checks.

    Ranks import all of these by name: pass no lambda and no class of a function.
    """
    make: Callable[[], Strategy] | None = None
    if isinstance(recipe, str):
        named = [f"strategy={strategy}"] if isinstance(strategy, str) else []
        job = composed([f"recipe={recipe}", *named, *overrides], config_dir=config_dir)
        recipe, make = recipe_of(job), strategy_of(job, arguments)
    elif overrides or config_dir:
        raise UserError("overrides and config_dir belong to a recipe's config; pass recipe=NAME")
    if not isinstance(strategy, str):
        make = partial(strategy, **arguments)
    elif make is None:
        raise UserError(f"strategy={strategy} is looked up in a recipe's config; pass recipe=NAME")
    verdict = verify(make, recipe=recipe, only=only, skip=skip, give_up_seconds=give_up_seconds)
    if not verdict.passed:
        raise AssertionError(f"\n{verdict}")
    return verdict


def verify(
    strategy: Callable[[], Strategy],
    *,
    recipe: Recipe | None = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    give_up_seconds: float = GIVE_UP_SECONDS,
) -> Verdict:
    """Every process calls `strategy` and the recipe's functions to make its own.

    The job starts before this process computes anything, so that its ranks may be forked.
    """
    if environment.is_rank():
        raise UserError(
            f"mode=verify starts its own ranks; start it without {environment.find_launcher()}"
        )
    names = choose(only, skip)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="dpframe_verify_") as folder:
        plan = Plan(
            strategy, recipe, list_measures(names), Path(folder), os.getpid(), give_up_seconds
        )
        try:
            with seeding.seeded(0):  # leaves the caller's random state as it was
                return _verdict(plan, names)
        finally:
            torch.set_num_threads(threads)


def recipe_of(job: Composed) -> Recipe:
    settings = job.settings
    return Recipe(settings.recipe, task_of(job), data_of(job), settings.trainer, settings.seed)


def _verdict(plan: Plan, names: Iterable[str]) -> Verdict:
    before, began = list_resources(with_ports=True), time.monotonic()
    strategy, returned, details = plan.strategy(), None, ""
    try:
        returned = strategy.launch(measure, plan)
    except OutOfMemory:
        raise
    except Exception as error:
        if isinstance(error, UserError) and not read(plan.directory):
            raise  # the caller asked for what the strategy can't do
        details = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, RankFailed):  # carries the rank's traceback
            details = str(error)
    has_hung = time.monotonic() - began >= plan.give_up_seconds
    torch.set_num_threads(1)  # no thread pool: the next job's ranks may be forked, too
    notes = read(plan.directory)
    failure = details and _failure(plan, notes, details, has_hung=has_hung)
    evidence = Evidence(plan, notes, returned, find_leftovers(before, with_ports=True), failure)
    if failure:
        names = dict.fromkeys(["launch", *names])
    findings = [judge(name, evidence) for name in names]
    return Verdict(_title(strategy, evidence), findings, _notes(evidence), details)


def _failure(plan: Plan, notes: list[dict[str, Any]], details: str, *, has_hung: bool) -> str:
    """Where the job failed: at the first measure that some process did not finish."""
    began = {note.get("began", "setup") for note in notes}
    order = ("setup", *plan.measures, "close")
    where = next((name for name in order if name in began), "launch")
    if has_hung:
        return (
            f"{where} did not end within {plan.give_up_seconds:g} seconds; stderr shows "
            "where each process hung"
        )
    brief = details.splitlines()[-1].strip()
    if notes and all("leftovers" in note for note in notes):
        return f"a process did not exit after close(): {brief}"
    return f"failed in {where}: {brief}"


def _title(strategy: Strategy, evidence: Evidence) -> str:
    recipe = evidence.plan.recipe
    what = f"verify {recipe.name if recipe else 'nothing but the kit'}"
    if not evidence.notes:
        return f"{what} on {strategy.name}"
    facts = evidence.main["facts"]
    replicas = format_count(facts["replicas"], "replica")
    places = f"{replicas} in {format_count(len(evidence.notes), 'process')}"
    devices = ", ".join(dict.fromkeys(facts["devices"]))
    return f"{what} on {facts['name']}: {places} on {devices}; float64, tolerance {TOLERANCE:g}"


def _notes(evidence: Evidence) -> list[str]:
    recipe, notes = evidence.plan.recipe, []
    if recipe is None or not evidence.has("recipe"):
        return []
    if dropouts(recipe.task(), recipe.settings):
        notes.append(f"{recipe.name}'s dropout is set to 0 here: other shares draw other masks")
    if not evidence.separable.has_curve:
        reason = evidence.separable.reason or evidence.separable.own.line
        notes.append(
            f"{recipe.name} is left out of the curves: {reason}; "
            "the kit's own network stands in for it"
        )
    if "recipe" in evidence.curves and evidence.tolerances[0] > TOLERANCE:
        apart = f"{evidence.tolerances[0]:.1e} apart"
        notes.append(
            f"{recipe.name}'s weights may be {apart}: its optimizer divides by gradients that are "
            "almost 0, so the order of a sum moves them by a part of that"
        )
    if evidence.separable.changed:
        names = ", ".join(evidence.separable.changed)
        notes.append(
            f"{recipe.name}'s training_step changes {names} of the task: of several replicas what "
            "the first one makes of its rows stays; gather the rows where it needs all of them"
        )
    if evidence.separable.others:
        names = ", ".join(sorted(evidence.separable.others))
        notes.append(
            f"{recipe.name}'s {names}: no mean over rows, so it is not compared; it may be another "
            "number on other numbers of replicas: return the mean over the rows, or over 'weight' "
            "where that is returned, or hold a metric of torchmetrics"
        )
    return notes
