"""Data that stays on the GPU: tensors that fit are copied there once, and batches made there."""

import torch
from torch import Tensor

from dpframe.data import Loader, Place, move
from dpframe.errors import UserError
from dpframe.strategies.base import Strategy

SHARE = 10  # at most one in so many of the device's free bytes, unless asked for by hand


def place_of(strategy: Strategy, asked: str | bool) -> Place:
    """What a Loader asks where its tensors are to be; `asked` is trainer.data_on_device."""

    def place(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        device = strategy.device
        if asked is False or device.type != "cuda" or not is_one_device(strategy):
            return tensors
        needed, free = size(tensors, strategy.dtype), torch.cuda.mem_get_info(device)[0]
        if asked is True and needed > free:
            raise UserError(
                f"trainer.data_on_device=true but the data takes {needed:,} bytes and {device} "
                f"has {free:,} free; use trainer.data_on_device=auto"
            )
        if asked is not True and needed > free // SHARE:
            return tensors
        return move(tensors, device, strategy.dtype)

    return place


def check(loader: Loader, strategy: Strategy, asked: str | bool) -> None:
    """Refuses what `true` asks for and can't be had; on the CPU the data is there already."""
    if asked is not True or strategy.device.type == "cpu" or loader.device.type != "cpu":
        return
    why = (
        "the data set is not nothing but tensors (a TensorDataset, and no collate of its own)"
        if is_one_device(strategy)
        else f"{strategy.name} has several devices in one process"
    )
    raise UserError(f"trainer.data_on_device=true but {why}; use trainer.data_on_device=auto")


def is_one_device(strategy: Strategy) -> bool:
    """Whether this process has one replica, be there others elsewhere."""
    return strategy.replicas == strategy.world_size


def size(tensors: tuple[Tensor, ...], dtype: torch.dtype | None) -> int:
    """In bytes, floats as `dtype`."""
    return sum(
        tensor.numel() * (dtype if dtype and tensor.is_floating_point() else tensor.dtype).itemsize
        for tensor in tensors
    )
