"""What `configure_optimizers` returns, and the schedules of an optimizer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpframe import UserError
from dpframe.plugin import suggestion
from dpframe.plugins.lightning.numbers import find_number
from dpframe.trainer.optim.optimizers import kind_of

RETURNS = (
    "return an optimizer, a list of them, ([optimizers], [schedulers]), a dict with optimizer and "
    "lr_scheduler, or several such dicts"
)


@dataclass
class Schedule:
    """A scheduler, and when it is stepped."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    reduce_on_plateau: bool | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.reduce_on_plateau is None:
            self.reduce_on_plateau = isinstance(self.scheduler, ReduceLROnPlateau)

    def is_due(self, interval: str, count: int) -> bool:
        return self.interval == interval and count % self.frequency == 0


class Schedules:
    """The schedules of one optimizer. The task's hooks step them, so that `step` does nothing."""

    def __init__(self, several: list[Schedule], lengths: Iterable[float] = ()) -> None:
        """`lengths` are those of the training that the schedules were made for."""
        self.several = several
        self.lengths = lengths

    @property
    def total_steps(self) -> Any:
        """Where they end with the training: in a longer one they would not be the same."""
        ends = (getattr(each.scheduler, "total_steps", None) for each in self.several)
        known = sorted({*self.lengths, *(end for end in ends if end is not None)})
        return known[0] if len(known) == 1 else known or None

    @property
    def schedulers(self) -> list[Any]:
        return [each.scheduler for each in self.several]

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"several": [each.state_dict() for each in self.schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each, saved in zip(self.schedulers, state["several"], strict=True):
            each.load_state_dict(saved)


class ScheduledOptimizer(NamedTuple):
    """An optimizer and the schedules that follow it."""

    optimizer: Optimizer
    schedules: list[Schedule]


def step_due(task: Any, interval: str, count: int, *, plateaus: bool = False) -> None:
    """Steps the schedules of a Lightning task. As in Lightning, all but those that wait for a
    metric come before the validation."""
    measured = {**task.held.trainer.metrics, **task.known}
    for schedule in task.schedules:
        if schedule.reduce_on_plateau != plateaus or not schedule.is_due(interval, count):
            continue
        metric = None
        if schedule.reduce_on_plateau:
            metric = find_number(schedule.monitor, measured)
            if metric is None and schedule.strict:
                there = ", ".join(task.held.trainer.metrics) or "nothing"
                raise UserError(
                    f"{type(task.module).__name__}: a scheduler monitors {schedule.monitor}, "
                    f"which is not measured; there is {there}"
                )
            if metric is None:
                continue
        task.module.lr_scheduler_step(schedule.scheduler, metric)


def read_optimizers(returned: Any, label: str) -> list[ScheduledOptimizer]:
    """Each optimizer with its schedules. `label` begins the errors."""
    optimizers = list(returned) if isinstance(returned, list | tuple) else [returned]
    schedulers: list[Any] = []
    monitor: str | None = None
    if all(isinstance(each, Mapping) for each in optimizers):
        schedulers = [each["lr_scheduler"] for each in optimizers if "lr_scheduler" in each]
        monitor = next((each["monitor"] for each in optimizers if "monitor" in each), None)
        optimizers = [each.get("optimizer") for each in optimizers]
    elif len(optimizers) == 2 and isinstance(optimizers[0], list | tuple):
        optimizers, given = list(optimizers[0]), optimizers[1]
        schedulers = list(given) if isinstance(given, list | tuple) else [given]
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise UserError(f"{label} returned {kind_of(returned)}; {RETURNS}")
    schedules = [_schedule(each, monitor, label) for each in schedulers]
    groups: dict[int, list[Schedule]] = {id(optimizer): [] for optimizer in optimizers}
    for schedule in schedules:
        its = getattr(schedule.scheduler, "optimizer", optimizers[0])
        if id(its) not in groups:
            raise UserError(
                f"{label}: a scheduler belongs to an optimizer that was not returned; return it, "
                "too"
            )
        groups[id(its)].append(schedule)
    return [ScheduledOptimizer(optimizer, groups[id(optimizer)]) for optimizer in optimizers]


def _schedule(given: Any, monitor: str | None, label: str) -> Schedule:
    options = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    known = [field.name for field in fields(Schedule)]
    for key in options:
        if key not in known:
            raise UserError(f"{label}: lr_scheduler has no key {key}; {suggestion(key, known)}")
    if "scheduler" not in options:
        raise UserError(f"{label}: lr_scheduler has no scheduler; add it")
    if options.get("interval", "epoch") not in ("epoch", "step"):
        raise UserError(
            f"{label}: lr_scheduler has interval={options['interval']!r}; use 'epoch' or 'step'"
        )
    schedule = Schedule(**{"monitor": monitor, **options})
    if schedule.reduce_on_plateau and schedule.interval == "step":
        raise UserError(
            f"{label}: a ReduceLROnPlateau with interval='step' waits for a mean over all replicas "
            "after each step; use 'epoch'"
        )
    if schedule.reduce_on_plateau and schedule.monitor is None:
        raise UserError(
            f"{label}: a ReduceLROnPlateau without a monitor; add 'monitor': 'val_loss', say"
        )
    if schedule.reduce_on_plateau and str(schedule.monitor).endswith("_step"):
        raise UserError(
            f"{label}: a ReduceLROnPlateau monitors {schedule.monitor}, the number of one batch; "
            f"monitor {str(schedule.monitor).removesuffix('_step')}, the epoch's mean"
        )
    return schedule
