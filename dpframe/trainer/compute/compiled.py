"""Training steps by torch.compile: a graph for each size of batches, while there are a few."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpframe.data.module import leaves

MANY_SIZES = 5  # torch._dynamo keeps 8 graphs of a function, and runs it uncompiled from then on


class Compiled:
    """`training_step` of a task, as torch.compile makes it; the task itself stays as it is.

    Torch's own choice is a graph of any size as soon as a second size comes, which from then on
    computes all batches: one uneven last batch would make each later full batch slower.
    """

    def __init__(self, *, dynamic: bool | None, **options: Any) -> None:
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # from 2.13 on
            options["isolate_recompiles"] = True  # else the runs of a sweep share those 8 graphs
        self._run: Callable[..., Any] = torch.compile(_step, dynamic=dynamic or False, **options)
        self._run_any: Callable[..., Any] = self._run
        if dynamic is None:
            self._run_any = torch.compile(_step, dynamic=None, **options)
        self._sizes: set[tuple] = set()

    def __call__(self, task: Any, batch: Any, *turn: str) -> Any:
        parts = list(leaves(batch))
        if any(map(_hides_its_size, parts)):
            return self._run_any(task, batch, *turn)
        size = *turn, *(part.shape for part in parts if isinstance(part, Tensor))
        if size not in self._sizes:
            if len(self._sizes) == MANY_SIZES:
                return self._run_any(task, batch, *turn)
            self._sizes.add(size)
        return self._run(task, batch, *turn)


def _hides_its_size(part: Any) -> bool:
    """E.g. a tokenizer's encoding, a tensor of rows of several lengths, or a number, of which each
    value would have a graph of its own."""
    if isinstance(part, int | float) and not isinstance(part, bool):
        return True
    is_plain = isinstance(part, Tensor) and part.layout is torch.strided
    return hasattr(part, "to") and not is_plain


def _step(task: Any, batch: Any, *turn: str) -> Any:
    return task.training_step(batch, *turn)
