"""The loop that every strategy must equal: plain torch, one process, rows weighed one by one."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Log = list[tuple[int, dict[str, float]]]
PerRow = Callable[..., dict[str, Tensor]]
"""Called with the net and columns of rows; gives one number a row: loss, metrics, `weight`."""


def fit(
    net: nn.Module,
    per_row: PerRow,
    optimizer: torch.optim.Optimizer,
    train: tuple[Tensor, ...],
    val: tuple[Tensor, ...] | None,
    *,
    batches: Callable[[int], Iterable[Tensor]],
    epochs: int,
    max_steps: int | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    scheduler: Any = None,
    scheduler_every: str = "epoch",
    log_every: int = 50,
    summarize: Callable[[dict[str, float]], dict[str, float]] = dict,
) -> Log:
    """Trains `net` and gives all that a logger should have got. `batches(epoch)` are row numbers.

    A step's gradient is taken in one go, of one mean over all rows of all its batches.
    """
    log: Log = []
    parameters = [p for p in net.parameters() if p.requires_grad]
    step = 0
    for epoch in range(epochs):
        whole, window = Sums(), Sums()
        order = list(batches(epoch))
        for start in range(0, len(order), accumulate):
            rows = torch.cat(order[start : start + accumulate])
            measured = per_row(net, *(column[rows] for column in train))
            weight = measured.get("weight", torch.ones_like(measured["loss"]))
            loss = (measured["loss"] * weight).sum() / weight.sum()
            gradients = torch.autograd.grad(loss, parameters)
            norm = float(torch.cat([g.flatten() for g in gradients]).square().sum().sqrt())
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if clip_norm is not None:
                    gradient = gradient * min(1.0, clip_norm / (norm + 1e-6))
                if clip_value is not None:
                    gradient = gradient.clamp(-clip_value, clip_value)
                parameter.grad = gradient
            used = rate(optimizer)
            optimizer.step()
            if scheduler is not None and scheduler_every == "step":
                scheduler.step()
            step += 1
            whole.add(measured)
            window.add(measured)
            if step % log_every == 0:
                numbers = {**summarize(window.means()), "lr": used, "grad_norm": norm}
                log.append((step, {f"step/{name}": value for name, value in numbers.items()}))
                window = Sums()
            if step == max_steps:
                break
        numbers = {f"train/{k}": v for k, v in summarize(whole.means()).items()}
        if val is not None:
            numbers |= {f"val/{k}": v for k, v in summarize(means(net, per_row, val)).items()}
        is_whole = start + accumulate >= len(order)
        progress = {"progress/lr": rate(optimizer), "progress/epoch": float(epoch + is_whole)}
        log.append((step, {**numbers, **progress}))
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(numbers["val/loss"])
        elif scheduler is not None and scheduler_every == "epoch":
            scheduler.step()
        if step == max_steps:
            break
    return log


def means(net: nn.Module, per_row: PerRow, columns: tuple[Tensor, ...]) -> dict[str, float]:
    with torch.no_grad():
        sums = Sums()
        sums.add(per_row(net, *columns))
        return sums.means()


def rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


class Sums:
    """Weighted sums of what was measured a row, in float64."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.weight = 0.0

    def add(self, measured: dict[str, Tensor]) -> None:
        measured = {name: value.detach().double() for name, value in measured.items()}
        weight = measured.pop("weight", torch.ones_like(measured["loss"]))
        self.weight += float(weight.sum())
        for name, value in measured.items():
            self.values[name] = self.values.get(name, 0.0) + float((value * weight).sum())

    def means(self) -> dict[str, float]:
        return {name: value / self.weight for name, value in self.values.items()}
