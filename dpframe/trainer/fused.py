"""Fused optimizers: one kernel for all weights, where torch has one that takes them."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from dpframe.parameters import has_sparse

MOST = ("SGD", "Adam", "AdamW")
FUSED = {  # the optimizers that have fused kernels, by device; None: all that take the argument
    "cpu": None,
    "cuda": None if torch.__version__ >= "2.13" else MOST,  # before, Adagrad has none there
    "mps": MOST,
    "xpu": MOST,
}
FUSED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def fuse(optimizer: Optimizer, model: nn.Module, kinds: Sequence[str] | None = None) -> bool:
    """Has an optimizer of torch use its fused kernels: one call for all weights, not ten for each.

    They round differently in the last digit. Not where the user chose an implementation, nor for
    weights or gradients that the kernels can't take; if `kinds` are given, for these alone.
    """
    defaults, groups = optimizer.defaults, optimizer.param_groups
    choices = ("fused", "foreach", "capturable", "differentiable")
    is_chosen = defaults.get("fused", False) is not None or any(map(defaults.get, choices))
    is_chosen |= any(group.get("fused") is not None or group.get("foreach") for group in groups)
    is_stock = type(optimizer).__module__.startswith("torch.optim.")
    # What is frozen has no gradient: the kernels leave it out, whatever its type.
    weights = [weight for group in groups for weight in group["params"] if weight.requires_grad]
    kind = type(optimizer).__name__
    have = [name for name, those in FUSED.items() if those is None or kind in those]
    is_stock &= kinds is None or kind in kinds
    fits = all(w.device.type in have and w.dtype in FUSED_DTYPES for w in weights)
    if is_chosen or not is_stock or not fits or has_sparse(model):
        return False
    for group in groups:
        group["fused"] = True
    for weight, state in optimizer.state.items():  # Adagrad has made its own for other kernels
        state["step"] = state["step"].to(weight.device, torch.float32)
    _skips_by_itself(optimizer, True)
    return True


def unfuse_late(optimizer: Optimizer) -> bool:
    """Before a step: takes `fused` from the groups whose step can't be; True: look again.

    SGD's kernel takes the momenta of all weights that have a gradient, or of none. A momentum
    begins with its weight's first gradient, e.g. when the weight is thawed. A step in which one
    begins is GradScaler's to skip: torch would leave it in memory that nobody has written.
    """
    looks_again = begins = False
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        has_begun = ["momentum_buffer" in optimizer.state.get(w, ()) for w in group["params"]]
        pairs = zip(group["params"], has_begun, strict=True)
        updated = {begun for weight, begun in pairs if weight.grad is not None}
        group["fused"] = None if len(updated) > 1 else True
        begins |= False in updated
        looks_again |= begins or not all(has_begun)
    _skips_by_itself(optimizer, not begins)
    return looks_again


def _skips_by_itself(optimizer: Optimizer, does: bool) -> None:
    """Fused kernels skip a step whose gradients are not finite, so that GradScaler does not read
    from the GPU whether to. `fused=True` in the constructor sets the same."""
    optimizer._step_supports_amp_scaling = does  # type: ignore[attr-defined]
