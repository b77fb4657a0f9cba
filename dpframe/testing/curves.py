"""Checks of the curves: weights, losses and metrics against the reference's."""

from collections.abc import Callable, Iterable

from dpframe.testing import course, wrong
from dpframe.testing.apart import Apart, logs_compared, weights_apart, weights_compared
from dpframe.testing.course import Course
from dpframe.testing.evidence import Evidence
from dpframe.testing.found import TOLERANCE, Found, counted
from dpframe.testing.reference import Curve


def weights(evidence: Evidence) -> Found:
    causes, most = [], 0.0
    for measure, its_course in evidence.compared:
        given: Curve = evidence.main[measure]
        apart = weights_compared(given.weights, evidence.reference(its_course).weights)
        most = max(most, apart.most)
        if not apart.most <= TOLERANCE:
            causes.append(_training_cause(evidence, its_course, given, apart))
    strays = [
        weights_apart(one.weights, evidence.main["kit"].weights) for one in evidence.of_each("kit")
    ]
    if not max(strays) <= TOLERANCE:
        rank = strays.index(max(strays))
        causes.insert(
            0, f"rank {rank} ends with other weights than rank 0 ({max(strays):.1e} apart)"
        )
    return Found(_of_courses(evidence), f"{max(most, *strays):.1e}", "; ".join(causes))


def loss_curve(evidence: Evidence) -> Found:
    return _logs(evidence, lambda name: name.endswith("/loss"))


def metrics(evidence: Evidence) -> Found:
    return _logs(evidence, lambda name: not name.endswith("/loss"))


def _logs(evidence: Evidence, belongs: Callable[[str], bool]) -> Found:
    causes, most = [], 0.0
    for measure, its_course in evidence.compared:
        wanted = evidence.reference(its_course).log
        names = {name for _, numbers in wanted for name in numbers if belongs(name)}
        if measure == "recipe":
            names = _comparable(names, evidence.separable.others)
        apart = logs_compared(evidence.main[measure].log, wanted, names, TOLERANCE)
        most = max(most, apart.most)
        if not apart.most <= TOLERANCE:
            causes.append(f"{its_course.recipe.name}: apart {apart.where}")
    return Found(_of_courses(evidence), f"{most:.1e}", "; ".join(causes))


def _comparable(names: Iterable[str], others: frozenset[str]) -> set[str]:
    """Where some metric is no mean over rows, what `summarize` makes of it is none either."""
    if not others:
        return set(names)
    kept = {"loss", "lr", "grad_norm"}
    return {name for name in names if name.rpartition("/")[2] in kept - others}


def accumulation(evidence: Evidence) -> Found:
    return _course(evidence, "accumulation", course.accumulating(), "3 batches an update, then 1")


def few_rows(evidence: Evidence) -> Found:
    its_course = course.few_rows(evidence.replicas)
    compared = f"batches of {its_course.batch_size} for {counted(evidence.replicas, 'replica')}"
    return _course(evidence, "few_rows", its_course, compared)


def weighted(evidence: Evidence) -> Found:
    return _course(evidence, "weighted", course.weighted(), "a mean over weights, not rows")


def _course(evidence: Evidence, measure: str, its_course: Course, compared: str) -> Found:
    given: Curve = evidence.main[measure]
    wanted = evidence.reference(its_course)
    names = {name for _, numbers in wanted.log for name in numbers}
    apart = weights_compared(given.weights, wanted.weights)
    logs = logs_compared(given.log, wanted.log, names, TOLERANCE)
    cause = ""
    if not apart.most <= TOLERANCE:
        cause = _training_cause(evidence, its_course, given, apart)
    elif not logs.most <= TOLERANCE:
        cause = f"the weights are right, but the log is apart {logs.where}"
    return Found(compared, f"{max(apart.most, logs.most):.1e}", cause)


def _training_cause(evidence: Evidence, its_course: Course, given: Curve, apart: Apart) -> str:
    recipe = its_course.recipe
    cause = f"{recipe.name} ends with other weights, {apart.where} ({apart.most:.1e} apart)"
    is_kit = recipe in (course.KIT, course.WEIGHTED)
    why = wrong.training_cause(its_course, given.weights, evidence.cuts) if is_kit else ""
    return f"{cause}: {why}" if why else cause


def _of_courses(evidence: Evidence) -> str:
    updates = [
        f"{evidence.reference(its_course).log[-1][0]} of {its_course.recipe.name}"
        for _, its_course in evidence.compared
    ]
    return f"updates: {', '.join(updates)}"
