"""One process, N devices: each replica computes its own loss, autograd sums the gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import parallel_apply, replicate

from dpframe.data import Share, move, split
from dpframe.strategies.base import Strategy
from dpframe.strategies.devices import announce


class DataParallel(Strategy):
    """On a machine without CUDA, N virtual replicas on the CPU with the same shares."""

    def setup(self) -> None:
        self.places = self.choose_devices(default=None)
        self.replicas = len(self.places)
        self.device = self.places[0]
        self.runs_copies = self.replicas > 1 and self.device.type != "cpu"
        announce(self.places, self.accelerator, kind="virtual replicas")

    @property
    def devices(self) -> list[str]:
        return [str(place) for place in self.places]

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        return Replicas(module, self.places)

    def shares(self, rows: Sequence) -> list[Sequence]:
        return split(rows, self.replicas)

    def to_device(self, shares: list[Share]) -> list[Share]:
        return [
            share._replace(batch=move(share.batch, place, self.dtype))
            for share, place in zip(shares, self.places, strict=True)
            if share.rows
        ]


class Replicas(nn.Module):
    """Calls the module once a share, on the share's device, and combines what comes back."""

    def __init__(self, module: Any, places: list[torch.device]) -> None:
        super().__init__()
        self.module = module
        self.places = places

    def forward(self, shares: list[Share], *args: Any) -> Any:
        if self.places[0].type == "cpu" or len(shares) == 1:
            return self.module.combine([self.module(share, *args) for share in shares])
        places = self.places[: len(shares)]
        copies = replicate(self.module, places, detach=not torch.is_grad_enabled())
        inputs = [(share, *args) for share in shares]
        return self.module.combine(parallel_apply(copies, inputs, devices=places))
