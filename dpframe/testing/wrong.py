"""The wrong ways that a strategy may go: what each of them descends, and its name."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dpframe.testing.compare import Weights, weights_apart
from dpframe.testing.course import Course
from dpframe.testing.reference import Way, trained

Cut = Callable[[Tensor], list[Tensor]]
MATCH = 1e-9  # a wrong way that comes this near is the one


class Cuts(NamedTuple):
    """From the rows of a batch to the shares that have any, as the strategy cuts them."""

    all: Cut  # of all replicas
    main: Cut  # of the main process's
    replicas: int


def why_these_weights(course: Course, weights: Weights, cuts: Cuts) -> str:
    """The wrong way that gives these weights, or an empty text."""
    ways = [*_of_gradients(cuts.replicas), *_of_shares(cuts)]
    if course.accumulate > 1:
        ways += _of_batches(course.accumulate)
    for words, way in ways:
        if weights_apart(weights, trained(course, way).weights, MATCH).most < MATCH:
            return words
    return ""


def why_this_mean(mean: float, rows: int, batch_size: int, cuts: Cuts) -> str:
    """The wrong way that gives this mean of 0², 1² … (rows - 1)², or an empty text."""
    batches = list(torch.arange(rows).split(batch_size))
    for words, way in _of_shares(cuts):
        parts = way(batches)
        whole = sum(factor for _, factor in parts)
        value = sum(float(part.double().square().mean()) * factor / whole for part, factor in parts)
        if abs(mean - value) <= MATCH * max(1.0, abs(mean)):
            return words
    return ""


def _of_shares(cuts: Cuts) -> Iterator[tuple[str, Way]]:
    def by_rows(cut: Cut, times: int = 1) -> Way:
        return lambda batches: [
            (share, times * len(share) / _rows(batches))
            for batch in batches
            for share in cut(batch)
        ]

    def evenly(replicas: int = 0) -> Way:
        return lambda batches: [
            (share, len(batch) / _rows(batches) / (replicas or len(cuts.all(batch))))
            for batch in batches
            for share in cuts.all(batch)
        ]

    yield "the rows of the shares, which are not the batch's: see rows_once", by_rows(cuts.all)
    means = "the mean of the replicas' means,"
    yield f"{means} not the mean over all rows", evenly()
    yield f"{means} with 0 for a replica without a row", evenly(cuts.replicas)
    for times in (1, cuts.replicas):
        words = "the main process's own rows alone: nothing is summed over the processes"
        yield words, by_rows(cuts.main, times)


def _of_gradients(replicas: int) -> Iterator[tuple[str, Way]]:
    def times(factor: float) -> Way:
        return lambda batches: [(b, factor * len(b) / _rows(batches)) for b in batches]

    yield (
        f"{replicas} times the gradient: the replicas' gradients are summed, and averaged_over "
        "says that they are averaged",
        times(replicas),
    )
    yield (
        f"1/{replicas} of the gradient: the replicas' gradients are averaged, and averaged_over "
        "says that they are summed",
        times(1 / replicas),
    )


def _of_batches(accumulate: int) -> Iterator[tuple[str, Way]]:
    def evenly(divided_by: int | None) -> Way:
        return lambda batches: [(b, 1 / (divided_by or len(batches))) for b in batches]

    def some(kept: slice) -> Way:
        return lambda batches: [(b, len(b) / _rows(batches)) for b in batches[kept]]

    yield "the mean of the micro-batches' means, though they have other rows", evenly(None)
    yield "the sum of the micro-batches' means", evenly(1)
    yield (
        f"the micro-batches' means over {accumulate}, though the epoch's last update has fewer",
        evenly(accumulate),
    )
    yield "each update's last micro-batch: the others are lost", some(slice(-1, None))
    for count in range(1, accumulate):
        yield f"each update's first {count} micro-batches: the others are lost", some(slice(count))


def _rows(batches: list[Tensor]) -> int:
    return sum(map(len, batches))
