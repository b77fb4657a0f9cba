"""Keeps torch._dynamo, 800 modules and a second, out of runs that compile nothing, and steps lean.

Torch imports it when the first optimiser or DistributedDataParallel is made, only to say "don't
compile this". With nothing to compile the answer is known, as that of other checks that torch makes
in each step. Where torch is not as expected here, or dynamo is there already, everything stays
stock; `trainer.lean=false` says so by hand.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from dpframe.adam import Adams

GUARDED = (
    (Optimizer, ("add_param_group", "zero_grad", "state_dict", "load_state_dict")),
    (DistributedDataParallel, ("_inside_ddp_forward",)),
)
GRAPH_LOG = logging.getLogger("torch.autograd.graph")
ENGINE = getattr(torch.autograd.Variable, "_execution_engine", None)
RUN_BACKWARD = getattr(ENGINE, "run_backward", None)


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
    adams = Adams(optimizer)

    def step() -> None:
        if any(hooks):
            optimizer.step()
            return
        with torch.no_grad():
            if not adams.step():
                raw(optimizer)

    return step


def backward(loss: Tensor) -> None:
    """`loss.backward()`, by what it ends in: the checks before take longer than a small layer."""
    is_watched = "torch._dynamo" in sys.modules or GRAPH_LOG.isEnabledFor(logging.DEBUG)
    if type(loss) is not Tensor or RUN_BACKWARD is None or is_watched:
        loss.backward()
        return
    one = torch.ones((), dtype=loss.dtype, device=loss.device)
    RUN_BACKWARD((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def set_training(module: nn.Module, mode: bool, is_lean: bool) -> None:
    """`module.train(mode)`; if lean, less what torch checks of each module at each assignment."""
    if not is_lean:
        module.train(mode)
        return
    waiting: list[nn.Module | None] = [module]
    while waiting:
        one = waiting.pop()
        if one is None:
            continue
        own = vars(one)
        if "train" in own or not _is_plain(type(one)):  # type: ignore[arg-type]
            one.train(mode)  # it has a mind of its own
        else:
            own["training"] = mode
            waiting += one._modules.values()


@cache
def _is_plain(kind: Any) -> bool:
    names = ("train", "children", "named_children", "__setattr__", "training")
    return all(getattr(kind, name, None) is getattr(nn.Module, name, None) for name in names)


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
