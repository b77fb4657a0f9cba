"""The checks by name: what each of them needs to be measured, and who judges it."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from dpframe.errors import UserError, suggestion
from dpframe.testing import curves, job, rows
from dpframe.testing.evidence import Evidence
from dpframe.testing.found import Found
from dpframe.testing.measure import MEASURES
from dpframe.testing.report import Finding


class Check(NamedTuple):
    """`needs` are the measures that it looks at."""

    needs: tuple[str, ...]
    judge: Callable[[Evidence], Found]


CHECKS: dict[str, Check] = {
    "launch": Check(("facts",), job.launch),
    "collectives": Check(("collectives",), job.collectives),
    "rows_once": Check(("shares", "counted"), rows.rows_once),
    "weights": Check(("shares", "kit", "recipe"), curves.weights),
    "loss_curve": Check(("kit", "recipe"), curves.loss_curve),
    "metrics": Check(("kit", "recipe"), curves.metrics),
    "validation": Check(("shares", "validation"), rows.validation),
    "predict_order": Check(("predicted",), rows.predict_order),
    "accumulation": Check(("shares", "accumulation"), curves.accumulation),
    "few_rows": Check(("shares", "few_rows"), curves.few_rows),
    "weighted": Check(("shares", "weighted"), curves.weighted),
    "gradient_sync": Check(("gradients",), job.gradient_sync),
    "logged_once": Check(("logged",), job.logged_once),
    "checkpoint": Check(("kit", "resumed"), job.checkpoint_round_trip),
    "shutdown": Check(("facts", "leftovers"), job.shutdown),
}


def chosen(only: Collection[str], skip: Collection[str]) -> list[str]:
    for name in (*only, *skip):
        if name not in CHECKS:
            raise UserError(f"there is no check {name}; {suggestion(name, CHECKS)}")
    return [name for name in CHECKS if name not in skip and (not only or name in only)]


def needed(names: Collection[str]) -> tuple[str, ...]:
    """What has to be measured for these checks, each once."""
    needs = dict.fromkeys(need for name in names for need in CHECKS[name].needs)
    return tuple(need for need in needs if need in MEASURES)


def judged(name: str, evidence: Evidence) -> Finding:
    check = CHECKS[name]
    if not all(map(evidence.has, check.needs)):
        return Finding(name, "", "not measured", None)
    found = check.judge(evidence)
    passed = None if found.is_void else not found.cause
    return Finding(name, found.compared, found.measured, passed, found.cause)
