"""Puts a task where it is trained, its convolutions' weights in the layout that it asks for.

A convolution whose weights are in channels_last memory makes its outputs so, whatever it is given:
so all layers from the first one on are, and batches need not be turned.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from dpframe.trainer import memory, threads

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYOUT = "channels_last"


def place(trainer: "Trainer") -> str:
    """The layout of its convolutions; empty where there is nothing to tell."""
    task, settings = trainer.task, trainer.settings
    task.to(trainer.strategy.device, trainer.precision.dtype)
    threads.limit(task, settings.threads)
    if settings.lean and trainer.strategy.device.type == "cpu":
        memory.keep_freed()
    weights = convolutions(task) if settings.channels_last else []
    for weight in weights:
        weight.data = weight.data.to(memory_format=FORMATS[weight.dim()])
    return LAYOUT if weights else ""


def convolutions(task: nn.Module) -> list[nn.Parameter]:
    """Their weights, but for those that are yet to be made or are made anew in each step."""
    found = [
        module._parameters.get("weight")
        for module in task.modules()
        if isinstance(module, nn.Conv2d | nn.Conv3d)
    ]
    made = (weight for weight in found if weight is not None)
    return [weight for weight in made if not nn.parameter.is_lazy(weight)]


def explain(error: BaseException, layout: str) -> None:
    """A view() of what a convolution made."""
    if layout == LAYOUT and "view size is not compatible" in str(error):
        error.add_note(
            "trainer.channels_last put the convolutions' outputs into memory that view() can't "
            "take: use reshape(), or trainer.channels_last=false"
        )


def align(optimizer: Optimizer) -> None:
    """What was loaded, into its weight's layout: fused kernels take both as they lie in memory."""
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            is_strided = isinstance(value, torch.Tensor) and value.layout == torch.strided
            is_like = is_strided and value.shape == weight.shape
            if is_like and value.stride() != weight.stride():
                state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
