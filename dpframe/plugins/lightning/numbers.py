"""What a LightningModule logs: exact means of what its steps log, and numbers that hooks log."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor

from dpframe import Strategy, UserError
from dpframe.metrics import described
from dpframe.plugin import current_share, is_number
from dpframe.plugins.lightning.module import is_metric

SUM, OF = ":sum", ":of"  # of a value that counts another number than its rows
LOGGED = "loss:logged"  # by that name, beside the loss that is optimized
NAMED_WEIGHT = "weight:logged"  # by self.log; a step's "weight" is how much its loss counts
NOTHING = ":nothing"  # keeps a step that has only updated metrics from being empty
STAGES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
    "predict": (),
}
REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": sum, "min": min, "max": max}
TOLERANCE = 1e-6  # of what processes log in a hook: other devices may round differently
Numbers = dict[str, Any]


class Local(threading.local):
    """What this thread's step logs: replicas may have a thread each."""

    numbers: Numbers | None = None
    values: tuple[tuple[Any, Any], ...] = ()  # what metrics have returned, and the metrics


LOCAL = Local()


def note_value(metric: Any, args: Any, value: Any) -> None:
    """A hook of a metric's forward, whose value a step may log instead of the metric. Each Trainer
    of a task adds one, and the first of them notes the value."""
    if LOCAL.numbers is not None and not any(value is known for known, _ in LOCAL.values):
        LOCAL.values = (*LOCAL.values, (value, metric))


def without_stage(kind: str, name: str) -> str:
    """`val_loss`, `val/loss` and `loss` of a validation are all `val/loss`."""
    for stage in STAGES[kind]:
        for mark in "_/-":
            if name.startswith(f"{stage}{mark}") and len(name) > len(stage) + 1:
                return name[len(stage) + 1 :]
    return name


def find_number(name: str, metrics: Mapping[str, float]) -> float | None:
    """The number that a module calls so, e.g. in the `monitor` of a scheduler."""
    name = re.sub("_(epoch|step)$", "", name)
    for kind in ("val", "train", "test"):
        key = f"{kind}/{without_stage(kind, name)}"
        is_told = without_stage(kind, name) != name
        if key in metrics and (is_told or not _is_of_other(kind, name)):
            return metrics[key]
    return metrics.get(name)


class Log:
    """Where `self.log` puts a number: into the step at hand, or what a hook of a pass logs."""

    def __init__(self, kind_of_task: str) -> None:
        self.kind = ""  # train, val, test or predict
        self.names: dict[str, str] = {}  # under which a metric's result is logged, by the metric's
        self.per_step: Callable[[Numbers], None] | None = None  # takes those of hooks of training
        self.in_hooks: list[tuple[str, Any]] = []  # metrics that hooks have logged
        self._task = kind_of_task
        # By pass and name, a reduction and its values.
        self._of_passes: dict[str, dict[str, tuple[str, list[float]]]] = {}

    @contextmanager
    def step(self) -> Iterator[Numbers]:
        """Within, numbers belong to a step on a share."""
        numbers: Numbers = {}
        LOCAL.numbers = numbers
        try:
            yield numbers
        finally:
            LOCAL.numbers, LOCAL.values = None, ()

    @contextmanager
    def alone(self, kind: str) -> Iterator[Numbers]:
        """Within is a step of training, or of another kind, apart from any pass."""
        before = self.kind, self.names, self._of_passes
        self.kind, self.names, self._of_passes = kind, {}, {}
        try:
            with self.step() as numbers:
                yield numbers
        finally:
            self.kind, self.names, self._of_passes = before

    @contextmanager
    def hooks_of_step(self, trainer: Any) -> Iterator[None]:
        """Within, `self.log` logs to this step, as often as the step's own numbers are logged."""

        def log(numbers: Numbers) -> None:
            if trainer.training.calendar.logs(trainer.global_step + 1):
                trainer.log({f"step/{name}": value for name, value in numbers.items()})

        self.per_step = log
        try:
            yield
        finally:
            self.per_step = None

    def name_of(self, kind: str, path: str) -> str:
        """Under which the metric at this path of the module is logged: the path is another."""
        kind, _, _ = kind.partition("/")  # of one of several data sets
        return self.names.get(f"{kind}/{path}", without_stage(kind, path))

    def has_metric(self, kind: str, path: str) -> bool:
        return f"{kind.partition('/')[0]}/{path}" in self.names

    def metric_of(self, value: Any) -> Any:
        """The metric whose forward has returned this in the step at hand, if it was called once:
        else its result is over more than this value."""
        metric = next((metric for known, metric in LOCAL.values if known is value), None)
        return metric if sum(each is metric for _, each in LOCAL.values) == 1 else None

    def begin_pass(self, kind: str) -> None:
        self.kind = kind
        self._of_passes[kind] = {}

    def add(
        self,
        name: str,
        value: Any,
        attribute: str | None,
        *,
        batch_size: int | None,
        reduce_fx: Any,
        on_epoch: bool | None,
    ) -> None:
        key = without_stage(self.kind, name)
        if is_metric(value):
            if attribute is None:
                raise UserError(
                    f"self.log({name!r}, …) got a metric that {self._task} does not hold; make it "
                    "an attribute in __init__"
                )
            self.names[f"{self.kind}/{attribute}"] = key
            if LOCAL.numbers is None:
                self.in_hooks.append((name, value))
            return
        if not is_number(value):
            raise UserError(f"{self._task}: self.log({name!r}, …) got it {described(value)}")
        step = LOCAL.numbers
        if step is None and hasattr(value, "full_tensor"):  # of weights that fsdp cuts
            value = value.full_tensor()  # hooks come on all ranks
        value = value.detach().reshape(()) if isinstance(value, Tensor) else value
        how = getattr(reduce_fx, "__name__", str(reduce_fx))
        if how not in ("mean", *REDUCTIONS):
            raise UserError(
                f"{self._task}: self.log({name!r}, reduce_fx={how}) could not be exact over "
                "replicas; use mean, sum, min or max, or log a metric of torchmetrics"
            )
        if how != "mean" and self.kind == "train":
            raise UserError(
                f"{self._task}: self.log({name!r}, reduce_fx={how}) in training would be lost at a "
                "resume; hold a torchmetrics.SumMetric, MinMetric or MaxMetric, and log that"
            )
        if self.kind == "predict":
            raise UserError(
                f"{self._task}: self.log({name!r}, …) in a prediction; return it instead"
            )
        if how != "mean":
            self._of_pass.setdefault(key, (how, []))[1].append(float(value))
        elif step is None and self.kind == "train" and self.per_step is not None:
            if on_epoch:
                raise UserError(
                    f"{self._task}: self.log({name!r}, on_epoch=True) in a hook of a batch has no "
                    "rows to be averaged over; log it in training_step"
                )
            self.per_step({key: value})
        elif step is None:
            self._of_pass[key] = ("same", [float(value)])
        elif batch_size is None:
            step[NAMED_WEIGHT if key == "weight" else key] = value
        else:
            rows = current_share.rows or 1
            step[key + SUM], step[key + OF] = value * (batch_size / rows), batch_size / rows

    def of_pass(self, strategy: Strategy) -> dict[str, float]:
        """What the pass's hooks have logged, and sums and extremes over all its steps."""
        if strategy.world_size == 1:
            everywhere = [self._of_pass]
        else:
            everywhere = strategy.collectives.broadcast(strategy.collectives.gather(self._of_pass))
        numbers: dict[str, float] = {}
        for name in dict.fromkeys(name for here in everywhere for name in here):
            reduction = next(here[name][0] for here in everywhere if name in here)
            values = [value for here in everywhere for value in here.get(name, ("", []))[1]]
            if reduction != "same":
                numbers[f"{self.kind}/{name}"] = REDUCTIONS[reduction](values)
                continue
            spread = max(values) - min(values)
            if len(values) < len(everywhere) or spread > TOLERANCE * max(map(abs, values)):
                raise UserError(
                    f"{self._task} logs {name} in a hook, {values[0]:.6g} on one rank and "
                    "something else on another: a mean of ranks is no mean over rows; log it in "
                    f"the step, or by a metric of torchmetrics"
                )
            numbers[f"{self.kind}/{name}"] = values[0]
        self._of_pass.clear()
        return numbers

    @property
    def _of_pass(self) -> dict[str, tuple[str, list[float]]]:
        return self._of_passes.setdefault(self.kind, {})


class HookMetrics:
    """Metrics that only hooks update. As in Lightning, one is reset where it is logged itself, and
    else goes on from pass to pass, e.g. a MaxMetric."""

    def __init__(self) -> None:
        self.kept: set[str] = set()  # the names of those that go on
        self._loaded: dict[str, Any] = {}  # states, until the sanity pass is over

    @contextmanager
    def noted(self, module: Any, named: Iterable[tuple[str, Any]], log: Log) -> Iterator[None]:
        """Around hooks; `named` are the modules of the task."""
        metrics = {
            name: part
            for name, part in named
            if is_metric(part) and (name in self.kept or not part.update_called)
        }
        log.in_hooks.clear()
        yield
        updated = {name: metric for name, metric in metrics.items() if metric.update_called}
        for name, logged in log.in_hooks:
            if any(logged is metric for metric in updated.values()):
                module.log(name, logged.compute())
                logged.reset()
        if not module.trainer.sanity_checking:
            self.kept |= {name for name, metric in updated.items() if metric.update_called}

    def state_dict(self, named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        metrics = {name: metric for name, metric in named if name in self.kept}
        return {name: deepcopy(metric.metric_state) for name, metric in metrics.items()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        self._loaded = states

    def begin(self, named: Iterable[tuple[str, Any]]) -> None:
        """After the sanity pass: gives the metrics what was loaded."""
        loaded, self._loaded, there = self._loaded, {}, dict(named)
        for name, state in loaded.items() if loaded.keys() <= there.keys() else ():
            metric = there[name]
            for key, value in state.items():
                setattr(metric, key, value)
            metric.to(metric.device)
            self.kept.add(name)


def training_outputs(loss: Any, numbers: Numbers, output: Any = None) -> Numbers:
    """What a step of training returns: the loss that is optimized, with the weight that `output`
    may have beside it, and what it has logged."""
    if isinstance(output, dict) and "weight" in output:
        numbers["weight"] = output["weight"]
    if isinstance(loss, Tensor) and "loss" in numbers:
        numbers[LOGGED] = numbers.pop("loss")
    return evaluation_outputs(loss, numbers)


def evaluation_outputs(loss: Any, numbers: Numbers) -> Numbers:
    """Of a validation or test: what it has logged, and a loss that it only returns."""
    if not isinstance(loss, Tensor):
        return numbers or {NOTHING: 0.0}
    return {"loss": loss, **numbers}


def divide_counts(means: dict[str, float]) -> dict[str, float]:
    """Divides values that count another number than their rows by that number."""
    whole = {name: value for name, value in means.items() if ":" not in name}
    if LOGGED in means:
        whole["loss"] = means[LOGGED]
        if means["loss"] != means[LOGGED]:
            whole["optimized_loss"] = means["loss"]
    if NAMED_WEIGHT in means:
        whole["weight"] = means[NAMED_WEIGHT]
    for name, value in means.items():
        if name.endswith(SUM) and (of := means.get(name.removesuffix(SUM) + OF)):
            whole[name.removesuffix(SUM)] = value / of
    return whole


def _is_of_other(kind: str, name: str) -> bool:
    """Whether a name says that it is another stage's."""
    return any(without_stage(other, name) != name for other in STAGES if other != kind)
