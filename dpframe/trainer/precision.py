"""Precision: plain 32 and 64 bits, or autocast in bf16 and fp16."""

from functools import partial

import torch

from dpframe.task import Autocast


class Precision:
    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.dtype = torch.float64 if name == "64" else None
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self.autocast: Autocast | None = None
        if half is not None:
            self.autocast = partial(torch.autocast, device.type, dtype=half)

    def scaler(self) -> torch.amp.GradScaler | None:
        """fp16 gradients underflow unless the loss is scaled up; the others need none."""
        return torch.amp.GradScaler(self.device.type) if self.name == "fp16" else None
