"""One process on one device, and the default: ddp where it is called for, else one device."""

import os

import torch

from dpframe.errors import UserError
from dpframe.launch import environment
from dpframe.strategies.base import Strategy
from dpframe.strategies.devices import GIVEN, Gpus, announce, count_of, refuse_lost_devices


class CPU(Strategy, takes_logical_shares=True):
    """One process on the CPU."""

    uses_gpus = False

    def setup(self) -> None:
        if self.accelerator not in ("auto", "cpu"):
            raise UserError(
                f"trainer.accelerator={self.accelerator} but strategy=cpu; use strategy=single_gpu"
            )
        super().setup()


class SingleGPU(Strategy, takes_logical_shares=True):
    """`trainer.gpus=[2]` picks the GPU."""

    def setup(self) -> None:
        super().setup()
        announce([self.device], self.accelerator, kind="process")


def auto(gpus: Gpus = None, accelerator: str = "auto") -> Strategy:
    """ddp under torchrun and its like, or for several GPUs; else one GPU, or the CPU."""
    available = 0 if accelerator == "cpu" else torch.accelerator.device_count()
    count = count_of(gpus, available)
    if (count or 0) > 1 or environment.is_one_of_several():
        from dpframe.strategies.ddp import DDP  # imports torch.distributed: only when used

        return DDP(gpus, accelerator)
    if accelerator not in ("auto", "cpu") or (accelerator == "auto" and (count or available)):
        return SingleGPU(gpus, accelerator)
    if accelerator == "auto" and any(name in os.environ for name in GIVEN):
        refuse_lost_devices()
    return CPU(gpus, accelerator)
