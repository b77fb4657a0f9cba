"""A task without its numbers, whose weights are read block by block when the task is cut."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

from torch import Tensor, nn

Reads = Callable[[], Tensor]

_known: "weakref.WeakKeyDictionary[nn.Module, Mapping[str, Reads]]" = weakref.WeakKeyDictionary()
_is_asked = False


def is_outlined() -> bool:
    """Whether the task that is built now is filled when it is cut: a module of it may leave tensors
    on the meta device then, and the main process's tells how they are read by `fill_later`."""
    return _is_asked


def fill_later(module: nn.Module, reads: Mapping[str, Reads]) -> None:
    """The module's parameters and buffers of these names have the values that are read then."""
    _known[module] = reads


@contextmanager
def asked() -> Iterator[None]:
    global _is_asked
    _is_asked = True
    try:
        yield
    finally:
        _is_asked = False


def reads_of(task: nn.Module) -> dict[int, Reads]:
    """How each tensor of a task is read that is filled later, by its id."""
    found = {}
    for module in task.modules():
        reads = _known.pop(module, {})
        named = chain(
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        )
        found.update({id(tensor): reads[name] for name, tensor in named if name in reads})
    return found
