"""Keeps torch._dynamo out of runs that compile nothing: 800 modules, a second in every process.

Torch imports it when the first optimiser or DistributedDataParallel is made, only to say "don't
compile this". With nothing to compile the answer is known. Where torch is not as expected here,
or dynamo is there already, everything stays stock; `trainer.lean=false` says so by hand.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

GUARDED = (
    (Optimizer, ("add_param_group", "zero_grad", "state_dict", "load_state_dict")),
    (DistributedDataParallel, ("_inside_ddp_forward",)),
)


def prepare() -> None:
    """Tells torch's lazy guards that their functions need no guarding."""
    if "torch._dynamo" in sys.modules:
        return
    for owner, names in GUARDED:
        for name in names:
            function = inspect.unwrap(getattr(owner, name, prepare))
            if not hasattr(function, "__dynamo_disable"):
                setattr(function, "__dynamo_disable", function)  # noqa: B010


def step_of(optimizer: Optimizer) -> Callable[[], Any]:
    """`optimizer.step`, bit for bit, without the wrappers that import dynamo."""
    stock = type(optimizer).step
    raw = inspect.unwrap(stock)
    is_stock = type(optimizer).__module__.startswith("torch.optim.") and raw is not stock
    differentiates = bool(optimizer.defaults.get("differentiable"))
    if not is_stock or differentiates or "torch._dynamo" in sys.modules:
        return optimizer.step
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler's wrapper notes
    hooks = _hooks(optimizer)

    def step() -> None:
        if any(hooks):
            optimizer.step()
            return
        with torch.no_grad():
            raw(optimizer)

    return step


@contextmanager
def no_dynamo_in_ddp(is_on: bool = True) -> Iterator[None]:
    """DDP's constructor asks dynamo for one setting: this answers its default."""
    if not is_on or "torch._dynamo" in sys.modules or "_dynamo" in vars(torch):
        yield
        return
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    vars(torch)["_dynamo"] = SimpleNamespace(utils=utils)
    try:
        yield
    finally:
        del vars(torch)["_dynamo"]


def _hooks(optimizer: Optimizer) -> tuple[dict, ...]:
    """Where torch keeps step hooks, of every optimiser and of this one; they may come later."""
    return (
        getattr(optimizer_module, "_global_optimizer_pre_hooks", {}),
        getattr(optimizer_module, "_global_optimizer_post_hooks", {}),
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
