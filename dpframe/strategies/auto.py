"""The default: ddp under torchrun or for several GPUs, else the one GPU there is, or the CPU."""

import torch

from dpframe.strategies import ranks
from dpframe.strategies.base import Strategy
from dpframe.strategies.cpu import CPU
from dpframe.strategies.devices import Gpus
from dpframe.strategies.single_gpu import SingleGPU


def auto(gpus: Gpus = None, accelerator: str = "auto", max_replicas_per_core: int = 8) -> Strategy:
    count = len(gpus) if isinstance(gpus, list) else gpus or 0
    if count > 1 or ranks.are_several():
        from dpframe.strategies.ddp import DDP  # imports torch.distributed: only when used

        return DDP(gpus, accelerator, max_replicas_per_core)
    wants_gpu = accelerator != "cpu" and (count or torch.cuda.device_count())
    if wants_gpu or accelerator == "cuda":
        return SingleGPU(gpus, accelerator, max_replicas_per_core)
    return CPU(gpus, accelerator, max_replicas_per_core)
