"""A Task is what a recipe trains: model, loss and optimizer in one nn.Module."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpframe.adapter import Adapter
from dpframe.composite import name_of
from dpframe.errors import UserError, suggestion
from dpframe.lightning_names import INSTEAD, Instead
from dpframe.named_metrics import NONE, NamedMetrics
from dpframe.parameters import grouped, optimizer_over
from dpframe.rows import OverridableProperty, RowsOfBatch
from dpframe.scheduler_lengths import scheduler_over
from dpframe.schedules import LRSchedule

Output = dict[str, Any]
"""A step returns {"loss": scalar, **metrics}, and "weight" where the mean is not over rows."""


class SeenProgress(Protocol):
    """What a Task can ask while it is trained: a Trainer's Progress, and its Strategy."""

    @property
    def global_step(self) -> int: ...

    @property
    def epoch(self) -> int: ...


class SeenStrategy(Protocol):
    """What a task reads of its strategy."""

    device: torch.device
    rank: int
    replicas: int
    world_size: int
    sharding: Any

    def gather_rows(self, x: Tensor, total: int) -> Tensor: ...


class TaskContext:
    """Where a task is trained. It belongs to the Trainer: a copy of the task shares it."""

    def __init__(
        self,
        progress: SeenProgress | None = None,
        strategy: SeenStrategy | None = None,
        *,
        seed: int = 0,
        is_compiled: bool = False,
    ) -> None:
        self.progress = progress
        self.strategy = strategy
        self.seed = seed
        self.is_compiled = is_compiled
        self.batch_index = 0  # of the batch at hand, in its epoch or its pass
        self.batches: int | None = None  # of an evaluation's pass; None where it is unknown
        self.is_cut = False  # whether a step has a piece of its share

    @property
    def epoch(self) -> int:
        return self.progress.epoch if self.progress else 0

    def __deepcopy__(self, memo: dict) -> "TaskContext":
        return self

    def __reduce__(self) -> tuple:  # in a file or another process there is no such Trainer
        return TaskContext, ()


class Task(RowsOfBatch, nn.Module):
    """Override `training_step`; the rest has a default. Steps return what they measured.

    A task may also have methods with the names of a callback's hooks, e.g. `on_epoch_start(self,
    trainer)`: they are called before the callbacks'.
    """

    steps_per_epoch = 0  # the Trainer sets these three before configure_optimizer
    total_steps = 0
    scheduler_steps = 0  # how often its scheduler will be stepped
    optimizes_by_hand = False  # whether its training_step steps the optimizers itself
    own_class: type  # where the user's code is: this class, or that of a module that it is around
    adapter = Adapter()  # of a task around another framework's module: the task itself
    scale_lr: Mapping[str, Any] | None = None  # task.scale_lr: batch_size, factor, warmup_steps
    lr_schedule: LRSchedule | None = None  # task.schedule, stepped by step
    schedules_turns = False  # schedulers step after each turn of their optimizer, not each epoch
    optimizer_names: Sequence[str] = ()  # set after configure_optimizer, if there are several
    run_context = TaskContext()  # the Trainer's

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.own_class = cls

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: Callable[..., Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        *,
        optimizers: Mapping[str, Callable[..., Optimizer]] | None = None,
        schedulers: Mapping[str, Callable[..., LRScheduler]] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """`optimizers`, and `schedulers` for some of them, are named as the submodules are whose
        weights they update. `metrics` become `self.metrics`."""
        super().__init__()
        self._refuse_made("optimizer", "SGD, lr=0.1", optimizer, *(optimizers or {}).values())
        steps = "lr_scheduler.StepLR, step_size=10"
        self._refuse_made("scheduler", steps, scheduler, *(schedulers or {}).values())
        if net is not None:
            self.net = net
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.make_optimizers = dict(optimizers or {})
        self.make_schedulers = dict(schedulers or {})
        if metrics is not None:
            self.metrics = NamedMetrics(metrics)

    def _refuse_made(self, word: str, options: str, *several: Any) -> None:
        for made in several:
            if made is not None and not callable(made):
                given = repr(made) if isinstance(made, str) else f"a {type(made).__name__}"
                raise UserError(
                    f"{type(self).__name__} was given {given} as {word}; pass what makes one, e.g. "
                    f"functools.partial(torch.optim.{options}): it is made once the weights are "
                    "placed"
                )

    if TYPE_CHECKING:
        metrics: Any  # NamedMetrics, unless a task of its own has set it
    else:

        @OverridableProperty
        def metrics(self) -> NamedMetrics:
            """Those of task.metrics: a step returns {"loss": loss, **self.metrics(prediction,
            target)}. Without any it does nothing."""
            return dict(self.named_children()).get("metrics", NONE)

    @OverridableProperty
    def global_step(self) -> int:
        """How many steps are done."""
        return self.run_context.progress.global_step if self.run_context.progress else 0

    @OverridableProperty
    def epoch(self) -> int:
        """How many whole epochs are done."""
        return self.run_context.progress.epoch if self.run_context.progress else 0

    @OverridableProperty
    def device(self) -> torch.device:
        """Where the weights are. Under data_parallel with several GPUs, in a step: the batch's."""
        weight = next(self.parameters(), None)
        if weight is not None:
            return weight.device
        return (
            self.run_context.strategy.device if self.run_context.strategy else torch.device("cpu")
        )

    @OverridableProperty
    def rank(self) -> int:
        """The number of this process."""
        return self.run_context.strategy.rank if self.run_context.strategy else 0

    def training_step(self, *args: Any, **kwargs: Any) -> Output:
        """Takes a batch; with several optimizers also `turn`, the name of the one to train."""
        raise UserError(
            f"{type(self).__name__} has no training_step; a Task that is fitted needs one"
        )

    def validation_step(self, batch: Any) -> Output:
        """What is measured on a batch; without one of its own, what `training_step` returns."""
        return self.training_step(batch)

    def test_step(self, batch: Any) -> Output:
        """The same in a test; without one of its own, what `validation_step` returns."""
        return self.validation_step(batch)

    def predict_step(self, batch: Any) -> Any:
        """A tensor whose first dimension is the rows, a list of an entry a row, or tuples and dicts
        of these."""
        raise UserError(
            f"{type(self).__name__} has no predict_step, which this mode calls; write one"
        )

    @classmethod
    def has_own(cls, step: str) -> bool:
        """Whether this kind of task has written the step itself."""
        return getattr(cls, step) is not getattr(Task, step)

    def setup(self, trainer: Any) -> None:
        """Before its weights are placed, e.g. to make layers that depend on `trainer.data`."""

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Turns the exact means of a pass into what is reported, e.g. the root of a mean."""
        return means

    def turns(self) -> Sequence[str]:
        """The optimizers that train on this step's batches, by name and one after the other.

        The default is all of them, in the order of `configure_optimizer`. Every process has to
        return the same: let it follow from `self.global_step` and `self.epoch`.
        """
        return self.optimizer_names

    def configure_optimizer(self) -> Any:
        """The optimizer, or (optimizer, scheduler), or a dict with one of these by name."""
        name = type(self).__name__
        if self.make_optimizers:
            return self._made_by_name()
        if self.make_optimizer is None:
            raise UserError(
                f"{name} has no optimizer; set task.optimizer or write configure_optimizer"
            )
        optimizer = optimizer_over(self.make_optimizer, self._named(), within=self)
        return self._scheduled("", optimizer, self.make_scheduler)

    def _made_by_name(self) -> dict[str, Any]:
        parts = dict(self.named_children())
        for name in (*self.make_optimizers, *self.make_schedulers):
            if name not in parts:
                raise UserError(
                    f"task.optimizers.{name} is to update the weights of {type(self).__name__}."
                    f"{name}, which is no submodule; {suggestion(name, parts)}"
                )
        if unused := self.make_schedulers.keys() - self.make_optimizers.keys():
            name = min(unused)
            raise UserError(f"task.schedulers.{name} has no task.optimizers.{name}; set both")
        made = {}
        self.optimizer_names = tuple(self.make_optimizers)  # for turns()
        for name, make in self.make_optimizers.items():
            own = [pair for pair in self._named() if pair[0].startswith(f"{name}.")]
            key = f"task.optimizers.{name}.groups"
            optimizer = optimizer_over(make, own, key=key, within=self)
            made[name] = self._scheduled(name, optimizer, self.make_schedulers.get(name))
        return made

    def _scheduled(
        self, name: str, optimizer: Optimizer, make: Callable[..., LRScheduler] | None
    ) -> Any:
        if make is None:
            return optimizer
        rates = {group["lr"] for group in optimizer.param_groups}
        key = f"task.schedulers.{name}" if name else "task.scheduler"
        length = partial(self._scheduler_length, name)
        scheduler = scheduler_over(optimizer, make, length, key)
        groups = optimizer.param_groups
        if len(rates) > 1 and len({group.get("initial_lr", group["lr"]) for group in groups}) == 1:
            raise UserError(
                f"{type(scheduler).__name__} gives all groups of {name_of(optimizer)} one "
                f"learning rate; pass it a list of {len(groups)} rates, or leave lr out of groups"
            )
        return optimizer, scheduler

    def parameter_groups(self, groups: Mapping[str, Any]) -> list[dict[str, Any]]:
        """For a `configure_optimizer` of the task's own: what `task.optimizer.groups` does."""
        return grouped(self._named(), groups, key="groups", within=self)

    def _named(self) -> list[tuple[str, Tensor]]:
        """The parameters; one that is in several places has several names."""
        return list(self.named_parameters(remove_duplicate=False))

    def _scheduler_length(self, name: str, missing: str) -> int:
        """How often the scheduler of this optimizer will be stepped, for a key that is missing."""
        key, _, argument = missing.rpartition(".")
        if not self.scheduler_steps:
            limit = "max_steps" if self.schedules_turns else "max_epochs"
            raise UserError(
                f"{key} needs {argument}, and nothing says how long training will be; "
                f"set trainer.{limit} or {missing}"
            )
        if not (name and self.schedules_turns):
            return self.scheduler_steps
        if not (turns := self.count_turns(name)):
            raise UserError(
                f"{key} has nothing to schedule: {type(self).__name__}.turns() names {name} in "
                f"none of the {self.total_steps} steps; leave {key} out, or train longer"
            )
        return turns

    def count_turns(self, name: str) -> int:
        """How many turns the optimizer of this name will have in the whole run: `turns` is asked
        for each of its steps. For schedulers that a `configure_optimizer` of the task's own makes.
        """
        if not self.has_own("turns"):
            return self.total_steps
        before = self.run_context
        ahead = Ahead(type(self).__name__, self.steps_per_epoch)
        self.run_context = TaskContext(ahead, before.strategy)
        count = 0
        try:
            for ahead.global_step in range(self.total_steps):
                count += list(self.turns()).count(name)
        finally:
            self.run_context = before
        return count


class Ahead:
    """The steps of a run that is still to begin."""

    global_step = 0

    def __init__(self, task: str, steps_per_epoch: int) -> None:
        self.task = task
        self.steps_per_epoch = steps_per_epoch

    @property
    def epoch(self) -> int:
        if not self.steps_per_epoch:
            raise UserError(
                f"{self.task}.turns() reads self.epoch, and a stream's epoch has no known length, "
                "so its turns can't be counted; set total_steps of each of task.schedulers"
            )
        return self.global_step // self.steps_per_epoch


Task.own_class = Task
for _name in INSTEAD:
    setattr(Task, _name, Instead(_name))
