"""Torch's fused kernels where an optimiser has them: one call for all weights, not ten for each."""

import torch
from torch import nn
from torch.optim import Optimizer

from dpframe.task import has_sparse

KINDS = ("cpu", "cuda")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def fuse(optimizer: Optimizer, model: nn.Module) -> bool:
    """The same maths, rounded otherwise in the last digit. Not where the user chose a way, nor for
    weights or gradients that the kernels can't take."""
    defaults = optimizer.defaults
    ways = ("fused", "foreach", "capturable", "differentiable")
    is_chosen = any(defaults.get(way) for way in ways) or defaults.get("fused", False) is not None
    is_stock = type(optimizer).__module__.startswith("torch.optim.")
    if is_chosen or not is_stock or has_sparse(model):
        return False
    groups = optimizer.param_groups
    if any(group.get("fused") is not None or group.get("foreach") for group in groups):
        return False
    weights = [weight for group in groups for weight in group["params"]]
    if not all(w.device.type in KINDS and w.dtype in FLOATS for w in weights):
        return False
    for group in groups:
        group["fused"] = True
    if type(optimizer).__name__ in ("Adam", "AdamW") and all(w.is_cuda for w in weights):
        # So a GradScaler has the kernel leave a step out, and need not wait to decide that itself.
        # (SGD's kernel would leave its momentum unset if that happens at the first step.)
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return True


def unfuse_late(optimizer: Optimizer) -> bool:
    """Before a step: a group of ours goes back to its plain way where that step could not be fused.

    SGD's kernel takes the momenta of all weights or of none, and a momentum begins with its
    weight's first gradient. Whether to look again: until all of them have begun.
    """
    looks_again = False
    for group in optimizer.param_groups:
        if not (group["fused"] and group["momentum"]):
            continue
        weights = group["params"]
        begun = sum("momentum_buffer" in optimizer.state.get(weight, ()) for weight in weights)
        if begun < len(weights) and (begun or any(weight.grad is None for weight in weights)):
            group["fused"] = None
        elif begun < len(weights):
            looks_again = True
    return looks_again
