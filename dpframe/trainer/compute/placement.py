"""Where a task is trained: its device and precision, its convolutions' layout, and CPU threads."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpframe.devices.accelerator import cores, has_float64
from dpframe.errors import UserError
from dpframe.strategies.base import Strategy
from dpframe.strategies.devices import use_threads
from dpframe.trainer.settings import TrainerSettings

SMALL_MODEL = 50_000  # parameters
MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CHANNELS_LAST = "channels_last"


Autocast = Callable[[], AbstractContextManager]
DTYPES = {"64": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Weights, buffers and inputs in the type `dtype`, or autocast over 32 bits.

    Autocast's cache would keep copies of all weights for the whole forward, which matters where
    the weights are cut so that no process ever has all of them.
    """

    def __init__(self, name: str, device: torch.device, *, cuts_weights: bool = False) -> None:
        self.device = device
        if name == "64" and not has_float64(device):
            raise UserError(
                f"trainer.precision=64 but {device.type.upper()} has no floats of 64 bits; "
                "use trainer.precision=32, or trainer.accelerator=cpu"
            )
        self.dtype = DTYPES.get(name)  # None: what the task and its data have
        half = AUTOCAST.get(name)
        self.autocast: Autocast | None = None
        if half is not None:
            self.autocast = partial(
                torch.autocast, device.type, dtype=half, cache_enabled=not cuts_weights
            )
        self.scaler: torch.amp.GradScaler | None = None
        if name == "fp16":  # its gradients underflow unless the loss is scaled up
            self.scaler = torch.amp.GradScaler(device.type)


def place(
    task: nn.Module, strategy: Strategy, precision: Precision, settings: TrainerSettings
) -> str:
    """Moves the task to its device; returns the layout of its convolutions, "" if it is torch's.

    A convolution with weights in channels_last memory returns its output so, whatever its input:
    all layers from the first convolution on are in that layout, and batches need no conversion.
    """
    refuse_lazy(task)
    if strategy.sharding.cuts:  # it moves them part by part
        task.to(dtype=precision.dtype)
    else:
        task.to(precision.device, precision.dtype)
    if settings.matmul_precision is not None:
        torch.set_float32_matmul_precision(settings.matmul_precision)
    if settings.cudnn_benchmark is not None:
        torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    parameters = sum(parameter.numel() for parameter in task.parameters())
    if settings.threads is not None:
        use_threads(settings.threads)
    elif parameters < SMALL_MODEL:  # slower on several, and much slower beside other work
        use_threads(1)
    else:  # torch counts the cores of the machine, and a container may have fewer
        use_threads(min(torch.get_num_threads(), cores()))
    # Sharded weights are gathered in torch's own layout.
    may_lay_out = settings.channels_last and not strategy.sharding.cuts
    weights = _convolutions(task) if may_lay_out else []
    for weight in weights:
        weight.data = weight.data.to(memory_format=MEMORY_FORMATS[weight.dim()])
    if strategy.sharding.cuts:
        strategy.sharding.cut(task, has_autocast=precision.autocast is not None)
    return CHANNELS_LAST if weights else ""


def refuse_lazy(task: nn.Module) -> None:
    """Weights that a first batch would make: nothing can be placed, counted or shared before."""
    lazy = nn.UninitializedParameter, nn.UninitializedBuffer
    for name, tensor in chain(task.named_parameters(), task.named_buffers()):
        if isinstance(tensor, lazy):
            owner = name.rpartition(".")[0]
            kind = type(task.get_submodule(owner)).__name__
            raise UserError(
                f"{owner}, a {kind}, has no weights yet; call the network once on a row in the "
                "task's __init__, e.g. self.net(torch.zeros(1, 8)), or give the layer its sizes"
            )


def process_settings() -> dict[str, Any]:
    """What a program, or a run, may set for all of its process; the number of threads apart."""
    matmul = None
    with suppress(RuntimeError):  # a program that has set it by backend has no name for it
        matmul = torch.get_float32_matmul_precision()
    return {
        "matmul": matmul,
        "deterministic": torch.get_deterministic_debug_mode(),
        "benchmark": torch.backends.cudnn.benchmark,
    }


def use_process_settings(settings: dict[str, Any]) -> None:
    torch.backends.cudnn.benchmark = settings["benchmark"]
    if settings["matmul"] is not None:
        torch.set_float32_matmul_precision(settings["matmul"])
    if torch.get_deterministic_debug_mode() != settings["deterministic"]:  # its import is slow
        torch.set_deterministic_debug_mode(settings["deterministic"])


@contextmanager
def process_settings_restored() -> Iterator[None]:
    """What a run sets for all of its process is not the next run's in a sweep."""
    threads, settings = torch.get_num_threads(), process_settings()
    try:
        yield
    finally:
        use_process_settings(settings)
        use_threads(threads)


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Within, torch.zeros, torch.randn and the like make floats of this type; None: as before.

    Torch has one such type for all threads of a process, so no data may be read within."""
    if dtype is None:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def with_default_dtype(dtype: torch.dtype, step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step, which makes floats of this type. It is called for all replicas at once: in
    each of several threads, one would end what another still needs."""

    def typed(*args: Any) -> Any:
        with default_dtype(dtype):
            return step(*args)

    return typed


def align(optimizer: Optimizer) -> None:
    """Gives loaded state its weight's layout: fused kernels take both as they lie in memory."""
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            is_strided = isinstance(value, torch.Tensor) and value.layout == torch.strided
            if is_strided and value.shape == weight.shape and value.stride() != weight.stride():
                state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def _convolutions(task: nn.Module) -> list[nn.Parameter]:
    """The weights of convolutions, except lazy and parametrized ones."""
    weights = [
        dict(module.named_parameters(recurse=False)).get("weight")
        for module in task.modules()
        if isinstance(module, nn.Conv2d | nn.Conv3d)
    ]
    return [w for w in weights if w is not None and not nn.parameter.is_lazy(w)]
