"""The binary tree along which the shares are added up.

Each sum has the same two operands, whoever adds them, so that it rounds alike. A process has the
sums of the largest parts of the tree that are its own; the rest is added up from those of all
processes.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

Span = tuple[int, int]
"""A node of the tree: the first of its shares, and the one after its last."""
Vectors = list[Tensor]
"""One for each type that weights or buffers have."""


def spans(count: int, processes: int) -> list[Span]:
    """The shares of each process."""
    ends = [count * process // processes for process in range(processes + 1)]
    return list(zip(ends, ends[1:], strict=False))


def halves(span: Span) -> tuple[Span, Span]:
    """The left one has as many shares as the largest power of two below theirs."""
    first, end = span
    middle = first + (1 << (end - first - 1).bit_length() - 1)
    return (first, middle), (middle, end)


def parts(span: Span, first: int, end: int) -> list[Span]:
    """The largest nodes below this one that have only shares from `first` to before `end`."""
    if end <= span[0] or span[1] <= first:
        return []
    if first <= span[0] and span[1] <= end:
        return [span]
    return [part for half in halves(span) for part in parts(half, first, end)]


def add_up(span: Span, known: Callable[[Span], Any]) -> Vectors | None:
    """The sum of a node's shares. `known` gives it where it is known, and `...` where it follows
    from the halves. At most log2 of the shares are kept, as each is added as soon as it can be."""
    value = known(span)
    if value is not ...:
        return value
    left, right = halves(span)
    ours, theirs = add_up(left, known), add_up(right, known)
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return [one.add_(other) for one, other in zip(ours, theirs, strict=True)]
