"""Adam's fused step as its two kernel calls, bit for bit, less what torch looks up around them.

Only for what is plain: a step that isn't, its first above all, is left to torch.
"""

from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

KERNELS = {Adam: "_fused_adam_", AdamW: "_fused_adamw_"}
NUMBERS = (float, int)


class Adams:
    """Steps an optimiser that is exactly torch's; `kernel` is None where it has to do it itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = len(optimizer.param_groups)
        kernel = getattr(torch, KERNELS.get(type(optimizer), ""), None)
        self.kernel = kernel if all(map(_is_alike, optimizer.param_groups)) else None
        self._is_decoupled = type(optimizer) is AdamW

    def step(self) -> bool:
        """Whether it is done: all of it, or nothing."""
        optimizer = self._optimizer
        if self.kernel is None or len(optimizer.param_groups) != self._groups:
            return False
        calls = []
        for group in optimizer.param_groups:
            is_decoupled = group.get("decoupled_weight_decay", self._is_decoupled)
            call = _collected(group, optimizer.state)
            if call is None or is_decoupled is not self._is_decoupled:  # the other kernel's
                return False
            calls.append(call)
        for tensors, settings in calls:
            if tensors[0]:
                torch._foreach_add_(tensors[-1], 1)
                self.kernel(*tensors, **settings)
        return True


def _is_alike(group: dict[str, Any]) -> bool:
    """One device and one type of number, as a kernel takes them."""
    return len({(weight.device, weight.dtype) for weight in group["params"]}) == 1


def _collected(group: dict[str, Any], kept: dict) -> tuple[list[list[Any]], dict[str, Any]] | None:
    """What the kernel takes, as it is now: all of it may change between two steps."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    is_other = group["amsgrad"] or group["capturable"] or group["differentiable"]
    is_tensor = not (type(rate) in NUMBERS and type(beta1) in NUMBERS and type(beta2) in NUMBERS)
    if is_other or is_tensor or group["fused"] is not True:
        return None
    tensors: list[list[Any]] = [[], [], [], [], [], []]
    weights, gradients, means, squares, _, steps = tensors
    for weight in group["params"]:
        gradient = weight.grad
        if gradient is None:
            continue
        state = kept[weight]
        if not state or gradient.is_sparse:
            return None
        weights.append(weight)
        gradients.append(gradient)
        means.append(state["exp_avg"])
        squares.append(state["exp_avg_sq"])
        steps.append(state["step"])
    return tensors, {
        "amsgrad": False,
        "lr": rate,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": group["maximize"],
        "grad_scale": None,
        "found_inf": None,
    }
