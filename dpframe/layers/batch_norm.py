"""BatchNorm of the global batch: each replica normalises its rows by the statistics of them all.

A layer gathers the mean, the squared deviations and the count of each share, and merges them as
Chan, Golub and LeVeque do: sums of squares would lose the digits of a mean that is large.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpframe.rows import current_share, gather_shares, ongoing, refuse_unlike_forward

KEY = "trainer.batch_norm=global"


def is_shared() -> bool:
    """Whether other replicas have rows of this batch, too."""
    refuse_unlike_forward(f"{KEY}: a BatchNorm")
    return bool(current_share.rows) and current_share.rows != current_share.total


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As torch.nn.functional.batch_norm in training, over the rows of all replicas."""
    mean, var, count = _merged(*_moments(x))
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = var * (count / (count - 1))
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    # Torch's kernel takes statistics as numbers. What these give to the gradient comes through the
    # weight and the bias, in which they cancel out.
    inverse = torch.rsqrt(var + eps)
    factor = inverse if weight is None else inverse * weight
    shift = (mean.detach() - mean) * factor
    if bias is not None:
        shift = shift + bias
    fixed = mean.detach(), var.detach()
    return F.batch_norm(x, *fixed, factor / inverse.detach(), shift, False, 0.0, eps)


def _moments(x: Tensor) -> tuple[Tensor, Tensor, float]:
    """The mean, the variance and the count of each channel in this share."""
    channels = x.shape[1]
    count = x.numel() // channels
    if not count:  # e.g. no box in these images
        zeros = x.sum() * x.new_zeros(channels, dtype=_wide(x))
        return zeros, zeros, 0.0
    mean, var = Moments.apply(x)
    return mean, var, float(count)


def _merged(mean: Tensor, var: Tensor, count: float) -> tuple[Tensor, Tensor, Tensor]:
    channels = len(mean)
    sent = torch.cat([mean, var * count, mean.new_full((1,), count)])
    gathered = gather_shares(sent, KEY)
    means, squares, counts = gathered.split([channels, channels, 1], dim=1)
    total = counts.sum()
    whole = (means * counts).sum(0) / total
    squares = squares.sum(0) + ((means - whole).square() * counts).sum(0)
    return whole, squares / total, total.detach()


class Moments(torch.autograd.Function):
    """Mean and variance of each channel, in 32 bits at least. Torch's own would keep a copy of an
    `x` of 16 bits, and reads it once more in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        dims = [dim for dim in range(x.ndim) if dim != 1]
        var, mean = torch.var_mean(x.to(_wide(x)), dims, correction=0)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_var: Tensor) -> Tensor:  # type: ignore[override]
        x, mean = ctx.saved_tensors
        count = x.numel() // len(mean)
        shape = [1, -1, *[1] * (x.ndim - 2)]
        deviations = x - mean.view(shape)
        gradient = deviations * (of_var * (2 / count)).view(shape) + (of_mean / count).view(shape)
        return gradient.to(x.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class OfAllRows(TorchFunctionMode):
    """Within, batch_norm in training is that of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0  # how often it was called

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.batch_norm:
            self.count += 1
            is_training = kwargs.get("training", args[5] if len(args) > 5 else False)
            if is_training:  # a watched row is to be the same beside any others
                return batch_norm(*args, **kwargs) if ongoing.watch is None else args[0]
        return function(*args, **kwargs)
