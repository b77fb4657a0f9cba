"""What a step may change is as before it: buffers, attributes and generators. No weight is copied:
a step that would change one in place is not tried."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpframe.data.copies import OF_MODULES, PLAIN, Copies
from dpframe.task import Task
from dpframe.trainer.checks.draws import NotCompared

FLAGS = {"requires_grad_", "detach_", "share_memory_"}  # which change no numbers


@contextmanager
def put_back(task: Task) -> Iterator[Copies]:
    """Within, the task has copies of its buffers and attributes, of which those that are one object
    are one copy; afterwards it has the same objects again, as they were. Weights, and what is
    large, are not copied."""
    modules = list(task.modules())
    copies = Copies([task.run_context, *modules, *task.parameters()])
    trains = [(weight, weight.requires_grad) for weight in task.parameters()]
    before = [_contents(vars(module)) for module in modules]
    buffers = [(m, *pair) for m in modules for pair in m.named_buffers(recurse=False)]
    for module, name, buffer in buffers:
        setattr(module, name, copies.of(buffer))
    for module, (own, _) in zip(modules, before, strict=True):
        for name, value in own.items():
            if name not in OF_MODULES and not isinstance(value, PLAIN):
                vars(module)[name] = copies.of(value)
    try:
        yield copies
    finally:
        for module, (own, inner) in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(own)
            for container, content in inner:
                container.clear()
                container.update(content)
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        for weight, is_trained in trains:
            weight.requires_grad_(is_trained)


def _contents(own: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """A module's attributes, and what is in torch's dicts and sets among these, e.g. of buffers;
    hooks are left alone, as strategies have some that take themselves away."""
    parts = (own[key] for key in own.keys() & OF_MODULES if "hook" not in key)
    return dict(own), [(part, part.copy()) for part in parts if isinstance(part, dict | set)]


class Unwritten(TorchFunctionMode):
    """Within, what would change one of these tensors in place is not called."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {_storage(tensor): name for name, tensor in tensors.items()}
        self._names.pop(0, None)  # of empty ones

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for tensor in _written(function, args, kwargs or {}):
            if isinstance(tensor, Tensor) and (name := self._names.get(_storage(tensor))):
                raise NotCompared(f"it changes {name} in place, which can't be taken back")
        return function(*args, **kwargs or {})


def _written(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[Any]:
    """What a function of torch's changes."""
    name = getattr(function, "__name__", "")
    if "out" in kwargs:
        written = kwargs["out"]
    elif name == "embedding" and kwargs.get("max_norm") is not None:
        written = args[1]
    elif (name[-1:] == "_" != name[-2:-1] and name not in FLAGS) or name == "__setitem__":
        written = next(chain(args, kwargs.values()), ())
    elif name == "__set__" and getattr(function, "__self__", None) is Tensor.data:
        written = args[0]
    else:
        return ()
    return written if isinstance(written, list | tuple) else (written,)


def _storage(tensor: Tensor) -> int:
    is_strided = tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if is_strided else 0


@contextmanager
def widened(task: Task) -> Iterator[None]:
    """The floats of the task in float64, with the same tensors."""
    tensors = floats_of(task)
    before = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def floats_of(task: Task) -> list[Tensor]:
    return [t for t in chain(task.parameters(), task.buffers()) if t.is_floating_point()]
