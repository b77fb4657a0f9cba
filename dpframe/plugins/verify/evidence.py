"""What a job has left for the checks to judge, and the words that they say it in."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from dpframe.plugins.verify import alone
from dpframe.plugins.verify import reference as plain
from dpframe.plugins.verify.course import Course, courses
from dpframe.plugins.verify.distance import Curve, weights_apart
from dpframe.plugins.verify.measure import Note, Plan, Run, Shares
from dpframe.plugins.verify.separable import Separable, separable

SHOWN = 6  # numbers of a long list


@dataclass(frozen=True)
class Finding:
    """`passed` is None where there was nothing to look at, or not all."""

    check: str
    compared: str
    measured: str
    passed: bool | None
    cause: str = ""
    left_out: str = ""  # what was not looked at: "by choice: ", or "left out: ", and why

    @property
    def result(self) -> str:
        if self.left_out:
            return self.left_out
        return {True: "pass", False: "FAIL", None: "-"}[self.passed]


class Outcome(NamedTuple):
    """What a check has compared, and how far apart it was."""

    compared: str
    measured: float | str | None  # None: there was nothing to look at
    cause: str = ""  # in words, if something is wrong
    left_out: str = ""  # as a Finding's


@dataclass
class Evidence:
    """What all processes noted, and what the reference gives beside it."""

    plan: Plan
    notes: list[Note]  # of each process, by rank
    returned: object  # by `launch`
    left: list[str]  # what came with the job and stayed in the process that launched it
    failure: str  # where and how the job failed

    @property
    def main(self) -> Note:
        return self.notes[0]

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
        recipe = self.courses.get("recipe")
        return Separable() if recipe is None else separable(recipe, self.replicas)

    @cached_property
    def needs_trainer(self) -> bool:
        """The recipe's task, for a single step."""
        recipe = self.courses.get("recipe")
        return recipe is not None and recipe.build()[0].adapter.needs_trainer

    @cached_property
    def _recipe_alone(self) -> Curve:
        return alone.reference(self.courses["recipe"])

    def expected(self, name: str) -> Curve:
        """What a course gives on one process."""
        if name == "recipe" and self.needs_trainer:
            return self._recipe_alone
        return plain.reference(self.courses[name])

    def evaluate(self, name: str, course: Course, run: Run) -> tuple[Curve, frozenset[str]]:
        """What its weights validate on one process, and the metrics that are no means over rows."""
        by = alone if name == "recipe" and self.needs_trainer else plain
        return by.evaluate(course, run.weights, run.steps)

    @property
    def curves(self) -> list[str]:
        """The courses whose curves all strategies share: the kit's, and the recipe's if it can."""
        has_recipe = "recipe" in self.courses and self.separable.has_curve
        return ["kit", "recipe"] if has_recipe else ["kit"]

    def left_out(self, parts: Iterable[str]) -> str:
        """Of the recipe's curve; the one by logical shares has all of it."""
        has_bits = "bits" in self.courses and self.has("bits")
        return "" if has_bits else self.separable.left_out(parts)

    @cached_property
    def tolerances(self) -> tuple[float, float]:
        """Of the recipe's weights, and of what it logs: larger if rounding alone moves the weights
        farther."""
        course = self.courses["recipe"]
        expected, least = self.expected("recipe").weights, course.tolerance
        most = weights_apart(self.main["recipe"].weights, expected, least).most
        if not least < most <= plain.FARTHEST or self.needs_trainer:
            return least, least
        weights, log = plain.sensitivity(course, self.replicas)
        return max(least, weights), max(least, log)

    @property
    def saved(self) -> list[tuple[str, Course, Run]]:
        """The courses that were resumed as well; the recipe only if it trains."""
        names = [name for name in ("watched", "recipe") if name in self.courses]
        return [(n, self.courses[n], self.main[n]) for n in names if self.main[n].steps]

    @property
    def has_lost_randomness(self) -> bool:
        """Replicas that are threads of a process note what they draw in any order."""
        pairs = [(run.seen["drawn"], run.resumed.seen["drawn"]) for run in self.of_each("watched")]
        return any(sorted(whole[-len(rest) :]) != sorted(rest) for whole, rest in pairs)

    def shares(self, count: int, kind: str = "tensor", replicas: int = 0) -> Shares:
        """The shares of that many rows, in the order of the replicas."""
        notes = [self.main] if replicas else self.notes
        return [share for note in notes for share in note["shares"][replicas, kind, count]]


def bits_apart(mine: Run, traces: dict[str, int], wanted: Run) -> list[str]:
    """What differs: first in the first update, then what is logged, and the weights at the end."""
    places = [name for name, value in wanted.traces.items() if traces.get(name) != value]
    logged = [
        (step, f"{name} at step {step}")
        for name, points in wanted.log.items()
        for (step, value), other in zip(points, mine.log.get(name, []), strict=False)
        if "samples_per_second" not in name and other != (step, value)
    ]
    places += [place for _, place in sorted(logged)]
    weights = wanted.weights.items()
    return places + [f"{n} at the end" for n, w in weights if not torch.equal(w, mine.weights[n])]


def format_count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def format_list(numbers: Iterable[int], most: int = SHOWN) -> str:
    texts = list(map(str, numbers))
    return " ".join(texts[:most]) + (" …" if len(texts) > most else "")
