"""The checks by name: what each of them needs to be measured, and how it judges that."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Set
from functools import partial
from itertools import chain

from dpframe import UserError
from dpframe.plugin import checkpoint, suggestion
from dpframe.plugins.verify import reference as plain
from dpframe.plugins.verify.course import TOLERANCE
from dpframe.plugins.verify.distance import (
    Apart,
    largest,
    logs_apart,
    nests_apart,
    relative,
    weights_apart,
)
from dpframe.plugins.verify.evidence import (
    Evidence,
    Finding,
    Outcome,
    bits_apart,
    format_count,
    format_list,
)
from dpframe.plugins.verify.measure import EVALUATED_BATCH, EVALUATED_SIZES, Run, run_alone

ALL = ("weights", "loss", "metrics")


# ---- the job: who is who, who does what, and what is left when it is over


def launch(evidence: Evidence) -> Outcome:
    causes, facts = [evidence.failure], evidence.of_each("facts")
    for rank, fact in enumerate(facts):
        due = {"rank": rank, "world_size": len(facts), "is_main": rank == 0}
        for name, value in (due | {"replicas": len(fact["devices"])}).items():
            if fact[name] != value:
                where = f"in process {rank} of {len(facts)}"
                causes.append(f"{name} is {fact[name]} {where}, not {value}")
    if not (facts or evidence.failure):
        causes.append("launch did not call `run` in any process")
    elif not evidence.failure and evidence.returned != facts[0]["pid"]:
        causes.append("launch did not return what `run` returned in the main process")
    measured = "failed" if evidence.failure else format_count(len(facts), "process")
    cause = "; ".join(filter(None, causes[:2]))
    return Outcome("ranks, the main one, what launch returns", measured, cause)


def collectives(evidence: Evidence) -> Outcome:
    wrong = list(chain.from_iterable(evidence.of_each("collectives")))
    meaning = "sum and sum_numbers add up, gather is the main process's list by rank, broadcast its"
    cause = f"{wrong[0]}: {meaning} value" if wrong else ""
    return Outcome("sum, sum_numbers, gather and broadcast", f"{len(wrong)} wrong", cause)


def logged_once(evidence: Evidence) -> Outcome:
    writers = [rank for rank, run in enumerate(evidence.of_each("kit")) if run.log]
    times, cause = format_count(len(writers), "time"), ""
    if writers != [0]:
        cause = (
            f"each number was logged {times}, by the ranks {format_list(writers) or 'none'}: "
            "`logger` must return the loggers in the main process alone"
        )
    return Outcome("what every process's logger got", times, cause)


def gradient_sync(evidence: Evidence) -> Outcome:
    """Only the backward of an update's last micro-batch may share gradients."""
    compared = "3 micro-batches of one update"
    if len(evidence.notes) == 1 or evidence.main["facts"]["shards_weights"]:  # none are left
        return Outcome(compared, None)
    seen = [run.seen["gradients"][:3] for run in evidence.of_each("watched")]
    is_shared = [
        not any(nests_apart(other, alike[0], 1e-9) for other in alike)
        for alike in zip(*seen, strict=False)
    ]
    times, cause = format_count(sum(is_shared), "time"), ""
    if len(is_shared) < 3:
        cause = "no gradient was left on the task's parameters"
    elif not is_shared[-1]:
        cause = "after the last micro-batch the processes still have gradients of their own"
    elif sum(is_shared) > 1:
        cause = (
            f"the gradients were shared {times} in one update: grad_sync(False) has "
            "no effect, so that each micro-batch waits for the network, which is slow"
        )
    return Outcome(compared, f"shared {times}", cause)


def random_numbers(evidence: Evidence) -> Outcome:
    """A replica in a step draws what no other does, and again what it would have drawn."""
    drawn: list[list[float]] = [run.seen["drawn"] for run in evidence.of_each("watched")]
    numbers = list(chain.from_iterable(drawn))
    twice, cause = len(numbers) - len(set(numbers)), ""
    if twice:
        alike = [rank for rank, its in enumerate(drawn) if rank and its == drawn[0]]
        who = f"{twice} of {len(numbers)} random numbers were drawn before"
        if alike:
            who = f"rank {format_list(alike)} draws the random numbers of rank 0"
        cause = (
            f"{who}, so that dropout drops the same units: each rank must draw other numbers in "
            "each step"
        )
    elif evidence.has_lost_randomness:
        cause = (
            "a run that is resumed within an epoch draws other random numbers than one that never "
            "stopped: their state is lost on the way through `gather`, or seeded over"
        )
    return Outcome(
        "each replica's, and a resume's", f"{format_count(twice, 'number')} twice", cause
    )


def checkpoints(evidence: Evidence) -> Outcome:
    """Saved within an epoch, read by plain torch and by a Trainer, which resumes."""
    outcome, most = partial(Outcome, "saved, read on the CPU, and resumed"), 0.0
    for name, course, run in evidence.saved:
        what = course.recipe.name
        expected = list(course.build()[0].state_dict())
        names = list(checkpoint.load(evidence.plan.directory / f"{name}.ckpt")["task"])
        if names != expected:
            pairs = zip(names, expected, strict=False)
            mine, its = next(pair for pair in pairs if len({*pair}) > 1)
            cause = f"it has {mine} in place of {its}: wrap must leave the task as it is"
            return outcome("unlike", f"{cause}, and wrap what holds it")
        assert run.resumed is not None
        if run.resumed.unlike:
            cause = f"{what}'s {run.resumed.unlike} is not what was saved once it is read again"
            return outcome("unlike", f"{cause}: state_dict or load_state_dict loses it")
        apart = weights_apart(run.resumed.weights, run.weights, course.tolerance)
        most = max(most, apart.most)
        if apart.where:
            why = "state_dict or load_state_dict loses something"
            if evidence.has_lost_randomness:
                why = "the random state is lost, see random_numbers"
            cause = f"{what} ends {apart.most:.1e} apart if it stops within an epoch and is resumed"
            return outcome(most, f"{cause}, {apart.where}: {why}")
    return outcome(most)


def shutdown(evidence: Evidence) -> Outcome:
    left = [f"{what}, in the process that launched the job" for what in evidence.left]
    for rank, leftovers in enumerate(evidence.of_each("leftovers")):
        left += [f"{what}, in rank {rank} after close()" for what in leftovers]
    cause = f"left behind: {'; '.join(left)}" if left else ""
    return Outcome("processes, threads, ports, process group", f"{len(left)} left", cause)


# ---- the rows: each once and in its order


def rows_once(evidence: Evidence) -> Outcome:
    keys = evidence.main["shares"]
    counts = {count for *_, count in keys}
    replicas = {replicas for replicas, *_ in keys if replicas}
    wrong = [*(_uneven(evidence, *key) for key in keys), _unread(evidence)]
    several = f" on {min(replicas)} to {max(replicas)} replicas" if replicas else ""
    return Outcome(
        f"shares of {min(counts)} to {max(counts)} rows{several}",
        f"{format_count(max(rows for rows, _ in wrong), 'row')} wrong",
        next((cause for _, cause in wrong if cause), ""),  # the one of the fewest rows
    )


def _uneven(evidence: Evidence, replicas: int, kind: str, count: int) -> tuple[int, str]:
    """How many rows are wrong in the shares of `count` rows, and how."""
    shares = evidence.shares(count, kind, replicas)
    rows = list(chain.from_iterable(shares))
    if rows == list(range(count)):
        return 0, ""
    seen = Counter(rows)
    wrong = [row for row in {*range(count), *seen} if seen[row] != (row in range(count))]
    sizes = " ".join(str(len(share)) for share in shares)
    what = "" if kind == "tensor" else f", as a {kind} as streams have them,"
    where = f" on {format_count(replicas, 'replica')}" if replicas else ""
    cause = f"of a batch of {format_count(count, 'row')}{what} the shares{where} have {sizes}"
    if not wrong:
        return 0, f"{cause}, but not in the batch's order: {format_list(rows)}"
    why = f"row {format_list(wrong)} is missing or twice there"
    if min(seen[row] for row in range(count)) > 0:
        why = f"they are padded, or overlap; row {format_list(wrong)} counts twice"
    return len(wrong), f"{cause}: {why}"


def _unread(evidence: Evidence) -> tuple[int, str]:
    """Of a recipe that is left out of the curves, checks that an epoch reads each row once."""
    course = evidence.courses.get("recipe")
    if course is None or not course.is_even:
        return 0, ""
    read = Counter(chain.from_iterable(run.read for run in evidence.of_each("recipe")))
    unlike = [row for row, times in sorted(read.items()) if times != course.epochs]
    rows, times = format_list(unlike), format_list(read[row] for row in unlike)
    cause = f"{course.epochs} epochs of {course.recipe.name} read row {rows} {times} times"
    return len(unlike), cause if unlike else ""


def predict_order(evidence: Evidence) -> Outcome:
    actual = {n: order for n, (_, order) in evidence.main["evaluated"].items()}
    wrong = [(n, order) for n, order in actual.items() if order != list(range(n))]
    outcome = partial(Outcome, f"predictions of {EVALUATED_SIZES[0]} to {EVALUATED_SIZES[-1]} rows")
    if not any(actual.values()):
        return outcome("none", "predict returned nothing in the main process")
    if not wrong:
        cause = _predicted(evidence)
        return outcome("other numbers" if cause else "0 rows wrong", cause)
    count, order = wrong[len(wrong) // 2]
    why = "some are missing or twice there: see rows_once"
    if sorted(order) == list(range(count)):
        why = "shares have to keep the batch's order, and gather the ranks'"
    cause = f"{count} rows came as {format_list(order, len(order))}: {why}"
    return outcome(f"{len(wrong)} of {len(actual)} wrong", cause)


def _predicted(evidence: Evidence) -> str:
    """How the recipe's predictions differ from those of its weights on the CPU."""
    course = evidence.courses.get("recipe")
    run: Run = evidence.main["recipe"]
    if course is None or run.predicted is None:
        return ""
    predict = partial(plain.predict, course, run.weights)
    expected = predict(course.batch_size)
    apart = nests_apart(run.predicted, expected, TOLERANCE)
    if not apart or nests_apart(predict(course.batch_size, seed=1), expected):  # drawn at random
        return ""
    by_rows = nests_apart(predict(3), expected, TOLERANCE)
    why = "its predict_step returns other numbers for shares than for a batch; " if by_rows else ""
    what = f"{course.recipe.name} predicts something else than on the CPU"
    return f"{what}: {why}they first differ in {apart}"


# ---- the numbers: weights, losses and metrics beside the reference's


def curves(evidence: Evidence, parts: Iterable[str] = ALL, of: str = "") -> Outcome:
    """Compares the `weights`, `loss` and `metrics` of a course, or of all that have a curve."""
    names = [of] if of else evidence.curves
    steps = (f"{evidence.main[n].steps} of {evidence.courses[n].recipe.name}" for n in names)
    compared = evidence.courses[of].compared if of else f"updates: {', '.join(steps)}"
    causes, most = dict[str, str](), 0.0
    for name in names:
        for part in parts:
            apart = _weights(evidence, name) if part == "weights" else _log(evidence, name, part)
            most = max(most, apart.most)
            if apart.where:
                causes.setdefault(name, apart.where)  # the rest follows from the first
    left_out = "" if of else evidence.left_out(parts)
    return Outcome(compared, most, "; ".join(causes.values()), left_out)


def _weights(evidence: Evidence, name: str) -> Apart:
    course, runs = evidence.courses[name], evidence.of_each(name)
    actual, causes = runs[0].weights, []
    tolerance = evidence.tolerances[0] if name == "recipe" else course.tolerance
    apart = weights_apart(actual, evidence.expected(name).weights, tolerance)
    if apart.where:
        causes = [f"{course.recipe.name} ends with other weights, {apart.where}"]
    kept = [run.weights for run in runs] if course.is_small else [actual]
    strays = [weights_apart(weights, actual, course.tolerance).most for weights in kept]
    if max(strays) > course.tolerance:
        rank = strays.index(max(strays))
        causes.append(f"rank {rank} ends with other ones than rank 0 ({max(strays):.1e} apart)")
    if name == "float32" and causes:
        start = course.build()[0].state_dict()
        still = sum(int((weight == start[key]).sum()) for key, weight in actual.items())
        part = still / sum(weight.numel() for weight in actual.values())
        why = "it is computed in fewer digits than float32's, or from other rows"
        if part > 0.5:
            why = f"{part:.0%} of its weights never moved: gradients are left out"
        causes.append(f"after batches of {course.batch_size} in float32 {why}")
    return Apart(max(apart.most, *strays), "; ".join(causes))


def _log(evidence: Evidence, name: str, part: str) -> Apart:
    course, expected, of_recipe = evidence.courses[name], evidence.expected(name), name == "recipe"
    tolerance = evidence.tolerances[1] if of_recipe else course.tolerance
    others = evidence.separable.others if of_recipe else frozenset()
    names = {key for key in expected.log if key.endswith("/loss") == (part == "loss")}
    comparable = _comparable(names, others)
    apart = logs_apart(evidence.main[name].log, expected, comparable, tolerance)
    return Apart(apart.most, apart.where and f"{course.recipe.name}: {apart.where}")


def _comparable(names: Iterable[str], others: Set[str]) -> set[str]:
    """If some metric is no mean over rows, what `summarize` makes of it is none either."""
    kept = {"loss", "lr", "grad_norm"} - others
    return {name for name in names if not others or name.partition("/")[2] in kept}


def mean_over_rows(evidence: Evidence) -> Outcome:
    separable = evidence.separable
    measured = "unlike" if separable.coupled else "alike"
    return Outcome(separable.compared, measured if separable.compared else None, separable.coupled)


def gathered(evidence: Evidence, of: str = "gathered") -> Outcome:
    if any(run.refusal for run in evidence.of_each(of)):
        return Outcome(f"none: {evidence.main['facts']['name']} has no gather_rows", None)
    return curves(evidence, of=of)


# ---- evaluation


def validation(evidence: Evidence) -> Outcome:
    """The mean of 0², 1² … (n-1)² is (n-1)(2n-1)/6."""
    actual = {n: mean for n, (mean, _) in evidence.main["evaluated"].items()}
    expected = {n: (n - 1) * (2 * n - 1) / 6 for n in actual}
    apart = relative(list(actual.values()), list(expected.values()), least=0.0)
    wrong = [n for n, gap in zip(actual, apart.tolist(), strict=True) if gap > TOLERANCE]
    cause = ""
    if wrong:
        n = EVALUATED_BATCH if EVALUATED_BATCH in wrong else wrong[0]
        cause = f"of 0² to {n - 1}² the mean is {expected[n]:g}; it gave {actual[n]:.6g}"
    compared = f"means over {EVALUATED_SIZES[0]} to {EVALUATED_SIZES[-1]} rows"
    return Outcome(compared, largest(apart), cause)


def evaluation(evidence: Evidence) -> Outcome:
    """What validation reported is what the same weights give on the CPU."""
    causes, most = [], 0.0
    courses = [(name, course, run) for name, course, run in evidence.saved if run.validated]
    for name, course, run in courses:
        try:
            expected, others = evidence.evaluate(name, course, run)
        except UserError as error:
            causes.append(str(error))
            continue
        comparable = _comparable(expected.log, others)
        apart = logs_apart(run.validated, expected, comparable, course.tolerance)
        most = max(most, apart.most)
        if apart.where:
            causes.append(
                f"{course.recipe.name} validates other numbers than its weights give on the CPU, "
                f"{apart.where}{_why_evaluated(evidence, name)}"
            )
    names = ", ".join(course.recipe.name for _, course, _ in courses)
    return Outcome(f"validation and the weights of {names}", most, "; ".join(causes))


def _why_evaluated(evidence: Evidence, name: str) -> str:
    runs: list[Run] = evidence.of_each("watched")
    if any(True in each.seen["modes"] for each in runs):
        return (
            ": validation_step runs in training mode, where dropout drops and BatchNorm takes the "
            "batch's statistics: what wrap gives for training=False has to stay in eval()"
        )
    for rank, each in enumerate(runs):
        stray = nests_apart(each.weights, runs[0].weights)
        if stray and name == "watched":
            return (
                f": rank {rank} has another {stray} than rank 0, and validates with it: "
                "sync_weights(for_reading=True) has to make buffers common, too"
            )
    return ""


def statistics(evidence: Evidence) -> Outcome:
    """What BatchNorm counts, it counts once a batch, however many replicas compute it."""
    course, weights = evidence.courses["watched"], evidence.main["watched"].weights
    counted = int(next(t for name, t in weights.items() if name.endswith("num_batches_tracked")))
    due = course.epochs * course.rows // course.batch_size
    cause = (
        f"the kit's BatchNorm has counted {counted} batches, and {due} are due: of replicas that "
        "share buffers only the first may change them, and no evaluation may"
    )
    measured = f"{counted} of {format_count(due, 'batch')}"
    return Outcome("batches that BatchNorm counts", measured, cause if counted != due else "")


# ---- logical shares: bits


def bits(evidence: Evidence) -> Outcome:
    """Beside the recipe on one process: the same bits, or where they first differ."""
    course = evidence.courses.get("bits")
    if course is None:
        return Outcome("trainer.logical_replicas is null", None)
    outcome = partial(Outcome, f"{course.logical_replicas} logical shares on one process")
    mine: Run = evidence.main["bits"]
    if not mine.steps:
        return outcome(None)
    device = evidence.main["facts"]["devices"][0]
    wanted = run_alone(course, device, evidence.plan.directory / "alone.ckpt")
    traces = {key: value for run in evidence.of_each("bits") for key, value in run.traces.items()}
    places = bits_apart(mine, traces, wanted)
    cause = ""
    if places:
        cause = f"{course.recipe.name} has other bits than on one process, first in {places[0]}"
    return outcome(f"{format_count(len(places), 'place')} apart", cause)


# ---- all of them

Check = tuple[Callable[[Evidence], Outcome], *tuple[str, ...]]
"""What judges, and the measures that it looks at."""
CHECKS: dict[str, Check] = {
    "launch": (launch,),
    "collectives": (collectives, "collectives"),
    "rows_once": (rows_once, "shares", "recipe"),
    "weights": (partial(curves, parts=["weights"]), "shares", "kit", "recipe"),
    "loss_curve": (partial(curves, parts=["loss"]), "kit", "recipe"),
    "metrics": (partial(curves, parts=["metrics"]), "kit", "recipe"),
    "mean_over_rows": (mean_over_rows, "facts"),
    # Gradients' norms in float32 add up many squares.
    "float32": (partial(curves, parts=["weights", "loss"], of="float32"), "float32"),
    "validation": (validation, "shares", "evaluated"),
    "evaluation": (evaluation, "watched", "recipe"),
    "statistics": (statistics, "watched"),
    "predict_order": (predict_order, "evaluated", "recipe"),
    "accumulation": (partial(curves, of="accumulation"), "shares", "accumulation"),
    "few_rows": (partial(curves, of="few_rows"), "shares", "few_rows"),
    "weighted": (partial(curves, of="weighted"), "shares", "weighted"),
    "gathered": (gathered, "shares", "gathered"),
    "exact_layers": (partial(gathered, of="exact_layers"), "exact_layers"),
    "gradient_sync": (gradient_sync, "watched"),
    "bits": (bits, "bits"),
    "random_numbers": (random_numbers, "watched"),
    "logged_once": (logged_once, "kit"),
    "checkpoint": (checkpoints, "watched", "recipe"),
    "shutdown": (shutdown, "facts", "leftovers"),
}


def choose(only: Collection[str], skip: Collection[str]) -> list[str]:
    for name in (*only, *skip):
        if name not in CHECKS:
            raise UserError(f"there is no check {name}; {suggestion(name, CHECKS)}")
    return [name for name in CHECKS if name not in skip and (not only or name in only)]


def list_measures(names: Collection[str]) -> tuple[str, ...]:
    """What has to be measured for these checks, each once."""
    needs = dict.fromkeys(need for name in names for need in CHECKS[name][1:])
    return tuple(need for need in needs if need not in ("facts", "leftovers"))


def judge(name: str, evidence: Evidence) -> Finding:
    check, *needs = CHECKS[name]
    if not all(map(evidence.has, needs)):
        return Finding(name, "", "not measured", None)
    compared, measured, cause, left_out = check(evidence)
    if measured is None:
        return Finding(name, compared, "-", None)
    measured = measured if isinstance(measured, str) else f"{measured:.1e}"
    passed = None if left_out and not cause else not cause
    return Finding(name, compared, measured, passed, cause, "" if cause else left_out)
