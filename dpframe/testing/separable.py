"""Which numbers of a recipe are means over its rows: only those can be alike on every strategy."""

from typing import Any, NamedTuple

import torch

from dpframe.data import move
from dpframe.testing.course import Course, why_not
from dpframe.testing.reference import Sums

NEAR = 1e-9


class Separable(NamedTuple):
    """`reason` is why the curve can't be compared; `others` are metrics that are no such means."""

    reason: str = ""
    others: frozenset[str] = frozenset()


def separable(course: Course) -> Separable:
    """Tries it: a batch's numbers against the means of what its halves give."""
    task, data = course.build()
    if reason := why_not(task):
        return Separable(reason)
    task.double().train()
    data.setup()
    train: Any = data.train_dataset()
    rows = torch.arange(min(course.batch_size, len(train)))
    whole, halves = Sums(), Sums()
    with torch.no_grad():
        for sums, parts in ((whole, [rows]), (halves, rows.tensor_split(2))):
            for part in filter(len, parts):
                batch = data.collate([train[int(row)] for row in part])
                sums.add(task.training_step(move(batch, torch.device("cpu"), torch.float64)), part)
    one, two = whole.means(), halves.means()
    apart = frozenset(name for name in one if not _is_near(one[name], two[name]))
    if "loss" not in apart:
        return Separable(others=apart)
    return Separable(
        f"the loss of its first {len(rows)} rows is {one['loss']:.6g} in one batch and "
        f"{two['loss']:.6g} in two: it is no mean over rows, or draws random numbers"
    )


def _is_near(one: float, two: float) -> bool:
    return abs(one - two) <= NEAR * max(abs(one), abs(two), 1e-300) or one != one
