"""What layers do in a trial, and where the rows are in what dropout layers get."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpframe.rows import current_share
from dpframe.trainer.checks.step_on_shares import ROWS
from dpframe.trainer.checks.trial import CUT

CORNER = 16  # numbers of a row by each dimension, by which it is known again
CLOSE = 1e-3  # these, of the same rows
ROUNDINGS = 8  # with 16 bits


class Watch:
    """What the layers of a task do in steps of ROWS and of CUT rows."""

    most = ROWS

    def __init__(self) -> None:
        self.inputs: dict[nn.Module, list[Input]] = {}  # of dropout layers, in one step
        self.unlike: set[nn.Module] = set()  # BatchNorms that compute in a way of their own
        self.called: set[nn.Module] = set()
        self.gathers = False  # whether a step takes what it keeps from all rows of a batch
        self._places: dict[nn.Module, set[int | None]] = {}
        self._blocks: set[nn.Module] = set()  # where several places are one row

    def note(self, layer: nn.Module, x: Tensor) -> None:
        self.inputs.setdefault(layer, []).append(Input(current_share.rows, x))

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Within, what is noted is forgotten afterwards: a step is computed a second time."""
        before = {layer: [*inputs] for layer, inputs in self.inputs.items()}
        yield
        self.inputs = before

    def compare(self) -> None:
        """After the steps of one turn."""
        for layer, inputs in self.inputs.items():
            many = [each for each in inputs if each.rows == ROWS]
            few = [each for each in inputs if each.rows == CUT]
            # Shares may call it more or less often, e.g. once a word: each call has to be the same.
            by_values = len(many) != len(few)
            pairs = zip(many, few, strict=False)
            known = self._places.setdefault(layer, set())
            for a, b in pairs:
                known.add(dim := rows_at(layer, a, b, by_values=by_values))
                if dim is not None and a.sizes[dim] > ROWS:
                    self._blocks.add(layer)
        self.called |= self.inputs.keys()
        self.inputs = {}

    def places(self) -> Iterator[tuple[nn.Module, int, bool]]:
        """The dimension that is the rows, of each layer for which it is known, and whether a block
        of it has been one."""
        for layer, known in self._places.items():
            if len(known) == 1 and (dim := next(iter(known))) is not None:
                yield layer, dim, layer in self._blocks


class Input:
    """What a layer got: its sizes, and a corner of each row by the dimension that may be the rows,
    of which a row may have several places one after another."""

    def __init__(self, rows: int, x: Tensor) -> None:
        self.rows, self.sizes = rows, tuple(x.shape)
        self.corners = {
            dim: corner(x.detach().movedim(dim, 0).unflatten(0, (rows, -1))[:CUT])
            for dim, size in enumerate(self.sizes)
            if size and size % rows == 0
        }


def corner(rows: Tensor) -> Tensor:
    return rows[(slice(None), *[slice(CORNER)] * (rows.ndim - 1))].clone()


def rows_at(layer: Any, many: Input, few: Input, *, by_values: bool) -> int | None:
    """The dimension that is the rows: there are more of them, and the first ones are the same as
    far as both are long. If it is one of as many as the rows are, and no other grows, its values
    need not be compared."""
    if len(many.sizes) != len(few.sizes):
        return None
    dims = [
        dim
        for dim in sorted(many.corners.keys() & few.corners.keys())
        if many.sizes[dim] > few.sizes[dim] and layer.takes(dim, len(many.sizes))
    ]
    if len(dims) == 1 and many.sizes[dims[0]] == ROWS and not by_values:
        return dims[0]
    return next((dim for dim in dims if is_alike(many.corners[dim], few.corners[dim])), None)


def is_alike(one: Tensor, other: Tensor) -> bool:
    common = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    one, other = one[common], other[common]
    near = max(CLOSE, ROUNDINGS * torch.finfo(one.dtype).eps)
    size = float(other.abs().max())
    return size > 0 and torch.allclose(one, other, rtol=near, atol=near * size)
