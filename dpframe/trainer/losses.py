"""Several losses by name, each a mean over something of its own, as the loss of a share."""

from typing import Any

import torch
from torch import Tensor

from dpframe.accelerator import has_float64
from dpframe.errors import UserError
from dpframe.metrics import described, is_number
from dpframe.rows import current_share
from dpframe.task import Task
from dpframe.trainer.outputs import READ_AT_ONCE

HOW = '{"loss": {"boxes": (mean, how_many), ...}}'


def one_loss(output: Any, task: Task, step: str) -> Any:
    """The output of a step, whose losses by name are added up; it also has each by its name.

    A loss is the mean over `how_many` of all replicas: what it counts on them is gathered."""
    losses = output.get("loss") if isinstance(output, dict) else None
    if not isinstance(losses, dict):
        return output
    name = f"{(task.own_class or type(task)).__name__}.{step}"
    _check(name, losses, output)
    parts = [loss for loss, _ in losses.values()]
    counts = [count for _, count in losses.values()]
    if current_share.rows != current_share.total:
        shares = _shares(task, parts[0], counts)
        parts = [loss * share for loss, share in zip(parts, shares, strict=True)]
    parts = [ZeroLoss.apply(p) if _is_zero(n) else p for p, n in zip(parts, counts, strict=True)]
    return {**output, "loss": sum(parts[1:], parts[0]), **dict(zip(losses, parts, strict=True))}


def _shares(task: Task, like: Tensor, counts: list[Any]) -> Tensor:
    """By how much the means of this share count in those of the batch, in which a share counts by
    its rows."""
    rows, total = current_share.rows, current_share.total
    dtype = torch.float64 if has_float64(like.device) else torch.float32
    own = torch.stack(
        [torch.as_tensor(n, dtype=dtype, device=like.device).reshape(()) for n in counts]
    )
    with torch.no_grad():
        try:
            whole = task.all_gather((own / rows).expand(rows, -1).contiguous()).sum(0)
        except UserError as error:
            raise UserError(f"losses by name gather what they count: {error}") from None
    return own / whole.clamp(min=torch.finfo(dtype).tiny) * (total / rows)


def _is_zero(count: Any) -> bool:
    """False where that is known on the GPU alone."""
    return not (isinstance(count, Tensor) and count.device.type not in READ_AT_ONCE) and not count


def _check(name: str, losses: dict[Any, Any], output: dict[str, Any]) -> None:
    if not losses:
        raise UserError(f"{name} returned no loss in its dict of losses; return {HOW}")
    if "weight" in output:
        raise UserError(
            f'{name} returned losses by name and a "weight"; each of them has its own: leave '
            '"weight" out'
        )
    for key, value in losses.items():
        if not (isinstance(value, tuple | list) and len(value) == 2):
            raise UserError(
                f"{name} returned the loss {key!r} as a {type(value).__name__}; return {HOW}"
            )
        if not isinstance(key, str) or key in ("loss", "weight"):
            raise UserError(f"{name} returned a loss named {key!r}; use another name, e.g. boxes")
        if key in output:
            raise UserError(f"{name} returned {key!r} among its losses and beside them; rename one")
        loss, count = value
        if not (isinstance(loss, Tensor) and loss.ndim == 0):
            raise UserError(f"{name} returned the loss {key!r} of no scalar tensor; return {HOW}")
        if not is_number(count):
            raise UserError(f"{name} returned the count of {key!r} {described(count)}")


class ZeroLoss(torch.autograd.Function):
    """A loss of 0 that depends on these tensors, and gives none of them a gradient: 0 times the
    gradient of a NaN would be NaN.

    The whole backward still runs, so that no other rank waits for a collective in it.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        return (None,) * len(ctx.needs_input_grad)
