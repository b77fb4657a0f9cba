"""The loop that every strategy must equal: plain torch, one process, whole batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpframe import lean
from dpframe.data import move, permutation
from dpframe.task import Task, optimizer_of
from dpframe.testing.course import Course, why_not

Output = dict[str, Any]
Log = list[tuple[int, dict[str, float]]]
Measure = Callable[[Tensor], Output]
"""Row numbers in; out what the training step measured on them, as one batch."""

Way = Callable[[Measure, list[Tensor]], Tensor]
"""The loss that an update descends, given the global batches that it is made of."""


class Curve(NamedTuple):
    log: Log
    weights: list[tuple[str, Tensor]]


def exact(measure: Measure, batches: list[Tensor]) -> Tensor:
    """One mean over all rows, or over all weights."""
    outputs = [measure(rows) for rows in batches]
    weights = [weight_of(*pair) for pair in zip(outputs, batches, strict=True)]
    total = sum(weights)
    losses = [o["loss"] * (w / total) for o, w in zip(outputs, weights, strict=True)]
    return torch.stack(losses).sum()


def trained(course: Course, way: Way = exact) -> Curve:
    """Another `way` is what a strategy would do that errs in it."""
    return _Loop(course, way).run()


def weight_of(output: Output, rows: Tensor) -> float:
    return float(output.get("weight", len(rows)))


def weights_of(task: Task) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().cpu().clone()) for name, tensor in task.state_dict().items()]


class Sums:
    """Weighted sums of what was measured."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, output: Output, rows: Tensor) -> None:
        here = weight_of(output, rows)
        for name, value in output.items():
            if name != "weight":
                before = self.sums.get(name, (0.0, 0.0))
                self.sums[name] = before[0] + float(value) * here, before[1] + here

    def means(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self.sums.items()}


class _Loop:
    def __init__(self, course: Course, way: Way) -> None:
        self.course = course
        self.way = way
        self.settings = course.settings()
        self.task, self.data = course.build()
        self.task.double()
        self.data.setup()
        self.train: Any = self.data.train_dataset()
        self.parameters = [p for p in self.task.parameters() if p.requires_grad]
        self.optimizer, self.scheduler = self._made()
        self._step = lean.step_of(self.optimizer)  # the stock step, less a second of imports
        self.log: Log = []
        self.step = 0

    def run(self) -> Curve:
        for epoch in range(self.course.epochs):
            self._epoch(epoch)
        return Curve(self.log, weights_of(self.task))

    def _epoch(self, epoch: int) -> None:
        self.task.train()
        whole = Sums()
        for batches in self._updates(epoch):
            window = Sums()
            with torch.no_grad():
                for rows in batches:
                    output = self._measure(rows)
                    whole.add(output, rows)
                    window.add(output, rows)
            norm = self._update(batches)
            self.step += 1
            numbers = {**self.task.summarize(window.means()), "lr": self._rate, "grad_norm": norm}
            self.log.append((self.step, _named("step", numbers)))
        numbers = _named("train", self.task.summarize(whole.means())) | self._validated()
        self.log.append((self.step, numbers))
        self._end_epoch(numbers)

    def _updates(self, epoch: int) -> list[list[Tensor]]:
        """The rows of each batch of each update: the order is a fact of (seed, epoch)."""
        count, every = len(self.train), self.course.accumulate
        order = torch.arange(count)
        if self.data.shuffle:
            order = permutation(count, seed=self.course.recipe.seed, epoch=epoch)
        batches = list(order.split(self.course.batch_size))
        return [batches[start : start + every] for start in range(0, len(batches), every)]

    def _measure(self, rows: Tensor) -> Output:
        return self.task.training_step(self._batch(self.train, rows))

    def _batch(self, dataset: Any, rows: Tensor) -> Any:
        batch = self.data.collate([dataset[int(row)] for row in rows])
        return move(batch, torch.device("cpu"), torch.float64)

    def _update(self, batches: list[Tensor]) -> float:
        """The norm is the gradient's before it is clipped."""
        loss = self.way(self._measure, batches)
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        norm = float(sum(g.square().sum() for g in gradients if g is not None)) ** 0.5
        limit, largest = self.settings.clip_norm, self.settings.clip_value
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and limit is not None:
                gradient = gradient * min(1.0, limit / (norm + 1e-6))
            if gradient is not None and largest is not None:
                gradient = gradient.clamp(-largest, largest)
            parameter.grad = gradient
        self._step()
        if self.scheduler is not None and self._is_each_step:
            self.scheduler.step()
        return norm

    @torch.no_grad()
    def _validated(self) -> dict[str, float]:
        held_out: Any = self.data.val_dataset()
        if held_out is None:
            return {}
        self.task.eval()
        sums = Sums()
        for rows in torch.arange(len(held_out)).split(self.course.batch_size):
            sums.add(self.task.validation_step(self._batch(held_out, rows)), rows)
        return _named("val", self.task.summarize(sums.means()))

    def _end_epoch(self, numbers: dict[str, float]) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(numbers[self.settings.plateau_monitor])
        elif self.scheduler is not None and not self._is_each_step:
            self.scheduler.step()

    @property
    def _is_each_step(self) -> bool:
        is_plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        return self.settings.scheduler_every == "step" and not is_plateau

    @property
    def _rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _made(self) -> tuple[torch.optim.Optimizer, Any]:
        """With the lengths that a task may ask for when it makes its schedule."""
        steps = len(self._updates(0))
        self.task.steps_per_epoch, self.task.total_steps = steps, steps * self.course.epochs
        by_step = self.settings.scheduler_every == "step"
        self.task.scheduler_steps = self.task.total_steps if by_step else self.course.epochs
        lean.prepare()
        return optimizer_of(self.task)


def _named(kind: str, numbers: dict[str, float]) -> dict[str, float]:
    return {f"{kind}/{name}": value for name, value in numbers.items()}


# ---- what can be compared at all

NEAR = 1e-9


class Separable(NamedTuple):
    """`reason` is why the curve can't be compared; `others` are metrics that are no such means."""

    reason: str = ""
    others: frozenset[str] = frozenset()


def separable(course: Course) -> Separable:
    """Tries it: a batch's numbers against the means of what its halves give."""
    task, data = course.build()
    if reason := why_not(task):
        return Separable(reason)
    task.double().train()
    data.setup()
    train: Any = data.train_dataset()
    rows = torch.arange(min(course.batch_size, len(train)))
    whole, halves = Sums(), Sums()
    with torch.no_grad():
        for sums, parts in ((whole, [rows]), (halves, rows.tensor_split(2))):
            for part in filter(len, parts):
                batch = data.collate([train[int(row)] for row in part])
                sums.add(task.training_step(move(batch, torch.device("cpu"), torch.float64)), part)
    one, two = whole.means(), halves.means()
    apart = frozenset(name for name in one if not _is_near(one[name], two[name]))
    if "loss" not in apart:
        return Separable(others=apart)
    return Separable(
        f"the loss of its first {len(rows)} rows is {one['loss']:.6g} in one batch and "
        f"{two['loss']:.6g} in two: it is no mean over rows, or draws random numbers"
    )


def _is_near(one: float, two: float) -> bool:
    return abs(one - two) <= NEAR * max(abs(one), abs(two), 1e-300) or one != one


# ---- how far two runs are apart: the largest relative difference, and where it is

Weights = list[tuple[str, Tensor]]
INFINITY = float("inf")


class Apart(NamedTuple):
    """`where` reads on after "first apart" or "most apart"."""

    most: float
    where: str = ""


def weights_apart(given: Weights, wanted: Weights) -> float:
    return weights_compared(given, wanted).most


def weights_compared(given: Weights, wanted: Weights) -> Apart:
    """Tensor by tensor in their order: their names are another check's."""
    if [t.shape for _, t in given] != [t.shape for _, t in wanted]:
        names = ", ".join(name for name, _ in given)
        return Apart(INFINITY, f"these are not the task's own tensors: {names}")
    apart = [(_of(mine, its), name) for (name, its), (_, mine) in zip(wanted, given, strict=True)]
    most, name = max(apart, default=(0.0, ""))
    return Apart(most, f"most in {name}")


def logs_compared(given: Log, wanted: Log, names: set[str], tolerance: float) -> Apart:
    """Where they are first apart: later numbers follow from that one."""
    if [step for step, _ in given] != [step for step, _ in wanted]:
        return Apart(INFINITY, f"{len(given)} points were logged, {len(wanted)} are due")
    apart, where = 0.0, ""
    largest = {name: _largest(wanted, name) for name in names}
    for (step, numbers), (_, its) in zip(given, wanted, strict=True):
        for name in sorted(its.keys() & names):
            here = _relative(numbers.get(name, INFINITY), its[name], largest[name])
            if not here <= tolerance and not where:
                where = f"first in {name} at step {step}: {numbers.get(name)}, not {its[name]}"
            apart = max(apart, here)
    return Apart(apart, where)


def _of(given: Tensor, wanted: Tensor) -> float:
    """Relative to the largest number of the tensor."""
    if not wanted.numel():
        return 0.0
    largest = float(wanted.double().abs().max())
    return _known(float((given.double() - wanted.double()).abs().max()) / (largest or 1.0))


def _relative(given: float, wanted: float, largest: float) -> float:
    """A number that is nearly 0 by chance, as a loss of one row, has lost its last digits."""
    if given != given and wanted != wanted:
        return 0.0  # both say that there is no such number
    return _known(abs(given - wanted) / (max(abs(wanted), largest / 1000) or 1.0))


def _largest(log: Log, name: str) -> float:
    known = [abs(numbers[name]) for _, numbers in log if numbers.get(name) is not None]
    return max((number for number in known if number == number), default=0.0)


def _known(number: float) -> float:
    """What is not a number is apart from every number."""
    return number if number == number else INFINITY
