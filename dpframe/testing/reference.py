"""The loop that every strategy must equal: plain torch, one process, whole batches."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpframe import checkpoint, lean, seeding
from dpframe.data import DataModule, move, permutation
from dpframe.task import Task, detached, optimizer_of
from dpframe.testing.compare import (
    INFINITY,
    ROUNDINGS,
    Curve,
    Log,
    Weights,
    largest,
    relative,
    rounding_of,
)
from dpframe.testing.course import Course, trains, why_not
from dpframe.trainer.evaluation import by_rows, join
from dpframe.trainer.settings import TrainerSettings

Output = dict[str, Any]
Way = Callable[[list[Tensor]], list[tuple[Tensor, float]]]
"""From an update's global batches to what it descends: the mean loss of these rows, by a factor."""


class Sums:
    """Weighted sums of what was measured, and to how many digits each is known."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.rounding: dict[str, float] = {}

    def add(self, output: Output, rows: Tensor) -> None:
        weight = weight_of(output, rows)
        for name, value in output.items():
            if name != "weight":
                self.sums[name] = self.sums.get(name, 0.0) + float(value) * weight
                self.weights[name] = self.weights.get(name, 0.0) + weight
                known = rounding_of(value)
                self.rounding[name] = min(self.rounding.get(name, INFINITY), known)

    def means(self) -> dict[str, float]:
        return {name: total / self.weights[name] for name, total in self.sums.items()}


def weight_of(output: Output, rows: Tensor) -> float:
    return float(output.get("weight", len(rows)))


@lru_cache(maxsize=8)
def reference(course: Course) -> Curve:
    """What the course gives in plain torch; the kit's own are the same for every strategy."""
    return trained(course)


def trained(course: Course, way: Way | None = None) -> Curve:
    """`way` is what a wrong strategy would descend; without it, the mean over all rows."""
    settings, (task, data) = course.settings, course.build()
    task.double()
    data.setup()
    train: Any = data.train_dataset()
    per_epoch = len(_updates(course, data, len(train), epoch=0))
    by_step = settings.scheduler_every == "step"
    task.steps_per_epoch, task.total_steps = per_epoch, per_epoch * course.epochs
    task.scheduler_steps = task.total_steps if by_step else course.epochs
    lean.prepare()
    optimizer, scheduler = optimizer_of(task)
    update = lean.step_of(optimizer)
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    log: Log = []
    rounding: dict[str, float] = {}
    step = 0
    for epoch in range(course.epochs):
        task.train()
        whole = Sums()
        for batches in _updates(course, data, len(train), epoch):
            parts = way(batches) if way else [(rows, 0.0) for rows in batches]
            outputs = [(task.training_step(_batch(data, train, rows)), rows) for rows, _ in parts]
            if way:
                factors = [factor for _, factor in parts]
            else:
                weights = [weight_of(output, rows) for output, rows in outputs]
                factors = [weight / sum(weights) for weight in weights]
            losses = [output["loss"] * f for (output, _), f in zip(outputs, factors, strict=True)]
            norm = _set_gradients(task, torch.stack(losses).sum(), settings)
            update()
            if scheduler is not None and by_step and not is_plateau:
                scheduler.step()
            step += 1
            window = Sums()
            for output, rows in outputs:
                whole.add(detached(output), rows)
                window.add(detached(output), rows)
            rate = float(optimizer.param_groups[0]["lr"])
            numbers = {**task.summarize(window.means()), "lr": rate, "grad_norm": norm}
            log.append((step, _named("step", numbers)))
        numbers = _named("train", task.summarize(whole.means()))
        if data.val_dataset() is not None:
            numbers |= _named(
                "val", task.summarize(_evaluated(task, data, course.batch_size).means())
            )
        log.append((step, numbers))
        for name, known in whole.rounding.items():
            rounding[name] = max(known, rounding.get(name, 0.0))
        if is_plateau:
            scheduler.step(numbers[settings.plateau_monitor])
        elif scheduler is not None and not by_step:
            scheduler.step()
    return Curve(log, weights_of(task), rounding)


def weights_of(task: Task) -> Weights:
    return {name: tensor.detach().cpu().clone() for name, tensor in task.state_dict().items()}


def _updates(course: Course, data: DataModule, rows: int, epoch: int) -> list[list[Tensor]]:
    """The rows of each batch of each update: the order is a fact of (seed, epoch)."""
    order = torch.arange(rows)
    if data.shuffle:
        order = permutation(rows, seed=course.recipe.seed, epoch=epoch)
    batches, every = list(order.split(course.batch_size)), course.accumulate
    return [batches[start : start + every] for start in range(0, len(batches), every)]


def _set_gradients(task: Task, loss: Tensor, settings: TrainerSettings) -> float:
    """Clipped as the settings say; returns the norm before that."""
    parameters = [p for p in task.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    norm = float(sum(g.square().sum() for g in gradients if g is not None)) ** 0.5
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and settings.clip_norm is not None:
            gradient = gradient * min(1.0, settings.clip_norm / (norm + 1e-6))
        if gradient is not None and settings.clip_value is not None:
            gradient = gradient.clamp(-settings.clip_value, settings.clip_value)
        parameter.grad = gradient
    return norm


def _named(kind: str, numbers: dict[str, float]) -> dict[str, float]:
    return {f"{kind}/{name}": value for name, value in numbers.items()}


def _batch(data: DataModule, dataset: Any, rows: Tensor, dtype: torch.dtype = torch.float64) -> Any:
    batch = data.collate([dataset[int(row)] for row in rows])
    return move(batch, torch.device("cpu"), dtype)


@torch.no_grad()
def _evaluated(task: Task, data: Any, size: int, dtype: torch.dtype = torch.float64) -> Sums:
    task.to(dtype).eval()
    held_out, sums = data.val_dataset(), Sums()
    for rows in torch.arange(len(held_out)).split(size):
        sums.add(task.validation_step(_batch(data, held_out, rows, dtype)), rows)
    return sums


# ---- what trained weights give on the CPU


def evaluated(
    course: Course, weights: Weights, step: int, *, in_half: bool = False
) -> tuple[Curve, frozenset[str]]:
    """Their validation as it would be logged, and the metrics that are no means over rows."""
    task, data = _restored(course, weights)
    dtype = torch.float32 if in_half else torch.float64
    with torch.autocast("cpu", torch.bfloat16, enabled=in_half):
        whole, parts = (_evaluated(task, data, size, dtype) for size in (course.batch_size, 3))
    log = [(step, _named("val", task.summarize(whole.means())))]
    return Curve(log, {}, whole.rounding), _unlike(whole, parts)


@torch.no_grad()
def predictions(course: Course, weights: Weights, size: int, seed: int = 0) -> Any:
    """Of whole batches of `size`, joined; without weights, those of the task as it was made."""
    task, data = _restored(course, weights)
    dataset: Any = data.predict_dataset()
    batches = torch.arange(len(dataset)).split(size)
    with seeding.seeded(seed):
        outputs = [task.predict_step(_batch(data, dataset, rows)) for rows in batches]
    pairs = zip(outputs, batches, strict=True)
    return join([by_rows(output, len(rows), "predict_step returned") for output, rows in pairs])


def _restored(course: Course, weights: Weights) -> tuple[Task, Any]:
    task, data = course.build()
    task.double().eval()
    if weights:
        checkpoint.load_task(task, {"task": weights})
    data.setup()
    return task, data


# ---- what can be compared at all


class Separable(NamedTuple):
    """Which numbers of a recipe are means over its rows: only those can be the same everywhere."""

    reason: str = ""  # why its curve can't be compared
    others: frozenset[str] = frozenset()  # metrics that are no such means
    compared: str = ""  # the loss of which shares, where that could be tried
    coupled: str = ""  # how the loss differs


@torch.no_grad()
def separable(course: Course) -> Separable:
    """Compares a batch's numbers with the means of what its shares give."""
    task, data = course.build()
    reason = why_not(task)
    if not trains(task):
        return Separable(reason)
    task.double().train(not reason)
    data.setup()
    train: Any = data.train_dataset()
    rows = torch.arange(min(8, len(train)))
    shares = rows.split(-(-len(rows) // 3))

    def measured(*parts: Tensor, seed: int = 0) -> Sums:
        sums = Sums()
        with seeding.seeded(seed):
            for part in parts:
                sums.add(task.training_step(_batch(data, train, part)), part)
        return sums

    def draws() -> bool:
        return "loss" in _unlike(measured(rows), measured(rows, seed=1))

    if not reason and draws():
        reason = f"the loss of the same {len(rows)} rows differs by what it draws at random"
        task.eval()
    try:
        whole, parts = measured(rows), measured(*shares)
        if draws():
            return Separable(reason)
    except Exception:
        if task.training:
            raise
        return Separable(reason)  # a step that needs training mode
    others = _unlike(whole, parts)
    sizes = " ".join(str(len(share)) for share in shares)
    compared = f"{course.recipe.name}'s loss of {len(rows)} rows, and of shares of {sizes}"
    if min(whole.rounding["loss"], parts.rounding["loss"]) > 0:
        reason = reason or "its loss is rounded to float32, so that its shares' gradients are, too"
    coupled = ""
    if "loss" in others:
        one, two = whole.means()["loss"], parts.means()["loss"]
        coupled = (
            f"{course.recipe.name}'s loss of {len(rows)} rows is {one:.9g} in one batch and "
            f"{two:.9g} in shares of {sizes}, so that other numbers of replicas train on something "
            "else: return the mean over the rows, or as 'weight' what it is a mean over; a loss "
            "that takes rows together, e.g. a contrastive one, needs a single replica"
        )
    return Separable(reason, others - {"loss"}, compared, coupled)


def _unlike(one: Sums, other: Sums) -> frozenset[str]:
    """The names whose means differ by more than rounding."""
    means = other.means()
    return frozenset(
        name
        for name, mean in one.means().items()
        if largest(relative(means.get(name, INFINITY), mean))
        > max(1e-9, ROUNDINGS * one.rounding[name])
    )
