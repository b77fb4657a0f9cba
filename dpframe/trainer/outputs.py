"""What a step may return, and what is made of it: its loss, losses by name, and weights."""

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from traceback import walk_tb
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dpframe.data import move
from dpframe.devices.accelerator import has_float64
from dpframe.errors import UserError, nearest
from dpframe.metrics import SOMETIMES_WEIGHTED, Weighed, described, is_number
from dpframe.rows import current_share, gather_shares
from dpframe.strategies.collectives import Collectives
from dpframe.sums import FLOATS, Sums
from dpframe.task import Output, Task

Measured = tuple[int, Output]
"""The rows of a share, and what the step measured on them."""
READ_AT_ONCE = {"cpu"}  # devices whose numbers can be read without waiting for the device
HOW = '{"loss": {"boxes": (mean, how_many), ...}}'
MISSPELT = 0.85  # los is near loss, and loss_a is not
NO_GRADIENT = "does not require grad"  # torch says
MOST_LOSSES = 128  # by name: a share sends as many counts, however many it has


def loss_of(output: Any, task: Task) -> Tensor:
    """The loss in a training step's output."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad:
        return loss
    if not any(parameter.requires_grad for parameter in task.parameters()):
        refuse_frozen(task)
    raise UserError(f"{type(task).__name__}.training_step returned {_describe(output)}")


def check_evaluated(output: Any, task: Task, step: str) -> None:
    """Refuses what a validation or test step must not return."""
    if step == "validation_step" and not task.has_own(step):
        step = "training_step"
    name = f"{type(task).__name__}.{step}"
    is_training = step == "training_step" and isinstance(output, dict)
    if is_training and "loss" not in output and _is_misspelt(*map(str, output)):
        raise UserError(f"{name} returned {_describe(output)}")
    if not isinstance(output, dict) or not output:
        what = "an empty dict" if output == {} else type(output).__name__
        raise UserError(
            f'{name} returned {what}; return a dict of what was measured, e.g. {{"loss": loss}}'
        )
    for key, value in output.items():
        if not is_number(value):
            raise UserError(f"{name} returned {key!r} {described(value)}")


@lru_cache
def _is_misspelt(*names: str) -> bool:
    """Whether one of them is meant to be the loss."""
    return bool(nearest("loss", filter(str.isalpha, names), cutoff=MISSPELT))


def refuse_backward(error: RuntimeError, task: Task) -> None:
    """Tells of a training_step that calls backward, which a validation by it meets first."""
    called = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
    if NO_GRADIENT in str(error) and {"training_step", "backward"} <= called:
        raise UserError(
            f"{type(task).__name__}.training_step calls backward(), which the Trainer does with "
            "the loss that it returns; leave it out, or write a validation_step where it is for "
            "something else"
        ) from error


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
    values = {
        name: value.detach() if isinstance(value, Tensor) and value.requires_grad else value
        for name, value in output.items()
    }
    return Weighed(values, output.weights, output.loss) if isinstance(output, Weighed) else values


def prefixed(measured: list[Measured], turn: str) -> list[Measured]:
    """What a turn measured, as `<turn>/loss` and so on; a weight stays one."""
    return [(rows, _prefixed(output, turn)) for rows, output in measured]


def _prefixed(output: Output, turn: str) -> Output:
    named = {n if n == "weight" else f"{turn}/{n}": value for n, value in output.items()}
    if not isinstance(output, Weighed):
        return named
    weights = {f"{turn}/{name}": weight for name, weight in output.weights.items()}
    return Weighed(named, weights, f"{turn}/{output.loss}")


def cloned(measured: list[Measured]) -> list[Measured]:
    """For steps that are CUDA graphs: each replay writes into the same memory."""
    return [(rows, _cloned(output)) for rows, output in measured]


def _cloned(output: Output) -> Output:
    values = {k: v.clone() if isinstance(v, Tensor) else v for k, v in output.items()}
    return Weighed(values, output.weights, output.loss) if isinstance(output, Weighed) else values


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


# ---- losses by name, each a mean over something of its own


def one_loss(output: Any, task: Task, step: str) -> Any:
    """The output of a step, whose losses by name are added up; it also has each by its name.

    A loss is the mean over `how_many` of all replicas: what it counts on them is gathered. One that
    a share leaves out counts nothing there. Logged are the means over all that they count, and the
    sum of these."""
    losses = output.get("loss") if isinstance(output, dict) else None
    if not isinstance(losses, dict):
        return output
    name = f"{task.own_class.__name__}.{step}"
    _check_losses(name, losses, output)
    means = {name: loss for name, (loss, _) in losses.items()}
    counts = {name: count for name, (_, count) in losses.items()}
    parts = [*means.values()]
    if current_share.rows != current_share.total:
        shares = _shares(task, tuple(losses), [*counts.values()], parts[0].device)
        parts = [loss * share for loss, share in zip(parts, shares, strict=True)]
    zeros = map(_is_zero, counts.values())
    parts = [ZeroLoss.apply(p) if is_zero else p for p, is_zero in zip(parts, zeros, strict=True)]
    return Weighed({**output, "loss": sum(parts[1:], parts[0]), **means}, counts)


@torch.no_grad()
def _shares(task: Task, names: tuple[str, ...], counts: list[Any], device: torch.device) -> Tensor:
    """By how much the means of this share count in those of the batch, in which a share counts by
    its rows.

    Counts travel with a mark of their name: the other shares don't know which losses this one has,
    nor in which order."""
    kind, bits = torch.float64, torch.int64
    if not has_float64(device):
        kind, bits = torch.float32, torch.int32
    own = torch.stack([_number(count, kind, device) for count in counts])
    marks = _marks(names, device)
    sent = torch.stack([marks, own.view(bits).long()], dim=1)
    sent = nn.functional.pad(sent, (0, 0, 0, MOST_LOSSES - len(names)))
    try:
        gathered = gather_shares(sent.flatten(), type(task).__name__).view(-1, 2)
    except UserError as error:
        raise UserError(f"losses by name gather what they count: {error}") from None
    is_same = gathered[:, 0] == marks[:, None]
    numbers = gathered[:, 1].to(bits).contiguous().view(kind)
    whole = torch.where(is_same, numbers, 0.0).sum(1).clamp(min=torch.finfo(kind).tiny)
    return own / whole * (current_share.total / current_share.rows)


def _number(count: Any, kind: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(count, Tensor):
        return count.detach().to(device, kind).reshape(())
    return torch.full((), float(count), dtype=kind, device=device)  # waits for no device


@lru_cache
def _marks(names: tuple[str, ...], device: torch.device) -> Tensor:
    """A number for each name, the same in all processes."""
    hashes = [blake2b(name.encode(), digest_size=8).digest() for name in names]
    numbers = [int.from_bytes(each, "little", signed=True) for each in hashes]
    return torch.tensor(numbers, device=device)


def _is_zero(count: Any) -> bool:
    """False where that is known on the GPU alone."""
    return not (isinstance(count, Tensor) and count.device.type not in READ_AT_ONCE) and not count


def _check_losses(name: str, losses: dict[Any, Any], output: dict[str, Any]) -> None:
    if not losses:
        raise UserError(f"{name} returned no loss in its dict of losses; return {HOW}")
    if len(losses) > MOST_LOSSES:
        raise UserError(f"{name} returned {len(losses)} losses by name; {MOST_LOSSES} is the limit")
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
            raise UserError(
                f"{name} returned the loss {key!r} as something other than a scalar tensor; "
                f"return {HOW}"
            )
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


class ZeroGradients(ZeroLoss):
    """Likewise, of weights: a hook of theirs gets a gradient of 0, of which no memory is taken."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.zeros_like(gradient).expand(shape) for shape in ctx.shapes)


# ---- means over weights, e.g. tokens


@dataclass
class Weighting:
    """Of the steps of one optimizer: all return a weight, or none does.

    The backwards add up to a gradient that is divided by the rows. The sum of the weights is known
    after the forwards, so what it has to be multiplied by comes later.
    """

    collectives: Collectives
    device: torch.device
    sums: Sums = FLOATS
    is_used: bool | None = None  # None before the first batch

    def of(self, measured: list[Measured]) -> list[Any]:
        """Each share's weight; none where steps return no weight.

        The processes agree once, after the first batch; a later batch that differs is refused in
        the process that has it."""
        if self.is_used is None:
            here = {"weight" in output for _, output in measured}
            several = self.collectives.sum_numbers([float(True in here), float(False in here)])
            if 0.0 not in several:
                raise UserError(SOMETIMES_WEIGHTED)
            self.is_used = several[0] > 0
        for _, output in measured:
            if ("weight" in output) is not self.is_used:
                raise UserError(SOMETIMES_WEIGHTED)
        return [output["weight"] for _, output in measured] if self.is_used else []

    def factor(self, rows: int, weights: list[Any]) -> Tensor:
        """The rows of the whole step over the sum of its weights; 0 where that sum is 0."""
        device = self.device
        if not has_float64(device):  # the host sums them
            device, weights = torch.device("cpu"), [float(weight) for weight in weights]
        if self.sums.is_exact:
            weights = self.sums.of_columns([map(float, weights)], self.collectives.sum_numbers)
        here = torch.zeros((), dtype=torch.float64, device=device)
        for weight in weights:  # numbers, and tensors on any replica's device
            here = here + move(weight, here.device)
        total = here if self.sums.is_exact else self.collectives.sum(here.sum())
        return torch.where(total == 0, 0.0, rows / total)


class IgnoredWeights(Weighting):
    """Where a task steps its optimizers itself: a weight that it returns counts in means alone."""

    def of(self, measured: list[Measured]) -> list[Any]:
        return []
