"""The type of floats that nobody names, e.g. of torch.zeros(3): in a step, that of the weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Within, torch.zeros, torch.randn and the like make floats of this type; None: as before.

    Torch has one such type for all threads of a process, so no data may be read within."""
    if dtype is None:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def with_default_dtype(dtype: torch.dtype, step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step, which makes floats of this type. It is called for all replicas at once: in
    each of several threads, one would end what another still needs."""

    def typed(*args: Any) -> Any:
        with default_dtype(dtype):
            return step(*args)

    return typed
