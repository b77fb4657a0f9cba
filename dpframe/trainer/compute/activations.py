"""Blocks whose activations are computed again in the backward, instead of kept: less memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpframe.errors import UserError
from dpframe.layers.exact import put_before
from dpframe.rows import EachTime, Forward, buffers_kept
from dpframe.util.patterns import blocks, match_modules

KEY = "trainer.checkpoint_activations"


class Recomputed(nn.Module):
    """Is put before a block's own class: its forward keeps nothing but its inputs.

    Only the class of the block changes, as torch.nn.utils.parametrize does it: names in checkpoints
    stay, and so does what data_parallel copies to other devices.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(super().forward, **kwargs)
        if not torch.is_grad_enabled():  # checkpoint() would still read the random states
            return forward(*args)
        if torch.compiler.is_compiling():  # a compiled graph changes buffers once by itself
            return checkpoint(forward, *args, use_reentrant=False)
        before = Forward()
        contexts = before.kept(), EachTime(partial(buffers_kept, self), before.again)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts)


def drop_activations(task: nn.Module, choice: bool | str | Sequence[str] | None) -> list[str]:
    """The names of the blocks that are computed again, from here on; those of before no longer."""
    for module in task.modules():
        if isinstance(module, Recomputed):
            module.__class__ = type(module).__bases__[1]
    if choice is True:
        chosen = dict(blocks(task))
        if not chosen:
            raise UserError(
                f"{KEY}=true finds no blocks in {type(task).__name__}: no module that is made of "
                f"others lies in a ModuleList or Sequential; name some, e.g. {KEY}=[net.layers.*]"
            )
    else:
        patterns = [choice] if isinstance(choice, str) else choice or ()
        chosen = dict(
            pair for pattern in patterns for pair in match_modules(task, pattern, key=KEY)
        )
    for module in chosen.values():
        if not isinstance(module, Recomputed):  # it may have two names
            kind: Any = type(module)
            module.__class__ = put_before(Recomputed, kind)
    return list(chosen)
