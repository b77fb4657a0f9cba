"""Puts a task where it is trained, its convolutions' weights in the layout that is quickest there.

A convolution whose weights are in channels_last memory makes its outputs so, whatever it is given:
so all layers from the first one on are, and batches need not be turned.
"""

import inspect
import re
import sys
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer

from dpframe.trainer import memory, threads

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
KINDS = ("cpu", "cuda")
SLOW = (nn.GroupNorm, _InstanceNorm)  # they turn what they get, twice: 1.5 times the time
NEEDS_ORDER = re.compile(r"\.(view|view_as|as_strided)\(")
LAYOUT = "channels_last"


def place(trainer: "Trainer") -> str:
    """The layout of its convolutions, and why; empty where there is nothing to tell."""
    task, settings = trainer.task, trainer.settings
    task.to(trainer.strategy.device, trainer.precision.dtype)
    threads.limit(task, settings.threads)
    if settings.lean and trainer.strategy.device.type == "cpu":
        memory.keep_freed()
    weights = convolutions(task)
    if settings.channels_last is False or not weights:
        return ""
    why = why_not(task, trainer.strategy.device) if settings.channels_last == "auto" else ""
    if why:
        return f"contiguous: {why}"
    for weight in weights:
        weight.data = weight.data.to(memory_format=FORMATS[weight.dim()])
    return LAYOUT


def convolutions(task: nn.Module) -> list[nn.Parameter]:
    """Their weights, but for those that are yet to be made or are made anew in each step."""
    found = [
        module._parameters.get("weight")
        for module in task.modules()
        if isinstance(module, nn.Conv2d | nn.Conv3d)
    ]
    made = (weight for weight in found if weight is not None)
    return [weight for weight in made if not nn.parameter.is_lazy(weight)]


def why_not(task: nn.Module, device: torch.device) -> str:
    """A fact of the task and the kind of device: the same in all processes, and in each run."""
    if device.type not in KINDS:
        return f"untried on {device.type}"
    for name, module in task.named_modules():
        if isinstance(module, SLOW):
            return f"{name} is a {type(module).__name__}, which is slow in {LAYOUT}"
    for kind in {kind: None for module in task.modules() for kind in type(module).__mro__}:
        if _is_users(kind) and (said := _needs_order(kind)):
            return said
    return ""


def explain(error: BaseException, layout: str) -> None:
    """A view() that no source was seen to call."""
    if layout == LAYOUT and "view size is not compatible" in str(error):
        error.add_note(
            "trainer.channels_last put the convolutions' outputs into memory that view() can't "
            "take: use reshape(), or trainer.channels_last=false"
        )


def align(optimizer: Optimizer) -> None:
    """What was loaded, into its weight's layout: fused kernels take both as they lie in memory."""
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            is_like = isinstance(value, torch.Tensor) and value.shape == weight.shape
            if is_like and value.stride() != weight.stride():
                state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def _is_users(kind: type) -> bool:
    house = kind.__module__.split(".")[0]
    is_ours = house == "dpframe" and ".recipes." not in kind.__module__
    return house not in ("torch", "builtins") and not is_ours


def _needs_order(kind: type) -> str:
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError, KeyError):  # it was typed at a prompt, say
        return f"the source of {kind.__name__} can't be read"
    found = NEEDS_ORDER.search(source)
    if found is None:
        return ""
    return f"the file of {kind.__name__} calls {found[1]}(), which {LAYOUT} memory may refuse"
