"""The checks by name: what each of them needs to be measured, and how it judges that."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from dpframe import checkpoint
from dpframe.errors import UserError, suggestion
from dpframe.testing.compare import INFINITY, Apart, logs_apart, nests_apart, weights_apart
from dpframe.testing.course import TOLERANCE, Course, courses
from dpframe.testing.measure import (
    EVALUATED_BATCH,
    KINDS,
    SIZES,
    Note,
    Plan,
    Run,
    Shares,
    values_of,
)
from dpframe.testing.reference import Separable, evaluated, predictions, reference, separable
from dpframe.testing.report import Finding, counted, shown
from dpframe.testing.wrong import Cuts, why_these_weights, why_this_mean


class Verdict(NamedTuple):
    """What a check compared, what it measured, and the cause in words if something is wrong."""

    compared: str
    measured: str
    cause: str = ""
    is_void: bool = False  # there was nothing to look at


@dataclass
class Evidence:
    """What all processes noted, and what the reference gives beside it."""

    plan: Plan
    notes: list[Note]  # of each process, by rank
    returned: object  # by `launch`
    left: list[str]  # what came with the job and stayed in the process that launched it
    has_failed: bool

    @property
    def main(self) -> Note:
        return next((n for n in self.notes if n.get("facts", {}).get("is_main")), self.notes[0])

    @property
    def replicas(self) -> int:
        return self.main["facts"]["replicas"]

    def has(self, name: str) -> bool:
        """Whether every process came this far."""
        return bool(self.notes) and all(name in note for note in self.notes)

    def of_each(self, name: str) -> list[Any]:
        return [note[name] for note in self.notes]

    @cached_property
    def courses(self) -> dict[str, Course]:
        return courses(self.plan.recipe, self.replicas)

    @cached_property
    def separable(self) -> Separable:
        return separable(self.courses["recipe"]) if "recipe" in self.courses else Separable()

    @property
    def curves(self) -> list[str]:
        """The courses whose curves all strategies share: the kit's, and the recipe's if it can."""
        has_recipe = "recipe" in self.courses and not self.separable.reason
        return ["kit", "recipe"] if has_recipe else ["kit"]

    @property
    def saved(self) -> list[tuple[str, Course, Run]]:
        """The courses that were resumed as well; the recipe only if it trains."""
        names = [name for name in ("drawing", "recipe") if name in self.courses]
        return [
            (name, self.courses[name], self.main[name]) for name in names if self.main[name].steps
        ]

    def shares(self, count: int, kind: str = "tensor") -> Shares:
        """Of that many rows, in the order of the replicas."""
        return [share for note in self.notes for share in note["shares"][kind][count]]

    @property
    def cuts(self) -> Cuts:
        def all_of(rows: Tensor) -> list[Tensor]:
            return [rows[share] for share in self.shares(len(rows)) if share]

        def main(rows: Tensor) -> list[Tensor]:
            return [rows[share] for share in self.main["shares"]["tensor"][len(rows)] if share]

        return Cuts(all_of, main, self.replicas)


# ---- the job: who is who, who does what, and what is left when it is over


def launch(evidence: Evidence) -> Verdict:
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
    return Verdict(
        "ranks, the main one, what launch returns", counted(len(facts), "process"), cause
    )


def collectives(evidence: Evidence) -> Verdict:
    count = len(evidence.notes)
    total = [count * (count + 1) / 2, count]
    expected: dict[str, Any] = {"reduce": total, "tally": total}
    wrong = []
    for rank, actual in enumerate(evidence.of_each("collectives")):
        for kind, value in values_of(0).items():
            all_values = [values_of(other)[kind] for other in range(count)]
            expected |= {f"gather of {kind}": [] if rank else all_values, f"share of {kind}": value}
        wrong += [
            f"{name} gave {actual[name]} in rank {rank}, not {value}"
            for name, value in expected.items()
            if actual[name] != value
        ]
    meaning = (
        "reduce is the sum, so is tally, gather the main process's list by rank, share its value"
    )
    cause = f"{wrong[0]}: {meaning}" if wrong else ""
    return Verdict("reduce, gather and share", f"{len(wrong)} wrong", cause)


def logged_once(evidence: Evidence) -> Verdict:
    logs = [run.log for run in evidence.of_each("kit")]
    times = Counter((step, name) for log in logs for step, numbers in log for name in numbers)
    writers = [rank for rank, log in enumerate(logs) if log]
    compared = "what every process's logger got"
    if not times:
        return Verdict(compared, "0 times", "nothing was logged: `logger` must keep the main one's")
    (step, name), most = times.most_common(1)[0]
    cause = ""
    if writers != [evidence.main["facts"]["rank"]]:
        cause = (
            f"{name} of step {step} was logged {counted(most, 'time')}, by the ranks "
            f"{shown(writers)}: `logger` must return the loggers in the main process alone"
        )
    return Verdict(compared, counted(most, "time"), cause)


def gradient_sync(evidence: Evidence) -> Verdict:
    """Of an update's micro-batches only the last one's backward may share gradients."""
    compared = "3 micro-batches of one update"
    if len(evidence.notes) == 1:
        return Verdict(compared, "1 process", is_void=True)
    seen = [run.seen["gradients"][:3] for run in evidence.of_each("gradients")]
    is_shared = [
        not any(nests_apart(list(other), list(alike[0]), 1e-9) for other in alike)
        for alike in zip(*seen, strict=False)
    ]
    cause = ""
    if len(is_shared) < 3:
        cause = "no gradient was left on the task's parameters"
    elif not is_shared[-1]:
        cause = "after the last micro-batch the processes still have gradients of their own"
    elif any(is_shared[:-1]):
        cause = (
            f"the gradients were shared {sum(is_shared)} times in one update: grad_sync(False) has "
            "no effect, so that each micro-batch waits for the network, which is slow"
        )
    return Verdict(compared, f"shared {counted(sum(is_shared), 'time')}", cause)


def random_numbers(evidence: Evidence) -> Verdict:
    """A replica in a step draws what no other does, and again what it would have drawn."""
    drawn: list[list[float]] = [run.seen["drawn"] for run in evidence.of_each("drawing")]
    numbers = [number for of_rank in drawn for number in of_rank]
    twice = len(numbers) - len(set(numbers))
    cause = ""
    if twice:
        alike = [rank for rank, its in enumerate(drawn) if rank and its == drawn[0]]
        who = f"{twice} of {len(numbers)} random numbers were drawn before"
        if alike:
            who = f"rank {shown(alike)} draws the random numbers of rank 0"
        cause = (
            f"{who}, so that dropout drops the same units: each rank must draw other numbers in "
            "each step"
        )
    elif _has_lost_randomness(evidence):
        cause = (
            "a run that is resumed within an epoch draws other random numbers than one that never "
            "stopped: their state is lost on the way through `gather`, or seeded over"
        )
    return Verdict("each replica's, and a resume's", f"{counted(twice, 'number')} twice", cause)


def _has_lost_randomness(evidence: Evidence) -> bool:
    pairs = [(run.seen["drawn"], run.resumed) for run in evidence.of_each("drawing")]
    return any(
        resumed is not None and whole[-len(resumed.seen["drawn"]) :] != resumed.seen["drawn"]
        for whole, resumed in pairs
    )


def checkpoints(evidence: Evidence) -> Verdict:
    """Saved within an epoch, read by plain torch and by a Trainer, which resumes."""
    compared, most = "saved, read on the CPU, and resumed", 0.0
    for name, course, run in evidence.saved:
        what = course.recipe.name
        if run.error:
            return Verdict(compared, "none", f"{what}'s state can't be saved: {run.error}")
        expected = list(course.build()[0].state_dict())
        names = list(checkpoint.load(evidence.plan.directory / f"{name}.ckpt")["task"])
        if names != expected:
            mine, its = next(
                pair for pair in zip(names, expected, strict=False) if len({*pair}) > 1
            )
            cause = f"it has {mine} in place of {its}: wrap must leave the task as it is"
            return Verdict(compared, "unlike", f"{cause}, and wrap what holds it")
        if run.unlike:
            cause = f"{what}'s {run.unlike} is not what was saved once it is read again"
            return Verdict(compared, "unlike", f"{cause}: state_dict or load_state_dict loses it")
        assert run.resumed is not None
        apart = weights_apart(run.resumed.weights, run.weights, course.tolerance)
        most = max(most, apart.most)
        if apart.where:
            why = "state_dict or load_state_dict loses something"
            if _has_lost_randomness(evidence):
                why = "the random state is lost, see random_numbers"
            cause = f"{what} ends {apart.most:.1e} apart if it stops within an epoch and is resumed"
            return Verdict(compared, f"{apart.most:.1e}", f"{cause}, {apart.where}: {why}")
    return Verdict(compared, f"{most:.1e}")


def shutdown(evidence: Evidence) -> Verdict:
    left = [f"{what}, in the process that launched the job" for what in evidence.left]
    for note in evidence.notes:
        rank = note["facts"]["rank"]
        left += [f"{what}, in rank {rank} after close()" for what in note["leftovers"]]
    cause = f"left behind: {'; '.join(left)}" if left else ""
    return Verdict("processes, threads, ports, process group", f"{len(left)} left", cause)


# ---- the rows: each once and in its order


def rows_once(evidence: Evidence) -> Verdict:
    sizes = evidence.main["shares"]["tensor"]
    others = evidence.main["other_shares"]
    wrong = [_uneven(evidence.shares(n, kind), n, kind) for kind in KINDS for n in sizes]
    wrong += [
        _uneven(shares, count, kind, replicas)
        for replicas, kinds in others.items()
        for kind, cut in kinds.items()
        for count, shares in cut.items()
    ]
    wrong.append(_unread(evidence))
    several = f" on {min(others)} to {max(others)} replicas" if others else ""
    compared = f"shares of {min(sizes)} to {max(sizes)} rows{several}"
    most = max(rows for rows, _ in wrong)
    cause = next((cause for _, cause in wrong if cause), "")  # the one of the fewest rows
    return Verdict(compared, f"{counted(most, 'row')} wrong", cause)


def _uneven(shares: Shares, count: int, kind: str, replicas: int = 0) -> tuple[int, str]:
    """How many rows are wrong in the shares of `count` rows, and how."""
    rows = list(chain.from_iterable(shares))
    if rows == list(range(count)):
        return 0, ""
    seen = Counter(rows)
    wrong = [row for row in {*range(count), *seen} if seen[row] != (row in range(count))]
    sizes = " ".join(str(len(share)) for share in shares)
    where = f" on {counted(replicas, 'replica')}" if replicas else ""
    what = "" if kind == "tensor" else f", as a {kind} as streams have them,"
    cause = f"of a batch of {counted(count, 'row')}{what} the shares{where} have {sizes}"
    if not wrong:
        return 0, f"{cause}, but not in the batch's order: {shown(rows)}"
    if min(seen[row] for row in range(count)) > 0:
        even = len({len(share) for share in shares}) == 1
        why = "the shares are padded to one size" if even else "shares are padded, or overlap"
        return len(wrong), f"{cause}: {why}, row {shown(wrong)} counts twice"
    return len(wrong), f"{cause}: row {shown(wrong)} is missing or twice there"


def _unread(evidence: Evidence) -> tuple[int, str]:
    """Of a recipe that is left out of the curves: an epoch reads each row once."""
    course = evidence.courses.get("recipe")
    if course is None or not course.is_even:
        return 0, ""
    read = Counter(chain.from_iterable(run.read for run in evidence.of_each("recipe")))
    unlike = [row for row, times in sorted(read.items()) if times != course.epochs]
    times = shown(read[row] for row in unlike)
    cause = f"{course.epochs} epochs of {course.recipe.name} read row {shown(unlike)} {times} times"
    return len(unlike), cause if unlike else ""


def predict_order(evidence: Evidence) -> Verdict:
    actual = {n: order for n, (_, order) in evidence.main["evaluated"].items()}
    wrong = [(n, order) for n, order in actual.items() if order != list(range(n))]
    compared = f"predictions of {SIZES[0]} to {SIZES[-1]} rows"
    if not any(actual.values()):
        return Verdict(compared, "none", "predict returned nothing in the main process")
    if not wrong:
        cause = _predicted(evidence)
        return Verdict(compared, "other numbers" if cause else "0 rows wrong", cause)
    count, order = wrong[len(wrong) // 2]
    why = "some are missing or twice there: see rows_once"
    if sorted(order) == list(range(count)):
        why = "shares have to keep the batch's order, and gather the ranks'"
    cause = f"{count} rows came as {shown(order, len(order))}: {why}"
    return Verdict(compared, f"{len(wrong)} of {len(actual)} wrong", cause)


def _predicted(evidence: Evidence) -> str:
    """How the recipe's predictions differ from those of its weights on the CPU."""
    course = evidence.courses.get("recipe")
    if course is None or evidence.main["recipe"].predicted is None:
        return ""
    run: Run = evidence.main["recipe"]
    expected, again = (predictions(course, run.weights, course.batch_size, n) for n in (0, 1))
    apart = nests_apart(run.predicted, expected, TOLERANCE)
    if not apart or nests_apart(again, expected):  # it draws them at random
        return ""
    by_rows = nests_apart(predictions(course, run.weights, 3), expected, TOLERANCE)
    why = "its predict_step returns other numbers for shares than for a batch; " if by_rows else ""
    name = course.recipe.name
    return f"{name} predicts something else than on the CPU: {why}they first differ in {apart}"


# ---- the numbers: weights, losses and metrics beside the reference's


def weights(evidence: Evidence) -> Verdict:
    causes, most = [], 0.0
    kept = [run.weights for run in evidence.of_each("kit")]
    strays = [weights_apart(its, kept[0], TOLERANCE).most for its in kept]
    if max(strays) > TOLERANCE:
        rank, most = strays.index(max(strays)), max(strays)
        causes.append(f"rank {rank} ends with other weights than rank 0 ({most:.1e} apart)")
    for name in evidence.curves:
        apart, cause = _weights(evidence, name)
        most = max(most, apart.most)
        causes += [cause] if cause else []
    return Verdict(_updates(evidence), f"{most:.1e}", "; ".join(causes))


def loss_curve(evidence: Evidence) -> Verdict:
    return _logs(evidence, lambda name: name.endswith("/loss"))


def metrics(evidence: Evidence) -> Verdict:
    return _logs(evidence, lambda name: not name.endswith("/loss"))


def _logs(evidence: Evidence, belongs: Callable[[str], bool]) -> Verdict:
    causes, most = [], 0.0
    for name in evidence.curves:
        course = evidence.courses[name]
        others = evidence.separable.others if name == "recipe" else frozenset()
        apart = _log(evidence, name, belongs, others)
        most = max(most, apart.most)
        causes += [f"{course.recipe.name}: {apart.where}"] if apart.where else []
    return Verdict(_updates(evidence), f"{most:.1e}", "; ".join(causes))


def accumulation(evidence: Evidence) -> Verdict:
    return _course(evidence, "accumulation", "5 batches an update, then 2")


def few_rows(evidence: Evidence) -> Verdict:
    size = evidence.courses["few_rows"].batch_size
    return _course(
        evidence, "few_rows", f"batches of {size} for {counted(evidence.replicas, 'replica')}"
    )


def weighted(evidence: Evidence) -> Verdict:
    return _course(evidence, "weighted", "a mean over weights, not rows")


def float32(evidence: Evidence) -> Verdict:
    course = evidence.courses["float32"]
    size, tolerance = course.batch_size, course.tolerance
    return _course(evidence, "float32", f"batches of {size}, 9,889 weights, to {tolerance:g}")


def _course(evidence: Evidence, name: str, compared: str) -> Verdict:
    apart, cause = _weights(evidence, name)
    # Gradients' norms in float32 add up many squares.
    log = _log(evidence, name, lambda key: name != "float32" or key.endswith(("/loss", "/mae")))
    if not cause and log.where:
        cause = f"the weights are right, but the log is not: {log.where}"
    return Verdict(compared, f"{max(apart.most, log.most):.1e}", cause)


def _weights(evidence: Evidence, name: str) -> tuple[Apart, str]:
    course, actual = evidence.courses[name], evidence.main[name].weights
    apart = weights_apart(actual, reference(course).weights, course.tolerance)
    if not apart.where:
        return apart, ""
    cause = f"{course.recipe.name} ends with other weights, {apart.where} ({apart.most:.1e} apart)"
    if name == "float32":
        start = course.build()[0].state_dict()
        still = sum(int((weight == start[key]).sum()) for key, weight in actual.items())
        part = still / sum(weight.numel() for weight in actual.values())
        why = "it is computed in fewer digits than float32's, or from other rows"
        if part > 0.5:
            why = f"{part:.0%} of its weights never moved: gradients are left out"
        return apart, f"{cause} after batches of {course.batch_size} in float32: {why}"
    why = why_these_weights(course, actual, evidence.cuts) if course.is_small else ""
    return apart, f"{cause}: they follow from {why}" if why else cause


def _log(
    evidence: Evidence,
    name: str,
    belongs: Callable[[str], bool],
    others: frozenset[str] = frozenset(),
) -> Apart:
    course = evidence.courses[name]
    expected = reference(course)
    names = {key for _, numbers in expected.log for key in numbers if belongs(key)}
    actual = evidence.main[name].log
    return logs_apart(actual, expected, _comparable(names, others), course.tolerance)


def _comparable(names: Iterable[str], others: frozenset[str]) -> set[str]:
    """If some metric is no mean over rows, what `summarize` makes of it is none either."""
    kept = {"loss", "lr", "grad_norm"} - others
    return {name for name in names if not others or name.partition("/")[2] in kept}


def _updates(evidence: Evidence) -> str:
    runs = [(evidence.courses[name].recipe.name, evidence.main[name]) for name in evidence.curves]
    return f"updates: {', '.join(f'{run.steps} of {name}' for name, run in runs)}"


def mean_over_rows(evidence: Evidence) -> Verdict:
    separable = evidence.separable
    measured = "unlike" if separable.coupled else "alike"
    is_void = not separable.compared
    return Verdict(separable.compared, "-" if is_void else measured, separable.coupled, is_void)


# ---- evaluation


def validation(evidence: Evidence) -> Verdict:
    """The mean of 0², 1² … (n-1)² is (n-1)(2n-1)/6."""
    actual = {n: mean for n, (mean, _) in evidence.main["evaluated"].items()}
    expected = {n: (n - 1) * (2 * n - 1) / 6 for n in actual}
    apart = {n: abs(actual[n] - mean) / (mean or 1.0) for n, mean in expected.items()}
    most = max(gap if gap == gap else INFINITY for gap in apart.values())
    wrong = [n for n, gap in apart.items() if not gap <= TOLERANCE]
    cause = ""
    if wrong:
        n = EVALUATED_BATCH if EVALUATED_BATCH in wrong else wrong[0]
        cause = f"of 0² to {n - 1}² the mean is {expected[n]:g}; it gave {actual[n]:.6g}"
        why = why_this_mean(actual[n], n, EVALUATED_BATCH, evidence.cuts)
        cause += f", {why}" if why else ""
    return Verdict(f"means over {SIZES[0]} to {SIZES[-1]} rows", f"{most:.1e}", cause)


def evaluation(evidence: Evidence) -> Verdict:
    """What validation reported is what the same weights give on the CPU."""
    causes, most, names = [], 0.0, []
    for name, course, run in evidence.saved:
        if not run.validated:
            continue
        names.append(course.recipe.name)
        try:
            expected, others = evaluated(course, run.weights, run.steps)
        except UserError as error:
            causes.append(str(error))
            continue
        compared = _comparable(expected.log[0][1], others)
        apart = logs_apart([(run.steps, run.validated)], expected, compared, course.tolerance)
        most = max(most, apart.most)
        if apart.where:
            causes.append(
                f"{course.recipe.name} validates other numbers than its weights give on the CPU, "
                f"{apart.where}{_why_evaluated(evidence, name, run)}"
            )
    return Verdict(
        f"validation and the weights of {', '.join(names)}", f"{most:.1e}", "; ".join(causes)
    )


def _why_evaluated(evidence: Evidence, name: str, run: Run) -> str:
    runs: list[Run] = evidence.of_each("drawing")
    if any(True in each.seen["modes"] for each in runs):
        return (
            ": validation_step runs in training mode, where dropout drops and BatchNorm takes the "
            "batch's statistics: what wrap gives for training=False has to stay in eval()"
        )
    for rank, each in enumerate(runs):
        stray = nests_apart(each.weights, runs[0].weights)
        if stray and name == "drawing":
            return (
                f": rank {rank} has another {stray} than rank 0, and validates with it: "
                "weight_sync(is_read=True) has to make buffers common, too"
            )
    half, _ = evaluated(evidence.courses[name], run.weights, run.steps, in_half=True)
    apart = logs_apart([(run.steps, run.validated)], half, half.log[0][1], 1e-4)
    return "" if apart.where else ": they are what bfloat16 gives"


# ---- all of them


class Check(NamedTuple):
    """`needs` are the measures that it looks at."""

    needs: tuple[str, ...]
    judge: Callable[[Evidence], Verdict]


CHECKS: dict[str, Check] = {
    "launch": Check(("facts",), launch),
    "collectives": Check(("collectives",), collectives),
    "rows_once": Check(("shares", "other_shares", "recipe"), rows_once),
    "weights": Check(("shares", "kit", "recipe"), weights),
    "loss_curve": Check(("kit", "recipe"), loss_curve),
    "metrics": Check(("kit", "recipe"), metrics),
    "mean_over_rows": Check(("facts",), mean_over_rows),
    "float32": Check(("float32",), float32),
    "validation": Check(("shares", "evaluated"), validation),
    "evaluation": Check(("drawing", "recipe"), evaluation),
    "predict_order": Check(("evaluated", "recipe"), predict_order),
    "accumulation": Check(("shares", "accumulation"), accumulation),
    "few_rows": Check(("shares", "few_rows"), few_rows),
    "weighted": Check(("shares", "weighted"), weighted),
    "gradient_sync": Check(("gradients",), gradient_sync),
    "random_numbers": Check(("drawing",), random_numbers),
    "logged_once": Check(("kit",), logged_once),
    "checkpoint": Check(("drawing", "recipe"), checkpoints),
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
    return tuple(need for need in needs if need not in ("facts", "leftovers"))


def judged(name: str, evidence: Evidence) -> Finding:
    check = CHECKS[name]
    if not all(map(evidence.has, check.needs)):
        return Finding(name, "", "not measured", None)
    found = check.judge(evidence)
    passed = None if found.is_void else not found.cause
    return Finding(name, found.compared, found.measured, passed, found.cause)
