"""How many CPU threads torch computes with."""

import torch
from torch import nn

SMALL_MODEL = 50_000  # parameters


def limit(module: nn.Module, given: int | None) -> None:
    """A small model is slower on several threads, and much slower beside other work."""
    if given is not None:
        torch.set_num_threads(given)
    elif sum(parameter.numel() for parameter in module.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)
