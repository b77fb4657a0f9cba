"""The wrong ways that a strategy may go: what each of them would have given, and its name."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dpframe.testing.course import Course
from dpframe.testing.reference import (
    Measure,
    Way,
    Weights,
    exact,
    trained,
    weight_of,
    weights_apart,
)

Cut = Callable[[Tensor], list[Tensor]]


class Cuts(NamedTuple):
    """A batch's rows in; out the shares as the strategy cuts them."""

    all: Cut  # of all replicas
    own: Cut  # of the main process's


MATCH = 1e-9  # a wrong way that comes so near is the one


def training_cause(course: Course, weights: Weights, cuts: Cuts) -> str:
    """The wrong way that gives these weights, or an empty text."""
    for words, way in _ways(course, cuts):
        if weights_apart(weights, trained(course, way).weights) < MATCH:
            return words
    return ""


def _ways(course: Course, cuts: Cuts) -> Iterator[tuple[str, Way]]:
    cut, replicas = cuts.all, len(cuts.all(torch.arange(1)))
    yield (
        "it is what the rows of the shares give, which are not the batch's: see rows_once",
        (_as_cut(cut)),
    )
    yield "it is what the mean of the replicas' means gives, not the mean over all rows", _per(cut)
    yield (
        "it is what the mean of the replicas' means gives, with 0 for a replica without a row",
        _per(cut, divided_by=replicas),
    )
    yield (
        f"it is what {replicas} times the gradient gives: the replicas' gradients are summed, and "
        "averaged_over says that they are averaged",
        _times(replicas),
    )
    yield (
        f"it is what 1/{replicas} of the gradient gives: the replicas' gradients are averaged, "
        "and averaged_over says that they are summed",
        _times(1 / replicas),
    )
    for factor in (1, replicas):
        yield (
            "it is what the main process's own rows give: the gradients are not shared",
            _own(cuts.own, factor),
        )
    if course.accumulate > 1:
        yield from _accumulating_ways(course.accumulate)


def _accumulating_ways(accumulate: int) -> Iterator[tuple[str, Way]]:
    yield (
        "it is what the mean of the micro-batches' means gives, though they have other rows",
        lambda measure, batches: _losses(measure, batches).mean(),
    )
    yield (
        f"it is what a division by {accumulate} gives, though the epoch's last update has fewer",
        lambda measure, batches: _losses(measure, batches).sum() / accumulate,
    )
    yield (
        "it is what the sum of the micro-batches gives",
        lambda measure, batches: _losses(measure, batches).sum(),
    )
    yield (
        "it is what each update's last micro-batch gives: the others are lost",
        _some_of(slice(-1, None)),
    )
    for count in range(1, accumulate):
        yield (
            f"it is what each update's first {count} micro-batches give: others are lost",
            _some_of(slice(count)),
        )


def _some_of(kept: slice) -> Way:
    def way(measure: Measure, batches: list[Tensor]) -> Tensor:
        return _shares_of(measure, batches[kept], sum(map(len, batches)))

    return way


def _losses(measure: Measure, batches: list[Tensor]) -> Tensor:
    return torch.stack([measure(rows)["loss"] for rows in batches])


def _per(cut: Cut, divided_by: int | None = None) -> Way:
    def way(measure: Measure, batches: list[Tensor]) -> Tensor:
        rows = sum(map(len, batches))
        parts = []
        for batch in batches:
            losses = _losses(measure, _filled(cut(batch)))
            parts.append(losses.sum() / (divided_by or len(losses)) * (len(batch) / rows))
        return torch.stack(parts).sum()

    return way


def _times(factor: float) -> Way:
    return lambda measure, batches: exact(measure, batches) * factor


def _as_cut(cut: Cut) -> Way:
    def way(measure: Measure, batches: list[Tensor]) -> Tensor:
        rows = sum(map(len, batches))
        return _shares_of(measure, [s for b in batches for s in _filled(cut(b))], rows)

    return way


def _own(own: Cut, factor: int) -> Way:
    def way(measure: Measure, batches: list[Tensor]) -> Tensor:
        rows = sum(map(len, batches))
        shares = [share for batch in batches for share in _filled(own(batch))]
        return _shares_of(measure, shares, rows) * factor

    return way


def _shares_of(measure: Measure, shares: list[Tensor], rows: int) -> Tensor:
    outputs = [(measure(share), share) for share in shares]
    return torch.stack([o["loss"] * (weight_of(o, share) / rows) for o, share in outputs]).sum()


def _filled(shares: list[Tensor]) -> list[Tensor]:
    return [share for share in shares if len(share)]


# ---- means


def mean_cause(given: dict[int, float], batch_size: int, cuts: Cuts) -> str:
    """The wrong mean of 0², 1², 2² … that gives these, whatever the number of rows."""
    for words, mean in _means(cuts):
        if all(_is_near(value, mean(_batches(n, batch_size))) for n, value in given.items()):
            return words
    return ""


def _batches(rows: int, batch_size: int) -> list[Tensor]:
    return list(torch.arange(rows).split(batch_size))


def _means(cuts: Cuts) -> Iterator[tuple[str, Callable[[list[Tensor]], float]]]:
    def shares(batches: list[Tensor], cut: Cut = cuts.all) -> list[Tensor]:
        return [share for batch in batches for share in _filled(cut(batch))]

    def lent(batches: list[Tensor]) -> list[Tensor]:
        return [s if len(s) else b[:1] for b in batches for s in cuts.all(b)]

    yield (
        "the mean of the shares' rows, some of which are there twice or missing: see rows_once",
        lambda b: _even(_rows(shares(b))),
    )
    yield "the mean of the replicas' means, not the mean over all rows", lambda b: _even(shares(b))
    yield (
        "the mean of the replicas' means, and of the rows lent to replicas without any",
        lambda b: _even(lent(b)),
    )
    yield (
        "the mean with the rows lent to replicas without any, which have the weight 0",
        lambda b: _even(_rows(lent(b))),
    )
    yield (
        "the mean of the main process's own rows: `reduce` does not sum over the processes",
        lambda b: _even(_rows(shares(b, cuts.own))),
    )
    yield "the mean of the batches' means, not the mean over all rows", _even


def _even(parts: list[Tensor]) -> float:
    means = [float(part.double().square().mean()) for part in parts]
    return sum(means) / len(means) if means else float("nan")


def _rows(parts: list[Tensor]) -> list[Tensor]:
    return list(torch.cat(parts).split(1)) if parts else []


def _is_near(value: float, other: float) -> bool:
    return abs(value - other) <= MATCH * max(1.0, abs(other))
