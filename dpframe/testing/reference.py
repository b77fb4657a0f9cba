"""The loop that every strategy must equal: plain torch, one process, whole batches."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpframe import checkpoint, lean, seeding
from dpframe.data import DataModule, move, permutation
from dpframe.task import Task, optimizer_of
from dpframe.testing.course import Course, trains, why_not
from dpframe.testing.report import TOLERANCE
from dpframe.trainer.predictions import by_rows, join

Output = dict[str, Any]
Log = list[tuple[int, dict[str, float]]]
Measure = Callable[[Tensor], Output]
"""Row numbers in; out what the training step measured on them, as one batch."""

Way = Callable[[Measure, list[Tensor]], Tensor]
"""The loss that an update descends, given the global batches that it is made of."""


ROUNDINGS = 16  # that may add up in a mean of rounded numbers


class Curve(NamedTuple):
    log: Log
    weights: list[tuple[str, Tensor]]
    rounding: dict[str, float] = {}  # the relative error of each metric that the task rounds

    def tolerance(self, name: str) -> float:
        """Of a number as it is logged; `summarize` may have made it of any of those measured."""
        own = name.partition("/")[2]
        if own in ("lr", "grad_norm"):
            return 0.0
        return ROUNDINGS * self.rounding.get(own, max(self.rounding.values(), default=0.0))


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
    """Weighted sums of what was measured, and to how many digits it is known."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.rounding: dict[str, float] = {}

    def add(self, output: Output, rows: Tensor) -> None:
        here = weight_of(output, rows)
        for name, value in output.items():
            if name != "weight":
                before = self.sums.get(name, (0.0, 0.0))
                self.sums[name] = before[0] + float(value) * here, before[1] + here
                self.rounding[name] = min(self.rounding.get(name, INFINITY), _rounding(value))

    def means(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self.sums.items()}


def _rounding(value: Any) -> float:
    """What float32 can hold may have been one before `.item()` or `.double()`."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return torch.finfo(value.dtype).eps
    fits = torch.tensor(float(value), dtype=torch.float32).item() == float(value)
    return torch.finfo(torch.float32).eps if fits else 0.0


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
        self.rounding: dict[str, float] = {}
        self.step = 0

    def run(self) -> Curve:
        for epoch in range(self.course.epochs):
            self._epoch(epoch)
        return Curve(self.log, weights_of(self.task), self.rounding)

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
        for name, rounding in whole.rounding.items():
            self.rounding[name] = max(rounding, self.rounding.get(name, 0.0))
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
        return self.task.training_step(_batch(self.data, self.train, rows))

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
        batches = torch.arange(len(held_out)).split(self.course.batch_size)
        sums = _measured(self.task.validation_step, self.data, held_out, batches)
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


def _measured(
    step: Callable[[Any], Output],
    data: DataModule,
    dataset: Any,
    parts: Iterable[Tensor],
    dtype: torch.dtype = torch.float64,
) -> Sums:
    sums = Sums()
    for rows in parts:
        sums.add(step(_batch(data, dataset, rows, dtype)), rows)
    return sums


def _batch(data: DataModule, dataset: Any, rows: Tensor, dtype: torch.dtype = torch.float64) -> Any:
    batch = data.collate([dataset[int(row)] for row in rows])
    return move(batch, torch.device("cpu"), dtype)


# ---- what a checkpoint gives on the CPU


@torch.no_grad()
def validated(
    course: Course, state: dict[str, Any], *, in_half: bool = False
) -> tuple[Curve, frozenset[str]]:
    """As it would be logged, and the metrics that are no means over rows."""
    task, data = _restored(course, state)
    dataset: Any = data.val_dataset()
    rows, dtype = torch.arange(len(dataset)), torch.float32 if in_half else torch.float64
    with torch.autocast("cpu", torch.bfloat16, enabled=in_half):
        whole, parts = (
            _measured(task.to(dtype).validation_step, data, dataset, rows.split(size), dtype)
            for size in (course.batch_size, 3)
        )
    numbers = _named("val", task.summarize(whole.means()))
    log = [(state["progress"]["global_step"], numbers)]
    return Curve(log, [], whole.rounding), _unlike(whole, parts)


@torch.no_grad()
def predictions(course: Course, state: dict[str, Any] | None, size: int, seed: int = 0) -> Any:
    """Of whole batches of `size`, joined; `state` is None where nothing was trained."""
    task, data = _restored(course, state)
    dataset: Any = data.predict_dataset()
    batches = torch.arange(len(dataset)).split(size)
    with seeding.seeded(seed):
        outputs = [task.predict_step(_batch(data, dataset, rows)) for rows in batches]
    pairs = zip(outputs, batches, strict=True)
    return join([by_rows(output, len(rows), "predict_step returned") for output, rows in pairs])


def _restored(course: Course, state: dict[str, Any] | None) -> tuple[Task, Any]:
    task, data = course.build()
    task.double().eval()
    if state is not None:
        checkpoint.load_task(task, state)
    data.setup()
    return task, data


# ---- what can be compared at all


class Separable(NamedTuple):
    """Which numbers of a recipe are means over its rows: only those can be alike everywhere."""

    reason: str = ""  # why the curve can't be compared
    others: frozenset[str] = frozenset()  # metrics that are no such means
    compared: str = ""  # the loss of which shares, where that could be tried
    coupled: str = ""  # how the loss differs


@torch.no_grad()
def separable(course: Course) -> Separable:
    """Tries it: a batch's numbers against the means of what its shares give."""
    task, data = course.build()
    reason = why_not(task)
    if not trains(task):
        return Separable(reason)
    task.double().train(not reason)
    data.setup()
    train: Any = data.train_dataset()
    rows = torch.arange(min(8, len(train)))
    shares = rows.split(-(-len(rows) // 3))

    def measured(parts: Sequence, seed: int = 0) -> Sums:
        with seeding.seeded(seed):
            return _measured(task.training_step, data, train, parts)

    if not reason and "loss" in _unlike(measured([rows]), measured([rows], 1)):
        reason = f"the loss of the same {len(rows)} rows differs by what it draws at random"
        task.eval()
    try:
        whole, parts = measured([rows]), measured(shares)
        draws = "loss" in _unlike(whole, measured([rows], 1))
    except Exception:
        if task.training:
            raise
        return Separable(reason)  # a step that can't do without training mode
    if draws:
        return Separable(reason)
    others = _unlike(whole, parts)
    sizes = " ".join(str(len(share)) for share in shares)
    compared = f"{course.recipe.name}'s loss of {len(rows)} rows, and of shares of {sizes}"
    if min(whole.rounding["loss"], parts.rounding["loss"]) > 0:
        reason = reason or "its loss is rounded to float32, so that its shares' gradients are, too"
    one, two = whole.means()["loss"], parts.means()["loss"]
    coupled = ""
    if "loss" in others:
        coupled = (
            f"{course.recipe.name}'s loss of {len(rows)} rows is {one:.9g} in one batch and "
            f"{two:.9g} in shares of {sizes}, so that other numbers of replicas train on something "
            "else: return the mean over the rows, or as 'weight' what it is a mean over; a loss "
            "that takes rows together, as a contrastive one does, needs a single replica"
        )
    return Separable(reason, others - {"loss"}, compared, coupled)


def _unlike(one: Sums, other: Sums) -> frozenset[str]:
    """The names whose means differ by more than rounding."""
    means = other.means()
    return frozenset(
        name
        for name, mean in one.means().items()
        if not _is_near(mean, means.get(name, INFINITY), one.rounding[name])
    )


def _is_near(one: float, two: float, rounding: float) -> bool:
    return abs(one - two) <= max(1e-9, ROUNDINGS * rounding) * max(abs(one), abs(two)) or one != one


# ---- how far two runs are apart: the largest relative difference, and where it is

Weights = list[tuple[str, Tensor]]
INFINITY = float("inf")


class Apart(NamedTuple):
    """`where` reads on after "first apart" or "most apart"."""

    most: float
    where: str = ""


def unlike(given: Any, wanted: Any, tolerance: float = 0.0, where: str = "") -> str:
    """Where two nests of containers first differ; empty where they are alike."""
    if isinstance(wanted, Tensor) and isinstance(given, Tensor):
        is_like = given.shape == wanted.shape and _of(given, wanted) <= max(
            tolerance, tolerance and ROUNDINGS * _rounding(wanted.flatten()[:1])
        )
        return "" if is_like else where or "a tensor"
    if isinstance(wanted, dict) and isinstance(given, dict) and given.keys() == wanted.keys():
        pairs = [(f"{where}.{key}".strip("."), given[key], wanted[key]) for key in wanted]
    elif isinstance(wanted, (list, tuple)) and isinstance(given, (list, tuple)):
        if len(given) != len(wanted):
            return f"{where or 'a list'} of {len(given)}, not {len(wanted)}"
        pairs = [(f"{where}[{i}]", *both) for i, both in enumerate(zip(given, wanted, strict=True))]
    elif isinstance(wanted, float) and isinstance(given, float):
        return "" if _relative(given, wanted, 0.0) <= tolerance else f"{where} {given}".strip()
    else:
        return "" if given == wanted else f"{where} {given}, not {wanted}"[:80].strip()
    apart = (unlike(mine, its, tolerance, name) for name, mine, its in pairs)
    return next(filter(None, apart), "")


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


def logs_compared(
    given: Log, wanted: Curve, names: set[str], tolerance: float = TOLERANCE
) -> Apart:
    """Where they are first apart: later numbers follow from that one; nowhere if they are not."""
    if [step for step, _ in given] != [step for step, _ in wanted.log]:
        return Apart(INFINITY, f"{len(given)} points were logged, {len(wanted.log)} are due")
    apart, where = 0.0, ""
    largest = {name: _largest(wanted.log, name) for name in names}
    for (step, numbers), (_, its) in zip(given, wanted.log, strict=True):
        for name in sorted(its.keys() & names):
            known = wanted.tolerance(name)
            # A number that is nearly 0 by chance, as a loss of one row, has lost its last digits.
            least = largest[name] if known else largest[name] / 1000
            here = _relative(numbers.get(name, INFINITY), its[name], least)
            if not here <= max(tolerance, known) and not where:
                where = f"first in {name} at step {step}: {numbers.get(name)}, not {its[name]}"
            apart = max(apart, here)
    return Apart(apart, where)


def _of(given: Tensor, wanted: Tensor) -> float:
    """Relative to the largest number of the tensor."""
    if not wanted.numel():
        return 0.0
    largest = float(wanted.double().abs().max())
    return _known(float((given.double() - wanted.double()).abs().max()) / (largest or 1.0))


def _relative(given: float, wanted: float, least: float) -> float:
    if given != given and wanted != wanted:
        return 0.0  # both say that there is no such number
    return _known(abs(given - wanted) / (max(abs(wanted), least) or 1.0))


def _largest(log: Log, name: str) -> float:
    known = [abs(numbers[name]) for _, numbers in log if numbers.get(name) is not None]
    return max((number for number in known if number == number), default=0.0)


def _known(number: float) -> float:
    """What is not a number is apart from every number."""
    return number if number == number else INFINITY
