"""What a step may return, and what is made of it."""

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from dpframe.accelerator import has_float64
from dpframe.errors import UserError
from dpframe.metrics import described, is_number
from dpframe.task import Output, Task

Measured = tuple[int, Output]
"""The rows of a share, and what the step measured on them."""
READ_AT_ONCE = {"cpu"}  # devices whose numbers can be read without waiting for the device


def loss_of(output: Any, task: Task) -> Tensor:
    """The loss in a training step's output."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad:
        return loss
    if not any(map(is_trained, task.parameters())):
        refuse_frozen(task)
    raise UserError(f"{type(task).__name__}.training_step returned {_describe(output)}")


def check_evaluated(output: Any, task: Task, step: str) -> None:
    """Refuses what a validation or test step must not return."""
    if step == "validation_step" and not task.has_own(step):
        step = "training_step"
    name = f"{type(task).__name__}.{step}"
    if not isinstance(output, dict) or not output:
        what = "an empty dict" if output == {} else type(output).__name__
        raise UserError(
            f'{name} returned {what}; return a dict of what was measured, e.g. {{"loss": loss}}'
        )
    for key, value in output.items():
        if not is_number(value):
            raise UserError(f"{name} returned {key!r} {described(value)}")


def is_nothing(output: Output) -> bool:
    """Whether a loss is NaN and counts nothing: a mean over weights of 0.

    False where that is known on the GPU alone.
    """
    if output["loss"].device.type not in READ_AT_ONCE:
        return False
    return not output.get("weight", True) and not math.isfinite(output["loss"].item())


def refuse_frozen(task: Task) -> NoReturn:
    raise UserError(
        f"all weights of {type(task).__name__} are frozen; leave some with requires_grad=True in "
        "each step"
    )


def is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad


def exact_weight(weight: Any, task: Task) -> Tensor | float:
    """In 64 bits: a count of another type would be divided in 32."""
    name = f"{type(task).__name__}.training_step"
    if not is_number(weight):
        raise UserError(f"{name} returned 'weight' {described(weight)}")
    if not isinstance(weight, Tensor):
        return float(weight if isinstance(weight, int | float) else weight.item())
    if weight.requires_grad:
        raise UserError(
            f"{name} returned a 'weight' with a gradient; it only says how much the loss counts: "
            "return weight.detach()"
        )
    if not has_float64(weight.device):
        return float(weight.item())  # waits for the device
    return weight.double().reshape(())


def detached(output: Output) -> Output:
    return {
        name: value.detach() if isinstance(value, Tensor) and value.requires_grad else value
        for name, value in output.items()
    }


def prefixed(measured: list[Measured], turn: str) -> list[Measured]:
    """What a turn measured, as `<turn>/loss` and so on; a weight stays one."""
    return [
        (rows, {name if name == "weight" else f"{turn}/{name}": v for name, v in output.items()})
        for rows, output in measured
    ]


def cloned(measured: list[Measured]) -> list[Measured]:
    """For steps that are CUDA graphs: each replay writes into the same memory."""
    return [
        (rows, {k: v.clone() if isinstance(v, Tensor) else v for k, v in output.items()})
        for rows, output in measured
    ]


def _describe(output: Any) -> str:
    wanted = 'return {"loss": scalar tensor, **metrics}'
    if not isinstance(output, dict):
        return f"{type(output).__name__}; {wanted}"
    if "loss" not in output:
        has = ", ".join(map(str, output)) or "nothing"
        return f"a dict without 'loss' (it has {has}); {wanted}"
    loss = output["loss"]
    if not isinstance(loss, Tensor):
        return f"a loss that is a {type(loss).__name__}, not a tensor; {wanted}"
    if loss.ndim:
        return f"a loss of shape {tuple(loss.shape)}; reduce it to a scalar, e.g. with loss.mean()"
    if not torch.is_grad_enabled():
        return "a loss without a gradient; call fit outside of torch.no_grad() and inference_mode()"
    return "a loss without a gradient; compute it from the output, without .detach() or .item()"
