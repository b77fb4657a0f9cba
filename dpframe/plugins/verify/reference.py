"""What every strategy must equal: a loop in plain torch."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpframe import DataModule, Task, Trainer, TrainerSettings
from dpframe.layers.exact import BATCH_NORMS, RowDropout, convert
from dpframe.metrics import Means
from dpframe.plugin import Share, checkpoint, current_share, move, permutation, seeding, updated_by
from dpframe.plugins.verify.course import Course
from dpframe.plugins.verify.distance import (
    INFINITY,
    ROUNDINGS,
    Curve,
    Log,
    Outputs,
    Weights,
    largest,
    logs_apart,
    relative,
    roundings,
    weights_apart,
)
from dpframe.strategies import CPU
from dpframe.task import TaskContext
from dpframe.trainer.compute import dynamo
from dpframe.trainer.compute.placement import with_default_dtype
from dpframe.trainer.evaluation import restore_modes
from dpframe.trainer.optim.modes import Modes
from dpframe.trainer.optim.optimizers import optimizers_of
from dpframe.trainer.optim.schedule import StepSchedule
from dpframe.trainer.optim.step import of_turn
from dpframe.trainer.outputs import detached, one_loss, prefixed
from dpframe.trainer.predictions import by_rows, join
from dpframe.trainer.step import EvalStep

FARTHEST = 1e-8  # that rounding may move weights: a float32 moves them farther
Cut = Callable[[Tensor], Sequence[Tensor]]
"""From the rows of a batch to the shares whose gradients are added up."""


@lru_cache(maxsize=8)
def reference(course: Course) -> Curve:
    """What the course gives in plain torch; the kit's own are the same for every strategy."""
    return train(course)


def train(course: Course, cut: Cut = lambda rows: [rows]) -> Curve:
    settings, (task, data) = course.settings, course.build()
    task.double()
    _make_exact(task, course)
    data.setup()
    train: Any = data.train_dataset()
    epochs = [_updates(course, data, len(train), epoch) for epoch in range(course.epochs)]
    by_step = settings.scheduler_every == "step"
    task.steps_per_epoch, task.total_steps = len(epochs[0]), len(epochs[0]) * course.epochs
    task.scheduler_steps = task.total_steps if by_step else course.epochs
    at = SimpleNamespace(global_step=0, epoch=0)
    task.run_context = context = TaskContext(at, seed=course.recipe.seed)
    forward = with_default_dtype(torch.float64, partial(_step, task))
    dynamo.skip_import()
    optimizer, scheduler, _ = optimizers_of(task)[""]
    modes = Modes([optimizer])
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    by_step |= isinstance(scheduler, StepSchedule)
    update = dynamo.step_of(optimizer)
    log: Log = {}
    everything: Outputs = []

    def add(kind: str, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            log.setdefault(f"{kind}/{name}", []).append((at.global_step, value))

    for updates in epochs:
        if not task.training:
            task.train()
        whole: Outputs = []
        done = 0  # batches
        for batches in updates:
            outputs: Outputs = []
            for context.batch_index, batch in enumerate(batches, done):
                of = batch.tolist()
                for rows in cut(batch):
                    places = [of.index(row) for row in rows.tolist()]
                    share = Share(_batch(data, train, rows), len(rows), len(of), places)
                    outputs.append((len(rows), forward(share)))
            done += len(batches)
            measured = [(rows, detached(output)) for rows, output in outputs]
            weights = [float(output.get("weight", rows)) for rows, output in measured]
            task.zero_grad()
            for weight, (_, output) in zip(weights, outputs, strict=True):
                (output["loss"] * (weight / sum(weights))).backward()
            norm, rate = _clip(optimizer, settings), float(optimizer.param_groups[0]["lr"])
            update()
            if scheduler is not None and by_step and not is_plateau:
                scheduler.step()
            at.global_step += 1
            add("step", {**task.summarize(means(measured)), "lr": rate, "grad_norm": norm})
            whole += measured
        everything += whole
        add("train", task.summarize(means(whole)))
        if data.val_dataset() is not None:
            modes.eval()
            with restore_modes(task):
                add("val", _validate(task, data, course.batch_size)[0])
            modes.train()
        at.epoch += 1
        if is_plateau:
            scheduler.step(log[settings.plateau_monitor][-1][1])
        elif scheduler is not None and not by_step:
            scheduler.step()
    modes.eval()
    return Curve(log, copy_weights(task.state_dict()), roundings(everything))


def sensitivity(course: Course, replicas: int) -> tuple[float, float]:
    """How far apart weights, and what is logged, may be by rounding alone; 0 if that can't be told.

    An optimizer such as Adam divides by the size of each weight's gradient: where the parts of a
    gradient almost cancel out, it makes steps of what is left, which is rounding. The reference
    itself then moves when it adds up the same gradients by the shares of the replicas, or by rows;
    with BatchNorm, which has to see all rows at once, when it adds them up in another order.
    """
    cuts: list[Cut] = [lambda rows: rows.chunk(replicas), lambda rows: rows.split(1)]
    if any(isinstance(module, BATCH_NORMS) for module in course.build()[0].modules()):
        cuts = [lambda rows: [rows.flip(0)]]
    whole, ends = reference(course), [train(course, cut) for cut in cuts]
    weights = max(weights_apart(end.weights, whole.weights, 0.0).most for end in ends)
    log = max(logs_apart(end.log, whole, whole.log, 0.0).most for end in ends)
    return _tolerance(weights), _tolerance(log)


def _tolerance(moved: float) -> float:
    # Farther than this it is no rounding, e.g. of a loss that gathers the rows of its batch.
    return min(ROUNDINGS * moved, FARTHEST) if moved <= FARTHEST else 0.0


def _make_exact(task: Task, course: Course) -> None:
    """Its BatchNorm and dropout layers are those of a run."""
    settings = course.settings
    convert(task, batch_norm=settings.has_global_batch_norm, dropout=settings.drops_by_row)
    places = _rows_of_layers(course) if settings.drops_by_row else {}
    for name, module in task.named_modules():
        if isinstance(module, RowDropout):
            module.row_dim, module.row_blocks = places[name]


@lru_cache(maxsize=8)
def _rows_of_layers(course: Course) -> dict[str, tuple[int | None, bool]]:
    """Which dimension of its input is the rows, for each layer that drops by row, and whether a
    block of it is one."""
    task, data = course.build()
    with CPU() as strategy:
        Trainer(task, data, strategy=strategy, settings=course.settings).prepare()
    layers = ((name, m) for name, m in task.named_modules() if isinstance(m, RowDropout))
    return {name: (layer.row_dim, layer.row_blocks) for name, layer in layers}


def _step(task: Task, share: Share) -> Any:
    with current_share.of(share, task.run_context, ""):
        return one_loss(task.training_step(share.batch), task, "training_step")


def means(outputs: Outputs) -> dict[str, float]:
    sums = Means(None, list)
    sums.add(outputs)
    return sums.total()


def copy_weights(state: dict[str, Any]) -> Weights:
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def _updates(course: Course, data: DataModule, rows: int, epoch: int) -> list[list[Tensor]]:
    """The rows of each batch of each update: the order is a fact of (seed, epoch)."""
    order = torch.arange(rows)
    if data.shuffle:
        order = permutation(rows, seed=course.recipe.seed, epoch=epoch)
    batches, every = list(order.split(course.batch_size)), course.accumulate
    return [batches[start : start + every] for start in range(0, len(batches), every)]


def _clip(optimizer: Optimizer, settings: TrainerSettings) -> float:
    """The gradients, as the settings say; returns their norm before that."""
    gradients = [p.grad for p in updated_by(optimizer) if p.grad is not None]
    norm = float(sum(gradient.square().sum() for gradient in gradients)) ** 0.5
    clip_norm, clip_value = of_turn("", settings.clip_norm, settings.clip_value)
    for gradient in gradients:
        if clip_norm is not None:
            gradient.mul_(min(1.0, clip_norm / (norm + 1e-6)))
        if clip_value is not None:
            gradient.clamp_(-clip_value, clip_value)
    return norm


def _batch(data: DataModule, dataset: Any, rows: Tensor) -> Any:
    batch = data.collate([dataset[int(row)] for row in rows])
    return move(batch, torch.device("cpu"), torch.float64)


# ---- what trained weights give on the CPU


def evaluate(course: Course, weights: Weights, step: int) -> tuple[Curve, frozenset[str]]:
    """The validation of these weights as logged, and the metrics that are not means over rows."""
    task, data = _restore(course, weights)
    numbers, whole = _validate(task, data, course.batch_size)
    _, parts = _validate(task, data, course.batch_size, cut=3)
    log = {f"val/{name}": [(step, value)] for name, value in numbers.items()}
    return Curve(log, {}, roundings(whole)), unlike(whole, parts)


@torch.no_grad()
def predict(course: Course, weights: Weights, size: int, seed: int = 0) -> Any:
    """The joined predictions on batches of `size`; without weights, those of an untrained task."""
    task, data = _restore(course, weights)
    by_name = {}
    with seeding.seeded(seed):
        for name, dataset in _sets_of(data.predict_dataset()).items():
            step = EvalStep(task, "predict_step", name=name)
            parts = _run_batches(step, data, dataset, size)
            by_name[name] = join([by_rows(part, rows, "it returned") for rows, part in parts])
    return by_name.get("", by_name)


@torch.no_grad()
def _validate(
    task: Task, data: Any, size: int, cut: int | None = None
) -> tuple[dict[str, float], Outputs]:
    """What is logged of a validation, and what it is made of: that of all data sets, and of each
    by its name."""
    task.double().eval()
    outputs: Outputs = []
    by_name = {}
    for name, held_out in _sets_of(data.val_dataset()).items():
        step = EvalStep(task, "validation_step", name=name)
        by_name[name] = _run_batches(step, data, held_out, size, cut)
        outputs += by_name[name]
    numbers, named = dict(task.summarize(means(outputs))), list(outputs)
    for name, its in by_name.items():
        if name:
            numbers |= {f"{name}/{key}": v for key, v in task.summarize(means(its)).items()}
            named += prefixed(its, name)
    return numbers, named


def _sets_of(returned: Any) -> dict[str, Any]:
    """What a DataModule's method returned, by the data sets' names; one alone has the name ""."""
    return returned if isinstance(returned, dict) else {"": returned}


def _run_batches(
    step: EvalStep, data: Any, dataset: Any, size: int, cut: int | None = None
) -> Outputs:
    """What a step returns for the batches of a data set, `size` rows each, in shares of `cut`."""
    forward, outputs = with_default_dtype(torch.float64, step), []
    for index, rows in enumerate(torch.arange(len(dataset)).split(size)):
        step.task.run_context.batch_index = index
        for first in range(0, len(rows), cut or size):
            places = range(len(rows))[first : first + (cut or size)]
            part = rows[first : first + len(places)]
            outputs += forward(Share(_batch(data, dataset, part), len(part), len(rows), places))
    return outputs


def _restore(course: Course, weights: Weights) -> tuple[Task, Any]:
    task, data = course.build()
    task.double().eval()
    task.run_context = TaskContext(seed=course.recipe.seed)
    if weights:
        checkpoint.load_task(task, {"task": weights})
    data.setup()
    return task, data


def unlike(whole: Outputs, parts: Outputs) -> frozenset[str]:
    """The names whose means differ by more than rounding."""
    rounding, others = roundings(whole), means(parts)
    return frozenset(
        name
        for name, mean in means(whole).items()
        if largest(relative(others.get(name, INFINITY), mean))
        > max(1e-9, ROUNDINGS * rounding[name])
    )
