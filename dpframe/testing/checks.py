"""The checks by name: what each of them needs to be measured, and who judges it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import Any, NamedTuple

from dpframe import checkpoint
from dpframe.errors import UserError, suggestion
from dpframe.testing import course, wrong
from dpframe.testing.course import Course, Drawing
from dpframe.testing.evidence import Evidence
from dpframe.testing.measure import (
    CHECKPOINT,
    COUNTED,
    KINDS,
    MEASURES,
    OTHER_NUMBERS,
    SIZES,
    VALIDATED_BATCH,
    values_of,
)
from dpframe.testing.reference import (
    Apart,
    Curve,
    logs_compared,
    predictions,
    unlike,
    validated,
    weights_apart,
    weights_compared,
)
from dpframe.testing.report import (
    FLOAT32_TOLERANCE,
    SHOWN,
    TOLERANCE,
    Finding,
    Found,
    counted,
    shown,
)

# ---- the rows: each once, in its order, and with its weight in a mean


def rows_once(evidence: Evidence) -> Found:
    sizes = evidence.main["shares"]["tensor"]
    cuts = [[_uneven(evidence.shares(n, kind), n, kind) for n in sizes] for kind in KINDS]
    others = [
        _uneven(shares, count, kind, replicas)
        for replicas, kinds in evidence.main["other_numbers"].items()
        for kind, cut in kinds.items()
        for count, shares in cut.items()
    ]
    seen = [
        _miscounted(evidence.main["counted"][index], *sizes) for index, sizes in enumerate(COUNTED)
    ]
    read = _unread(evidence)
    cause = ""
    for wrongs in (*cuts, others, seen, [read]):
        causes = [cause for _, cause in wrongs if cause]
        # Of many the one in the middle: it tells most.
        cause = cause or (causes[len(causes) // 2] if causes else "")
    most = max(rows for rows, _ in (*chain(*cuts), *others, *seen, read))
    several = f" on {OTHER_NUMBERS[0]} to {OTHER_NUMBERS[-1]} replicas" if others else ""
    compared = f"shares of {SIZES[0]} to {max(sizes)} rows{several}, two epochs"
    return Found(compared, f"{counted(most, 'row')} wrong", cause)


def _uneven(shares: Any, count: int, kind: str, replicas: int | None = None) -> tuple[int, str]:
    """Whether the shares of so many rows are these rows, in their order."""
    rows = [row for share in shares for row in share]
    if rows == list(range(count)):
        return 0, ""
    seen = Counter(rows)
    wrong_rows = [row for row in {*range(count), *seen} if seen[row] != (row in range(count))]
    sizes = " ".join(str(len(share)) for share in shares)
    where = f" on {counted(replicas, 'replica')}" if replicas else ""
    what = "" if kind == "tensor" else f", as a {kind} as streams have them,"
    cause = f"of a batch of {counted(count, 'row')}{what} the shares{where} have {sizes}"
    if not wrong_rows:
        return 0, f"{cause}, but not in the batch's order: {shown(rows)}"
    if min(seen[row] for row in range(count)) > 0:
        even = len({len(share) for share in shares}) == 1
        why = "the shares are padded to one size" if even else "shares are padded, or overlap"
        return len(wrong_rows), f"{cause}: {why}, row {shown(wrong_rows)} counts twice"
    return len(wrong_rows), f"{cause}: row {shown(wrong_rows)} is missing or twice there"


def _unread(evidence: Evidence) -> tuple[int, str]:
    """Of a recipe that is left out of the curves: an epoch reads each row once."""
    its_course = evidence.recipe_course
    if its_course is None or not its_course.is_even:
        return 0, ""
    read = Counter(row for note in evidence.of_each("recipe") for row in note["read"])
    unlike = [row for row, times in sorted(read.items()) if times != its_course.epochs]
    if not unlike:
        return 0, ""
    return len(unlike), (
        f"{its_course.epochs} epochs of {its_course.recipe.name} read row {shown(unlike)} "
        f"{shown(read[row] for row in unlike)} times"
    )


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
        cause = _predicted(evidence)
        return Found(compared, "other numbers" if cause else "0 rows wrong", cause)
    count, rows = wrongs[len(wrongs) // 2]
    if sorted(rows) == list(range(count)):
        why = "shares have to keep the batch's order, and gather the ranks'"
    else:
        why = "some are missing or twice there: see rows_once"
    moved = sum(row != place for place, row in enumerate(rows)) or abs(len(rows) - count)
    return Found(
        compared, f"{moved} rows wrong", f"{count} rows came as {shown(rows, len(rows))}: {why}"
    )


def _predicted(evidence: Evidence) -> str:
    """How the recipe's predictions differ from its checkpoint's on the CPU."""
    its_course, given = evidence.recipe_course, evidence.main["recipe"].get("predicted")
    if its_course is None or given is None:
        return ""
    state = evidence.saved("recipe")
    wanted, again = (predictions(its_course, state, its_course.batch_size, n) for n in (0, 1))
    apart = unlike(given, wanted, TOLERANCE)
    if not apart or unlike(again, wanted):  # it draws them at random
        return ""
    by_rows = unlike(predictions(its_course, state, 3), wanted, TOLERANCE)
    why = "its predict_step gives shares something else than their batch; " if by_rows else ""
    return (
        f"{its_course.recipe.name} predicts something else than on the CPU: {why}they first "
        f"differ in {apart}"
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


def evaluation(evidence: Evidence) -> Found:
    """What validation reported is what the checkpoint of these weights gives."""
    causes, most, names = [], 0.0, []
    for measure, its_course in evidence.tried:
        given, state = evidence.main[measure].get("validated"), evidence.saved(measure)
        if state is None or not given:
            continue
        names.append(its_course.recipe.name)
        try:
            curve, others = validated(its_course, state)
        except UserError as error:
            causes.append(str(error))
            continue
        ((step, numbers),) = curve.log
        compared = _comparable(numbers, others)
        apart = logs_compared([(step, given)], curve, compared, its_course.tolerance)
        most = max(most, apart.most)
        if apart.where:
            causes.append(
                f"{names[-1]} was validated otherwise than it was saved, {apart.where} as the "
                f"checkpoint gives on the CPU{_evaluation_cause(evidence, measure, given)}"
            )
    compared_of = f"validation and the checkpoint of {', '.join(names)}"
    return Found(compared_of, f"{most:.1e}", "; ".join(causes))


def _evaluation_cause(evidence: Evidence, measure: str, given: dict[str, float]) -> str:
    notes = evidence.of_each("tried")
    if any(True in note["modes"] for note in notes):
        return (
            ": validation_step runs in training mode, where dropout drops and BatchNorm takes the "
            "batch's statistics: what wrap gives for training=False has to stay in eval()"
        )
    strays = (
        (rank, unlike(dict(note["weights"]), dict(notes[0]["weights"])))
        for rank, note in enumerate(notes)
    )
    rank, name = next(filter(lambda stray: stray[1], strays), (0, ""))
    if rank and measure == "tried":
        return (
            f": rank {rank} has another {name} than rank 0, and validates with it: "
            "weight_sync(is_read=True) has to make buffers common, too"
        )
    its_course, state = dict(evidence.tried)[measure], evidence.saved(measure)
    assert state is not None
    (_, half), *_ = validated(its_course, state, in_half=True)[0].log
    if all(abs(given[name] - half[name]) <= 1e-4 * abs(half[name]) for name in half):
        return ": it is what bfloat16 gives"
    return ""


# ---- the curves: weights, losses and metrics against the reference's


def weights(evidence: Evidence) -> Found:
    causes, most = [], 0.0
    for its_course, given in evidence.compared:
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
    for its_course, given in evidence.compared:
        wanted = evidence.reference(its_course)
        names = {name for _, numbers in wanted.log for name in numbers if belongs(name)}
        if its_course is evidence.recipe_course:
            names = _comparable(names, evidence.separable.others)
        apart = logs_compared(given.log, wanted, names)
        most = max(most, apart.most)
        if apart.where:
            causes.append(f"{its_course.recipe.name}: apart {apart.where}")
    return Found(_of_courses(evidence), f"{most:.1e}", "; ".join(causes))


def _comparable(names: Iterable[str], others: frozenset[str]) -> set[str]:
    """Where some metric is no mean over rows, what `summarize` makes of it is none either."""
    if not others:
        return set(names)
    kept = {"loss", "lr", "grad_norm"}
    return {name for name in names if name.partition("/")[2] in kept - others}


def mean_over_rows(evidence: Evidence) -> Found:
    separable = evidence.separable
    measured = "unlike" if separable.coupled else "alike"
    is_void = not separable.compared
    return Found(separable.compared, "-" if is_void else measured, separable.coupled, is_void)


def float32(evidence: Evidence) -> Found:
    its_course = course.large()
    given, wanted = evidence.main["float32"], evidence.reference(its_course)
    apart = weights_compared(given.weights, wanted.weights)
    names = {f"{kind}/{name}" for kind in ("step", "train", "val") for name in ("loss", "mae")}
    logs = logs_compared(given.log, wanted, names, its_course.tolerance)
    cause = ""
    if not apart.most <= its_course.tolerance:
        still = _share_unmoved(given, its_course)
        why = "it is computed in fewer digits than float32's, or from other rows"
        if still > 0.5:
            why = f"{still:.0%} of its weights never moved: gradients are left out"
        cause = (
            f"{its_course.recipe.name} ends with other weights after batches of "
            f"{its_course.batch_size} in float32, {apart.where} ({apart.most:.1e} apart): {why}"
        )
    elif logs.where:
        cause = f"the weights are right, but the log is apart {logs.where}"
    compared = f"batches of {its_course.batch_size}, 9,889 weights, to {its_course.tolerance:g}"
    return Found(compared, f"{max(apart.most, logs.most):.1e}", cause)


def _share_unmoved(given: Curve, its_course: Course) -> float:
    start = its_course.build()[0].state_dict()
    still = sum(int((weight == start[name]).sum()) for name, weight in given.weights)
    return still / sum(weight.numel() for _, weight in given.weights)


def accumulation(evidence: Evidence) -> Found:
    return _course(evidence, "accumulation", course.accumulating(), "5 batches an update, then 2")


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
    logs = logs_compared(given.log, wanted, names)
    cause = ""
    if not apart.most <= TOLERANCE:
        cause = _training_cause(evidence, its_course, given, apart)
    elif logs.where:
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
        for its_course, _ in evidence.compared
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
    total = [count * (count + 1) / 2, count]
    wanted: dict[str, Any] = {"reduce": total, "tally": total}
    wrongs = []
    for rank, given in enumerate(evidence.of_each("collectives")):
        for kind, value in values_of(0).items():
            all_values = [values_of(other)[kind] for other in range(count)]
            wanted |= {f"gather of {kind}": [] if rank else all_values, f"share of {kind}": value}
        wrongs += [
            f"{name} gave {given[name]} in rank {rank}, not {value}"
            for name, value in wanted.items()
            if given[name] != value
        ]
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


def random_numbers(evidence: Evidence) -> Found:
    """A replica in a step draws what no other does, and again what it would have drawn."""
    drawn: list[list[float]] = [note["drawn"] for note in evidence.of_each("tried")]
    numbers = [number for of_rank in drawn for number in of_rank]
    twice = len(numbers) - len(set(numbers))
    cause = ""
    if twice:
        alike = [rank for rank, its in enumerate(drawn) if rank and its == drawn[0]]
        who = f"{twice} of {len(numbers)} random numbers were drawn before"
        if alike:
            who = f"rank {shown(alike)} draws the random numbers of rank 0"
        cause = f"{who}, so that dropout drops the same units: each rank, in each step, draws anew"
    elif _has_lost_randomness(evidence):
        cause = (
            "a run that goes on within an epoch draws other random numbers than one that never "
            "stopped: their state is lost on the way through `gather`, or seeded over"
        )
    return Found("each replica's, and a resume's", f"{counted(twice, 'number')} twice", cause)


def _has_lost_randomness(evidence: Evidence) -> bool:
    drawn = [(note["tried"]["drawn"], note["resumed"].get("drawn", [])) for note in evidence.notes]
    return any(rest and whole[-len(rest) :] != rest for whole, rest in drawn)


def checkpoint_round_trip(evidence: Evidence) -> Found:
    """Written under the strategy, read here; and read by the strategy, which goes on from it."""
    kept = evidence.main["resumed"]
    compared = "saved, read on the CPU, and trained on"
    cause = kept["error"] and f"its state can't be saved: {kept['error']}"
    cause = cause or _state_cause(evidence) or _takeover_cause(evidence)
    if cause or "resumed" not in kept:
        return Found(compared, "unlike", cause)
    apart = weights_apart(kept["resumed"], evidence.main["tried"]["weights"])
    if not apart <= FLOAT32_TOLERANCE:
        why = "state_dict or load_state_dict loses something"
        if _has_lost_randomness(evidence):
            why = "the random state is lost, see random_numbers"
        cause = (
            f"a run that stops within an epoch and goes on from its checkpoint ends {apart:.1e} "
            f"apart from one that never stopped: {why}"
        )
    return Found(compared, f"{apart:.1e}", cause)


def _state_cause(evidence: Evidence) -> str:
    """What is wrong with the weights in the file, if anything is."""
    try:
        state = checkpoint.load(evidence.plan.directory / CHECKPOINT)
        names, wanted = list(state["task"]), list(Drawing().state_dict())
        if names != wanted:
            mine, its = next(pair for pair in zip(names, wanted, strict=False) if len({*pair}) > 1)
            return (
                f"it has {mine} in place of {its}: wrap must leave the task as it is, "
                "and wrap what holds it"
            )
        checkpoint.load_task(Drawing(), state)
    except UserError as error:
        return str(error)
    trained = dict(evidence.main["resumed"]["weights"])
    unlike = [name for name in wanted if not state["task"][name].equal(trained[name])]
    return f"{unlike[0]} in it is not the one that was trained" if unlike else ""


def _takeover_cause(evidence: Evidence) -> str:
    """Whether another Trainer had what was saved once it had read it."""
    for measure, its_course in evidence.tried:
        note, name = evidence.main[measure], its_course.recipe.name
        if note.get("error"):
            return f"{name}'s state can't be saved: {note['error']}"
        if note.get("unlike"):
            return (
                f"{name}'s {note['unlike']} is not what was saved once it is read again: "
                "state_dict or load_state_dict loses something"
            )
    return ""


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
    "rows_once": Check(("shares", "other_numbers", "counted", "recipe"), rows_once),
    "weights": Check(("shares", "kit", "recipe"), weights),
    "loss_curve": Check(("kit", "recipe"), loss_curve),
    "metrics": Check(("kit", "recipe"), metrics),
    "mean_over_rows": Check(("facts",), mean_over_rows),
    "float32": Check(("float32",), float32),
    "validation": Check(("shares", "validation"), validation),
    "evaluation": Check(("tried", "recipe"), evaluation),
    "predict_order": Check(("predicted", "recipe"), predict_order),
    "accumulation": Check(("shares", "accumulation"), accumulation),
    "few_rows": Check(("shares", "few_rows"), few_rows),
    "weighted": Check(("shares", "weighted"), weighted),
    "gradient_sync": Check(("gradients",), gradient_sync),
    "random_numbers": Check(("tried", "resumed"), random_numbers),
    "logged_once": Check(("logged",), logged_once),
    "checkpoint": Check(("tried", "resumed", "recipe"), checkpoint_round_trip),
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
