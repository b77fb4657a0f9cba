"""One process on one device, and the default: ddp where it is called for, else one device."""

import torch

from dpframe.errors import UserError
from dpframe.strategies import ranks
from dpframe.strategies.base import Strategy
from dpframe.strategies.devices import Gpus, announce


class CPU(Strategy):
    uses_gpus = False

    def setup(self) -> None:
        if self.accelerator == "cuda":
            raise UserError("trainer.accelerator=cuda but strategy=cpu; use strategy=single_gpu")
        super().setup()


class SingleGPU(Strategy):
    """`trainer.gpus=[2]` picks the card."""

    def setup(self) -> None:
        super().setup()
        announce([self.device], self.accelerator, kind="process")


def auto(gpus: Gpus = None, accelerator: str = "auto", max_replicas_per_core: int = 8) -> Strategy:
    """ddp under torchrun or for several GPUs, else the one GPU of this machine, or its CPU."""
    count = len(gpus) if isinstance(gpus, list) else gpus or 0
    if count > 1 or ranks.are_several():
        from dpframe.strategies.ddp import DDP  # imports torch.distributed: only when used

        return DDP(gpus, accelerator, max_replicas_per_core)
    wants_gpu = accelerator != "cpu" and (count or torch.cuda.device_count())
    if wants_gpu or accelerator == "cuda":
        return SingleGPU(gpus, accelerator, max_replicas_per_core)
    return CPU(gpus, accelerator, max_replicas_per_core)
