"""The checks by name: what each of them needs to be measured, and who judges it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from dpframe import checkpoint
from dpframe.errors import UserError, suggestion
from dpframe.testing import course, wrong
from dpframe.testing.course import Course, Small
from dpframe.testing.evidence import Evidence
from dpframe.testing.measure import CHECKPOINT, COUNTED, MEASURES, SIZES, VALIDATED_BATCH
from dpframe.testing.reference import (
    Apart,
    Curve,
    logs_compared,
    weights_apart,
    weights_compared,
)
from dpframe.testing.report import SHOWN, TOLERANCE, Finding, Found, counted, shown

# ---- the rows: each once, in its order, and with its weight in a mean


def rows_once(evidence: Evidence) -> Found:
    wrongs = [_uneven(evidence, count) for count in SIZES]
    missed = [
        _miscounted(evidence.main["counted"][index], *sizes) for index, sizes in enumerate(COUNTED)
    ]
    cut, seen = ([cause for _, cause in found if cause] for found in (wrongs, missed))
    cause = cut[len(cut) // 2] if cut else "".join(seen[:1])
    most = max(rows for rows, _ in (*wrongs, *missed))
    compared = f"shares of {SIZES[0]} to {SIZES[-1]} rows, two epochs"
    return Found(compared, f"{counted(most, 'row')} wrong", cause)


def _uneven(evidence: Evidence, count: int) -> tuple[int, str]:
    """Whether the shares of so many rows are these rows, in their order."""
    shares = evidence.shares(count)
    rows = [row for share in shares for row in share]
    if rows == list(range(count)):
        return 0, ""
    seen = Counter(rows)
    wrong_rows = [row for row in {*range(count), *seen} if seen[row] != (row in range(count))]
    sizes = " ".join(str(len(share)) for share in shares)
    cause = f"of a batch of {counted(count, 'row')} the shares have {sizes}"
    if not wrong_rows:
        return 0, f"{cause}, but not in the batch's order: {shown(rows)}"
    if min(seen[row] for row in range(count)) > 0:
        even = len({len(share) for share in shares}) == 1
        why = "the shares are padded to one size" if even else "shares overlap"
        return len(wrong_rows), f"{cause}: {why}, row {shown(wrong_rows)} counts twice"
    return len(wrong_rows), f"{cause}: row {shown(wrong_rows)} is missing or twice there"


def _miscounted(moved: list[float], rows: int, batch_size: int, shuffle: bool) -> tuple[int, str]:
    """From how far SGD moved each row's weight to how often the row was seen.

    Where all are off by one factor the gradient is, not the rows: see `weights`.
    """
    tail = rows - rows % batch_size
    sizes = [batch_size if row < tail else rows - tail for row in range(rows)]
    times = [weight * size for weight, size in zip(moved, sizes, strict=True)]
    wrong_rows = [row for row in range(rows) if round(times[row]) != 1]
    if not wrong_rows or max(times) - min(times) < 1e-9:
        return 0, ""
    how = " ".join(f"{times[row]:.3g}" for row in wrong_rows[:SHOWN])
    return len(wrong_rows), (
        f"an epoch of {rows} rows in batches of {batch_size} counts row {shown(wrong_rows)} "
        f"{how} times in the gradients, not once"
    )


def predict_order(evidence: Evidence) -> Found:
    wrongs = [(n, rows) for n, rows in evidence.main["predicted"].items() if rows != list(range(n))]
    compared = f"predictions of {SIZES[0]} to {SIZES[-1]} rows"
    if not evidence.main["predicted"]:
        return Found(compared, "none", "predict gave nothing in the main process")
    if not wrongs:
        return Found(compared, "0 rows wrong")
    count, rows = wrongs[len(wrongs) // 2]
    if sorted(rows) == list(range(count)):
        why = "shares have to keep the batch's order, and gather the ranks'"
    else:
        why = "some are missing or twice there: see rows_once"
    moved = sum(row != place for place, row in enumerate(rows)) or abs(len(rows) - count)
    return Found(
        compared, f"{moved} rows wrong", f"{count} rows came as {shown(rows, len(rows))}: {why}"
    )


def validation(evidence: Evidence) -> Found:
    """The mean of 0², 1² … (n-1)² is (n-1)(2n-1)/6."""
    given: dict[int, float] = evidence.main["validation"]
    wanted = {n: (n - 1) * (2 * n - 1) / 6 for n in given}
    apart = {n: abs(given[n] - mean) / (mean or 1.0) for n, mean in wanted.items()}
    compared = f"means over {SIZES[0]} to {SIZES[-1]} rows"
    worst = max(apart, key=lambda n: apart[n] if apart[n] == apart[n] else float("inf"))
    if apart[worst] <= TOLERANCE:
        return Found(compared, f"{apart[worst]:.1e}")
    shown = 10 if not apart[10] <= TOLERANCE else worst
    why = wrong.mean_cause(given, VALIDATED_BATCH, evidence.cuts)
    cause = f"of 0² to {shown - 1}² the mean is {wanted[shown]:g}; it gave {given[shown]:.6g}"
    return Found(compared, f"{apart[worst]:.1e}", f"{cause}, {why}" if why else cause)


# ---- the curves: weights, losses and metrics against the reference's


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


# ---- the job: who is who, who does what, and what is left when it is over


def launch(evidence: Evidence) -> Found:
    facts = evidence.of_each("facts")
    ranks = sorted(fact["rank"] for fact in facts)
    mains = [fact["rank"] for fact in facts if fact["is_main"]]
    cause = ""
    if ranks != list(range(len(facts))):
        cause = f"the processes have the ranks {shown(ranks)}: setup must give each its own"
    elif any(fact["world_size"] != len(facts) for fact in facts):
        sizes = sorted({fact["world_size"] for fact in facts})
        cause = f"{len(facts)} processes ran, and world_size is {shown(sizes)}"
    elif mains != [0]:
        cause = f"is_main is true in the ranks {shown(mains)}; it has to be in rank 0 alone"
    elif any(fact["replicas"] != len(fact["devices"]) for fact in facts):
        named = len(facts[0]["devices"])
        cause = f"replicas is {facts[0]['replicas']}, and devices names {named}"
    elif not evidence.has_failed and evidence.returned != facts[0]["pid"]:
        cause = "launch did not return what `run` returned in the main process"
    return Found("ranks, the main one, what launch returns", counted(len(facts), "process"), cause)


def collectives(evidence: Evidence) -> Found:
    count = evidence.processes
    given = evidence.of_each("collectives")
    total = [count * (count + 1) / 2]
    wanted = {"reduce": total, "tally": total, "share": 0}
    wrongs = []
    for rank, values in enumerate(given):
        for name, value in wanted.items():
            if values[name] != value:
                wrongs.append(f"{name} gave {values[name]} in rank {rank}, not {value}")
        gathered = list(range(count)) if rank == 0 else []
        if values["gather"] != gathered:
            wrongs.append(f"gather gave {values['gather']} in rank {rank}, not {gathered}")
    meaning = (
        "reduce is the sum, so is tally, gather the main process's list by rank, share its value"
    )
    cause = f"{wrongs[0]}: {meaning}" if wrongs else ""
    return Found("reduce, gather and share", f"{len(wrongs)} wrong", cause)


def shutdown(evidence: Evidence) -> Found:
    here = [f"{one}, in the process that launched the job" for one in evidence.left]
    for note in evidence.notes:
        rank = note["facts"]["rank"]
        here += [f"{one}, in rank {rank} after close()" for one in note["leftovers"]]
    cause = f"left behind: {'; '.join(here)}" if here else ""
    return Found("processes, threads, ports, process group", f"{len(here)} left", cause)


def gradient_sync(evidence: Evidence) -> Found:
    """Of an update's micro-batches only the last one's backward may share gradients."""
    given: list[list[list[float]]] = evidence.of_each("gradients")
    compared = "3 micro-batches of one update"
    if evidence.processes == 1:
        return Found(compared, "1 process", is_void=True)
    batches = len(given[0])
    shared = [i for i in range(batches) if all(_is_close(one[i], given[0][i]) for one in given)]
    cause = ""
    if not given[0][-1]:
        cause = "no gradient was left on the task's parameters"
    elif batches - 1 not in shared:
        cause = "after the last micro-batch the processes still have gradients of their own"
    elif len(shared) > 1:
        cause = (
            f"the gradients were shared {len(shared)} times in one update: grad_sync(False) has "
            "no effect, so that each micro-batch waits for the network, which is slow"
        )
    return Found(compared, f"shared {counted(len(shared), 'time')}", cause)


def logged_once(evidence: Evidence) -> Found:
    path = evidence.plan.directory / "logged.txt"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    times = Counter((step, name) for _, step, name in lines)
    writers = {int(pid) for pid, _, _ in lines}
    main = evidence.main["facts"]["pid"]
    compared = "what every process's logger got"
    if not lines:
        return Found(compared, "0 times", "nothing was logged: `logger` must keep the main one's")
    (step, name), most = times.most_common(1)[0]
    cause = ""
    if most > 1:
        cause = (
            f"{name} of step {step} was logged {most} times, by "
            f"{counted(len(writers), 'process')}: `logger` must give the loggers back in the main "
            "process alone"
        )
    elif writers != {main}:
        cause = "another process than the main one logged: the run directory is the main one's"
    return Found(compared, counted(most, "time"), cause)


def checkpoint_round_trip(evidence: Evidence) -> Found:
    """Written under the strategy, read here; and read by the strategy, which goes on from it."""
    kept = evidence.main["resumed"]
    compared = "saved, read on the CPU, and trained on"
    cause = kept["error"] and f"its state can't be saved: {kept['error']}"
    cause = cause or _state_cause(evidence)
    if cause or kept["resumed"] is None:
        return Found(compared, "unlike", cause)
    apart = weights_apart(kept["resumed"], evidence.main["kit"].weights)
    if not apart <= TOLERANCE:
        cause = (
            f"an epoch, a checkpoint and a second epoch end {apart:.1e} apart from two epochs: "
            "state_dict or load_state_dict loses something"
        )
    return Found(compared, f"{apart:.1e}", cause)


def _state_cause(evidence: Evidence) -> str:
    """What is wrong with the weights in the file, if anything is."""
    try:
        state = checkpoint.load(evidence.plan.directory / CHECKPOINT)
        names, wanted = list(state["task"]), list(Small().state_dict())
        if names != wanted:
            return (
                f"it has {names[0]} in place of {wanted[0]}: wrap must leave the task as it is, "
                "and wrap what holds it"
            )
        checkpoint.load_task(Small().double(), state)
    except UserError as error:
        return str(error)
    trained = dict(evidence.main["resumed"]["weights"])
    unlike = [name for name in wanted if not state["task"][name].equal(trained[name])]
    return f"{unlike[0]} in it is not the one that was trained" if unlike else ""


def _is_close(one: list[float], other: list[float]) -> bool:
    near = (abs(a - b) <= 1e-9 * max(1.0, abs(b)) for a, b in zip(one, other, strict=False))
    return len(one) == len(other) and all(near)


# ---- all of them


class Check(NamedTuple):
    """`needs` are the measures that it looks at."""

    needs: tuple[str, ...]
    judge: Callable[[Evidence], Found]


CHECKS: dict[str, Check] = {
    "launch": Check(("facts",), launch),
    "collectives": Check(("collectives",), collectives),
    "rows_once": Check(("shares", "counted"), rows_once),
    "weights": Check(("shares", "kit", "recipe"), weights),
    "loss_curve": Check(("kit", "recipe"), loss_curve),
    "metrics": Check(("kit", "recipe"), metrics),
    "validation": Check(("shares", "validation"), validation),
    "predict_order": Check(("predicted",), predict_order),
    "accumulation": Check(("shares", "accumulation"), accumulation),
    "few_rows": Check(("shares", "few_rows"), few_rows),
    "weighted": Check(("shares", "weighted"), weighted),
    "gradient_sync": Check(("gradients",), gradient_sync),
    "logged_once": Check(("logged",), logged_once),
    "checkpoint": Check(("kit", "resumed"), checkpoint_round_trip),
    "shutdown": Check(("facts", "leftovers"), shutdown),
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
