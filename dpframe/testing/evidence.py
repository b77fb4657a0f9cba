"""What all processes noted, and what the reference gives, made when it is first asked for."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from dpframe import checkpoint
from dpframe.testing import course
from dpframe.testing.course import Course
from dpframe.testing.measure import Note, Plan
from dpframe.testing.reference import Curve, Separable, separable, trained
from dpframe.testing.wrong import Cuts


@dataclass
class Evidence:
    plan: Plan
    notes: list[Note]  # of each process, by rank
    returned: object  # what `launch` gave
    left: list[str]  # what came to the caller's process with the job, and stayed
    has_failed: bool  # the job, with an exception

    def __post_init__(self) -> None:
        self._curves: dict[Course, Curve] = {}

    @property
    def main(self) -> Note:
        return next((n for n in self.notes if n.get("facts", {}).get("is_main")), self.notes[0])

    @property
    def replicas(self) -> int:
        return self.main["facts"]["replicas"]

    @property
    def processes(self) -> int:
        return len(self.notes)

    def has(self, name: str) -> bool:
        """Whether every process came so far."""
        return bool(self.notes) and all(name in note for note in self.notes)

    def of_each(self, name: str) -> list:
        return [note[name] for note in self.notes]

    def reference(self, its_course: Course) -> Curve:
        if its_course not in self._curves:
            self._curves[its_course] = trained(its_course)
        return self._curves[its_course]

    @cached_property
    def recipe_course(self) -> Course | None:
        return None if self.plan.recipe is None else course.of(self.plan.recipe, self.replicas)

    @cached_property
    def separable(self) -> Separable:
        return Separable() if self.recipe_course is None else separable(self.recipe_course)

    @property
    def compared(self) -> list[tuple[Course, Curve]]:
        """The curves to compare: the kit's, and the recipe's."""
        curves = [(course.kit_course(), self.main["kit"])]
        if self.recipe_course is not None and not self.separable.reason:
            state = self.saved("recipe") or {"task": {}}
            curve = Curve(self.main["recipe"]["log"], list(state["task"].items()))
            curves.append((self.recipe_course, curve))
        return curves

    @property
    def tried(self) -> list[tuple[str, Course]]:
        """What was saved and evaluated, by the measure that has it."""
        pairs = [("tried", course.drawing(self.replicas))]
        return pairs + ([("recipe", self.recipe_course)] if self.recipe_course is not None else [])

    def saved(self, measure: str) -> dict[str, Any] | None:
        """The checkpoint's state, if there is one."""
        path = self.plan.directory / f"{measure}.ckpt"
        return checkpoint.load(path) if path.exists() else None

    def shares(self, count: int, kind: str = "tensor") -> list[list[int]]:
        """Of so many rows, in the order of the replicas."""
        return [share for note in self.notes for share in note["shares"][kind][count]]

    @property
    def cuts(self) -> Cuts:
        def all_of(rows: Tensor) -> list[Tensor]:
            return [rows[share] for share in self.shares(len(rows))]

        def own(rows: Tensor) -> list[Tensor]:
            return [rows[share] for share in self.main["shares"]["tensor"][len(rows)]]

        return Cuts(all_of, own)
