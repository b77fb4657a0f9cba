"""How many CPU threads a model gets: a small one is slower on several, and more so in company."""

import torch

SMALL_MODEL = 50_000  # parameters


def choose(model: torch.nn.Module, wanted: int | None) -> None:
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif sum(p.numel() for p in model.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)
