"""Blocks whose activations are computed again in the backward, instead of kept: less memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpframe.errors import UserError, nearest

KEY = "trainer.checkpoint_activations"


class Recomputed(nn.Module):
    """What a chosen block's class gets in front: its forward keeps nothing but its inputs.

    Only the class of the block changes, as torch.nn.utils.parametrize does it: names in checkpoints
    stay, and so does what data_parallel copies to other devices.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(super().forward, **kwargs)
        if not torch.is_grad_enabled():  # checkpoint() would still read the random states
            return forward(*args)
        if torch.compiler.is_compiling():  # a compiled graph changes buffers once by itself
            return checkpoint(forward, *args, use_reentrant=False)
        again = partial(_buffers_kept, self)
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again())
        )


def drop_activations(task: nn.Module, choice: bool | str | Sequence[str] | None) -> list[str]:
    """The names of the blocks that are computed again, from here on; those of before no longer."""
    for module in task.modules():
        if isinstance(module, Recomputed):
            module.__class__ = type(module).__bases__[1]
    if choice is True:
        chosen = dict(_blocks(task))
        if not chosen:
            raise UserError(
                f"{KEY}=true finds no blocks in {type(task).__name__}: no module that is made of "
                f"others lies in a ModuleList or Sequential; name some, e.g. {KEY}=[net.layers.*]"
            )
    else:
        patterns = [choice] if isinstance(choice, str) else choice or ()
        chosen = dict(pair for pattern in patterns for pair in _matching(task, pattern))
    for module in chosen.values():
        if not isinstance(module, Recomputed):  # it may have two names
            kind: Any = type(module)
            module.__class__ = _recomputed(kind)
    return list(chosen)


@cache
def _recomputed(kind: Any) -> type[nn.Module]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Recomputed, kind), names)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """E.g. running statistics, which the first forward has updated already."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _blocks(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are made of others and lie in a ModuleList or Sequential, but for
    a ModuleList or Sequential of such modules."""
    for part_name, part in module.named_children():
        path = f"{name}.{part_name}".lstrip(".")
        is_composite = any(True for _ in part.children())
        if _is_list(module) and is_composite and not (_is_list(part) and any(_blocks(part))):
            yield path, part
        else:
            yield from _blocks(part, path)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _matching(task: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The outermost modules of that name; of a list, which is never called, its modules."""
    found: list[tuple[str, nn.Module]] = []
    named = dict(task.named_modules())
    del named[""]
    for name, module in named.items():
        if fnmatchcase(name, pattern) and not any(name.startswith(f"{n}.") for n, _ in found):
            is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
            parts = [(f"{name}.{part}", child) for part, child in module.named_children()]
            found += [(name, module)] if is_called else parts
    if not found:
        near = nearest(pattern.rstrip(".*"), named)
        hint = (
            f"did you mean {near}?" if near else f"there is, e.g., {next(iter(named), 'nothing')}"
        )
        raise UserError(f"{KEY}={pattern} matches no module of {type(task).__name__}; {hint}")
    return found
