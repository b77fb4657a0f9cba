"""Keeps torch._dynamo, 800 modules and a second, out of runs that compile nothing.

Torch imports it when the first optimizer is made, and again at each step, only to tell it not to
compile them. Where torch is not as expected here, or dynamo is imported already, all stays as torch
has it. `trainer.skip_dynamo_import=false` turns this off.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from dpframe.composite import Composite

UNCOMPILED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def skip_import() -> None:
    """Sets what torch would set on these methods after it had imported dynamo: call them as is."""
    if "torch._dynamo" in sys.modules:
        return
    for name in UNCOMPILED:
        function = inspect.unwrap(getattr(Optimizer, name))
        if not hasattr(function, "__dynamo_disable"):
            setattr(function, "__dynamo_disable", function)  # noqa: B010


def step_of(optimizer: Optimizer) -> Callable[[], Any]:
    """`optimizer.step` with its hooks, to the bit, less the wrapper that imports dynamo."""
    if isinstance(optimizer, Composite):
        optimizer.steps = [step_of(part) for part in optimizer.parts]
        optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of none
        return optimizer.step
    stock = type(optimizer).step
    step = inspect.unwrap(stock)
    is_torchs = type(optimizer).__module__.startswith("torch.optim.") and step is not stock
    is_differentiable = bool(optimizer.defaults.get("differentiable"))
    if not is_torchs or is_differentiable or "torch._dynamo" in sys.modules:
        return optimizer.step
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return partial(Optimizer.profile_hook_step(torch.no_grad()(step)), optimizer)
