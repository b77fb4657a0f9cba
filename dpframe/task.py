"""A Task is what a recipe trains: model, loss and optimizer in one nn.Module."""

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpframe.accelerator import has_float64
from dpframe.data import Share, split
from dpframe.errors import UserError, miscalled, suggestion
from dpframe.lightning_names import INSTEAD, Instead, refusal
from dpframe.metrics import described, is_number
from dpframe.parameters import grouped, has_sparse, optimizer_over

Output = dict[str, Any]
"""A step returns {"loss": scalar, **metrics}, and "weight" where the mean is not over rows."""
Measured = tuple[int, Output]
"""The rows of a share, and what the step measured on them."""
READ_AT_ONCE = {"cpu"}  # devices whose numbers can be read without waiting for the device
Autocast = Callable[[], AbstractContextManager]


class Job(Protocol):
    """What a Task can ask while it is trained: a Trainer's Progress, and its Strategy."""

    @property
    def global_step(self) -> int: ...

    @property
    def epoch(self) -> int: ...


class Placed(Protocol):
    device: torch.device
    rank: int
    replicas: int
    world_size: int

    def gather_rows(self, x: Tensor, total: int) -> Tensor: ...

    def whole(self, value: Any, *, for_all: bool = False) -> Any: ...


class Attached:
    """Where a task is trained. It belongs to the Trainer: a copy of the task shares it."""

    def __init__(
        self,
        progress: Job | None = None,
        strategy: Placed | None = None,
        *,
        is_compiled: bool = False,
    ) -> None:
        self.progress = progress
        self.strategy = strategy
        self.is_compiled = is_compiled
        self.batch_index = 0  # of the batch at hand, in its epoch or its pass
        self.batches: int | None = None  # of an evaluation's pass; None where nobody knows
        self.end_share: Callable[[list[int]], None] = lambda share: None  # after its step

    def __deepcopy__(self, memo: dict) -> "Attached":
        return self

    def __reduce__(self) -> tuple:  # in a file or another process there is no such Trainer
        return Attached, ()


class Here(threading.local):
    """The share that this thread's step computes: replicas may have a thread each."""

    def __init__(self) -> None:
        self.rows = 0  # outside of a step
        self.total = 0


HERE = Here()


class Readable:
    """A property that a task of its own may set to something else, e.g. `self.rank = 8`."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read
        self.__doc__ = read.__doc__

    def __get__(self, task: Any, kind: type) -> Any:
        return self if task is None else self.read(task)


class Task(nn.Module):
    """Override `training_step`; the rest has a default. Steps return what they measured.

    A task may also have methods with the names of a callback's hooks, e.g. `on_epoch_start(self,
    trainer)`: they are called before the callbacks'.
    """

    steps_per_epoch = 0  # the Trainer sets these three before configure_optimizer
    total_steps = 0
    scheduler_steps = 0  # how often its scheduler will be stepped
    optimizes_by_hand = False  # whether its training_step steps the optimizers itself
    needs_trainer = False  # even for a single step
    own_class: type | None = None  # where the user's code is, if not in the task's class
    scale_lr: Mapping[str, Any] | None = None  # task.scale_lr: batch_size, factor, warmup_steps
    prefers_metrics = False  # a metric's result replaces a mean of the same name
    kept_metrics: Set[str] = frozenset()  # metrics that it resets itself, e.g. a best of all epochs
    schedules_turns = False  # schedulers step after each turn of their optimizer, not each epoch
    optimizer_names: Sequence[str] = ()  # set after configure_optimizer, if there are several
    attached = Attached()  # the Trainer's

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: Callable[..., Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        *,
        optimizers: Mapping[str, Callable[..., Optimizer]] | None = None,
        schedulers: Mapping[str, Callable[..., LRScheduler]] | None = None,
    ) -> None:
        """`optimizers`, and `schedulers` for some of them, are named as the submodules are whose
        weights they update."""
        super().__init__()
        if any(isinstance(made, Optimizer) for made in (optimizer, *(optimizers or {}).values())):
            raise UserError(
                f"{type(self).__name__} was given an optimizer; pass what makes one, e.g. "
                "functools.partial(torch.optim.SGD, lr=0.1): it is made once the weights are placed"
            )
        if net is not None:
            self.net = net
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.make_optimizers = dict(optimizers or {})
        self.make_schedulers = dict(schedulers or {})

    @Readable
    def global_step(self) -> int:
        """How many steps are done."""
        return self.attached.progress.global_step if self.attached.progress else 0

    @Readable
    def epoch(self) -> int:
        """How many whole epochs are done."""
        return self.attached.progress.epoch if self.attached.progress else 0

    @Readable
    def device(self) -> torch.device:
        """Where the weights are. Under data_parallel with several GPUs, in a step: the batch's."""
        weight = next(self.parameters(), None)
        if weight is not None:
            return weight.device
        return self.attached.strategy.device if self.attached.strategy else torch.device("cpu")

    @Readable
    def rank(self) -> int:
        """The number of this process."""
        return self.attached.strategy.rank if self.attached.strategy else 0

    def all_gather(self, x: Tensor) -> Tensor:
        """The whole batch's rows, in order, from those of this step's share. Gradients flow back to
        the replicas that they came from.

        The first dimension of `x` is the share's rows, or a multiple of them. Every replica has to
        call it as often. Under accumulation the batch is one of `data.batch_size` rows."""
        name = type(self).__name__
        if not isinstance(x, Tensor):
            raise UserError(
                f"{name}.all_gather got a {type(x).__name__}; pass a tensor, and call it for each"
            )
        strategy = self.attached.strategy
        if strategy is None:
            return x
        if self.attached.is_compiled and strategy.replicas > strategy.world_size:
            raise UserError(
                f"{name}.all_gather can't be compiled for several replicas in one process; use "
                "strategy=ddp or trainer.compile.mode=null"
            )
        rows = HERE.rows
        if rows and (not x.ndim or not len(x) or len(x) % rows):
            raise UserError(
                f"{name}.all_gather got a tensor of shape {tuple(x.shape)} for a share of {rows} "
                "rows; make these rows, or a multiple of them, its first dimension"
            )
        return strategy.gather_rows(x, HERE.total if rows else 0)

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

    def set_up(self, trainer: Any) -> None:
        """Before its weights are placed, e.g. to make layers that depend on `trainer.data`."""

    def begin_pass(self, kind: str) -> None:
        """Before the batches of a validation, a test or a prediction: `val`, `test`, `predict`."""

    def end_pass(self, kind: str, numbers: dict[str, float]) -> dict[str, float]:
        """More numbers of a pass, or of an epoch of training, beside those that were measured.

        Every process calls it, with metrics that have the states of all rows, and has to return
        the same."""
        return {}

    def metric_name(self, kind: str, name: str) -> str:
        """Under which name the result of a metric that it holds is logged."""
        return name

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
        optimizer = optimizer_over(self.make_optimizer, self._named())
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
            optimizer = optimizer_over(make, own, key=f"task.optimizers.{name}.groups")
            made[name] = self._scheduled(name, optimizer, self.make_schedulers.get(name))
        return made

    def _scheduled(
        self, name: str, optimizer: Optimizer, make: Callable[..., LRScheduler] | None
    ) -> Any:
        if make is None:
            return optimizer
        rates = {group["lr"] for group in optimizer.param_groups}
        scheduler = make(optimizer, **self._known_lengths(name, make))
        groups = optimizer.param_groups
        if len(rates) > 1 and len({group.get("initial_lr", group["lr"]) for group in groups}) == 1:
            raise UserError(
                f"{type(scheduler).__name__} gives all groups of {type(optimizer).__name__} one "
                f"learning rate; pass it a list of {len(groups)} rates, or leave lr out of groups"
            )
        return optimizer, scheduler

    def parameter_groups(self, groups: Mapping[str, Any]) -> list[dict[str, Any]]:
        """For a `configure_optimizer` of the task's own: what `task.optimizer.groups` does."""
        return grouped(self._named(), groups, key="groups")

    def _named(self) -> list[tuple[str, Tensor]]:
        """The parameters; one that is in several places has several names."""
        return list(self.named_parameters(remove_duplicate=False))

    def _known_lengths(self, name: str, make_scheduler: Callable[..., Any]) -> dict[str, int]:
        """`total_steps` for a scheduler that takes it and has none yet, e.g. OneCycleLR."""
        keywords = getattr(make_scheduler, "keywords", {})
        wanted = inspect.signature(make_scheduler).parameters
        if "total_steps" not in wanted or {"total_steps", "epochs"} & set(keywords):
            return {}
        key = f"task.schedulers.{name}" if name else "task.scheduler"
        if not self.scheduler_steps:
            raise UserError(
                f"{key} needs total_steps, and nothing says how long training will be; "
                f"set trainer.max_steps or {key}.total_steps"
            )
        if not (name and self.schedules_turns):
            return {"total_steps": self.scheduler_steps}
        if not (turns := self.count_turns(name)):
            raise UserError(
                f"{key} has nothing to schedule: {type(self).__name__}.turns() names {name} in "
                f"none of the {self.total_steps} steps; leave {key} out, or train longer"
            )
        return {"total_steps": turns}

    def count_turns(self, name: str) -> int:
        """How many turns the optimizer of this name will have in the whole run: `turns` is asked
        for each of its steps. For schedulers that a `configure_optimizer` of the task's own makes.
        """
        if not self.has_own("turns"):
            return self.total_steps
        before = self.attached
        ahead = Ahead(type(self).__name__, self.steps_per_epoch)
        self.attached = Attached(ahead, before.strategy)
        count = 0
        try:
            for ahead.global_step in range(self.total_steps):
                count += list(self.turns()).count(name)
        finally:
            self.attached = before
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
                f"{self.task}.turns() reads self.epoch, and nobody knows how long a stream's epoch "
                "is, so its turns can't be counted; set total_steps of each of task.schedulers"
            )
        return self.global_step // self.steps_per_epoch


for _name in INSTEAD:
    setattr(Task, _name, Instead(_name))


class Nothing(torch.autograd.Function):
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


class TrainStep(nn.Module):
    """What a strategy wraps: one forward of the task, its loss scaled to its part of the step."""

    def __init__(
        self,
        task: Task,
        autocast: Autocast | None = None,
        turn: str = "",
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        """`compiled` runs the task's training_step. What scales its loss stays outside: in 64 bits
        and on the CPU, it would keep CUDA graphs from being recorded."""
        super().__init__()
        self.task = task
        self.autocast = autocast
        self.turn = (turn,) if turn else ()
        self.compiled = compiled
        self.has_sparse = has_sparse(task)

    def forward(self, share: Share, of: float) -> tuple[Tensor, list[Measured]]:
        """A share has `rows` of the step's rows; `of` is all rows over the replicas averaged over.

        A replica without a row takes part in every collective of the backward and adds exactly
        nothing. So does a share of weight 0, even if its mean is NaN.
        """
        batch, rows, HERE.total = share
        if not rows:
            # The last weights first, as their gradients come in a backward.
            trained = list(filter(_is_trained, self.task.parameters()))[::-1]
            return self._nothing(*trained or _refuse_frozen(self.task)), []
        HERE.rows = rows
        step = self.task.training_step
        if self.compiled is not None:
            step = partial(self.compiled, self.task)
        if self.autocast is None:
            output = step(batch, *self.turn)
        else:
            with self.autocast():
                output = step(batch, *self.turn)
        HERE.rows = 0
        loss = loss_of(output, self.task)
        is_weighted = "weight" in output
        weight = _exact_weight(output["weight"], self.task) if is_weighted else rows
        if is_weighted and is_nothing(output):
            loss = self._nothing(loss)
        elif is_weighted or rows != of:
            loss = loss * (weight / of)
        return loss, [(rows, detached(output))]

    def _nothing(self, *tensors: Tensor) -> Tensor:
        loss = Nothing.apply(*tensors)
        return loss + self._sparse_nothing() if self.has_sparse else loss

    def _sparse_nothing(self) -> Any:
        """Sparse gradients without an entry: DDP's all-reduce can't do with a missing one."""
        return sum(
            nn.functional.embedding(
                torch.empty(0, dtype=torch.int64, device=part.weight.device),
                part.weight,
                sparse=True,
            ).sum()
            for part in self.task.modules()
            if getattr(part, "sparse", False) and isinstance(part.weight, Tensor)
        )

    @staticmethod
    def combine(results: list[tuple[Tensor, list[Measured]]]) -> tuple[Tensor, list[Measured]]:
        """Several replicas' results as one: the losses are shares of one mean, so they add up."""
        loss = results[0][0]
        for other, _ in results[1:]:
            loss = loss + other.to(loss.device)
        return loss, [measured for _, part in results for measured in part]


class StepByHand(TrainStep):
    """A training step in which the task steps its optimizers itself: there is no loss to return."""

    def forward(self, share: Share, of: float) -> tuple[Any, list[Measured]]:
        batch, rows, HERE.total = share
        placed, kind = self.task.attached.strategy, self.task.own_class or type(self.task)
        if placed is not None and not len(split(range(share.total), placed.replicas)[-1]):
            raise UserError(
                f"{kind.__name__} steps its optimizers itself, in which each of "
                f"{placed.replicas} replicas takes part, and a batch of {share.total} rows leaves "
                "one without a row; set data.drop_last=true, or use fewer replicas"
            )
        HERE.rows = rows
        with nullcontext() if self.autocast is None else self.autocast():
            output = self.task.training_step(batch)
        HERE.rows = 0
        return None, [(rows, detached(output))]

    @staticmethod
    def combine(results: list[tuple[Any, list[Measured]]]) -> tuple[Any, list[Measured]]:
        return results[0]  # of the only replica of this process


class EvalStep(nn.Module):
    """One forward of `validation_step`, `test_step` or `predict_step`.

    A step with a parameter `name` gets the name of the data set; "" where there is one alone.
    """

    def __init__(
        self, task: Task, step: str, autocast: Autocast | None = None, name: str = ""
    ) -> None:
        super().__init__()
        self.task = task
        if step == "test_step" and not task.has_own(step):
            step = "validation_step"
        self.step = step
        self.autocast = autocast
        signature = inspect.signature(getattr(task, step))
        self.named = {"name": name} if "name" in signature.parameters else {}
        try:
            signature.bind("batch", **self.named)
        except TypeError:
            raise miscalled(task, step, ("batch", *self.named)) from None

    def forward(self, share: Share) -> list[tuple[int, Any]]:
        batch, rows, HERE.total = share
        if not rows:
            return []
        HERE.rows = rows
        step = getattr(self.task, self.step)
        if self.autocast is None:
            output = step(batch, **self.named)
        else:
            with self.autocast():
                output = step(batch, **self.named)
        HERE.rows = 0
        if self.step != "predict_step":  # whose output is checked where it is joined
            _check_evaluated(output, self.task, self.step)
        return [(rows, output)]

    @staticmethod
    def combine(results: list[list[tuple[int, Any]]]) -> list[tuple[int, Any]]:
        return [measured for part in results for measured in part]


@contextmanager
def modes_kept(task: Task) -> Iterator[None]:
    """A module that was in evaluation mode before, e.g. a frozen backbone, is so afterwards."""
    modes = [(module, module.training) for module in task.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


class Made(NamedTuple):
    optimizer: Optimizer
    scheduler: Any  # or None
    needs_closure: bool


def optimizers_of(task: Task) -> dict[str, Made]:
    """The task's optimizers by their names; one alone has the name ""."""
    returned = task.configure_optimizer()
    if not isinstance(returned, dict):
        return {"": _made(returned, returned, task)}
    named = {name: _made(part, returned, task) for name, part in returned.items()}
    owners: dict[int, str] = {}
    for name, made in named.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError(
                f"{_method(task)} named an optimizer {name!r}; use a name such as generator"
            )
        for weight in updated_by(made.optimizer):
            if owners.setdefault(id(weight), name) != name:
                raise UserError(
                    f"{_method(task)}: the optimizers {owners[id(weight)]} and {name} have a "
                    "weight in common; give each weight to one of them"
                )
    if not named:
        raise UserError(f"{_method(task)} returned an empty dict; {RETURNS_OPTIMIZER}")
    return named


def updated_by(optimizer: Optimizer) -> list[Any]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _made(part: Any, returned: Any, task: Task) -> Made:
    is_pair = isinstance(part, tuple) and len(part) == 2
    optimizer, scheduler = part if is_pair else (part, None)
    is_other = isinstance(scheduler, Optimizer | type)
    is_scheduler = scheduler is None or all(
        callable(getattr(scheduler, method, None))
        for method in ("step", "state_dict", "load_state_dict")
    )
    if not isinstance(optimizer, Optimizer) or is_other or not is_scheduler:
        raise UserError(f"{_method(task)} returned {_kind(returned)}; {RETURNS_OPTIMIZER}")
    # Of the class: a scheduler has wrapped the optimizer's own step, which then shows its self.
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required not in ([], ["closure"]):
        raise UserError(
            f"{type(optimizer).__name__}.step needs a {required[0]}, and dpframe calls it without; "
            "use an optimizer whose step() needs nothing, e.g. torch.optim.Adam"
        )
    return Made(optimizer, scheduler, bool(required))


def check_signature(task: Task, turns: Sequence[str]) -> None:
    """Refuses a training_step that can't be called as the Trainer calls it."""
    if inspect.getattr_static(task, "automatic_optimization") is False:
        raise refusal(type(task), "automatic_optimization")
    called = ("batch", "turn") if any(turns) else ("batch",)
    try:
        inspect.signature(task.training_step).bind(*called)
    except TypeError:
        why = f", as there are the optimizers {', '.join(turns)}" if any(turns) else ""
        raise miscalled(task, "training_step", called, why) from None


RETURNS_OPTIMIZER = (
    "return one optimizer, (optimizer, scheduler), or a dict with one of these for each name"
)


def _method(task: Task) -> str:
    return f"{type(task).__name__}.configure_optimizer"


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {type(v).__name__}' for name, v in value.items())}}}"
    kinds = [type(part).__name__ for part in value] if isinstance(value, list | tuple) else []
    if isinstance(value, tuple):
        return f"({', '.join(kinds)})"
    return f"[{', '.join(kinds)}]" if isinstance(value, list) else f"a {type(value).__name__}"


def loss_of(output: Any, task: Task) -> Tensor:
    """The loss in a training step's output."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad:
        return loss
    if not any(map(_is_trained, task.parameters())):
        _refuse_frozen(task)
    raise UserError(f"{type(task).__name__}.training_step returned {_describe(output)}")


def _check_evaluated(output: Any, task: Task, step: str) -> None:
    """Refuses what a validation or test step must not return."""
    if step == "validation_step" and not task.has_own(step):
        step = "training_step"
    name = f"{type(task).__name__}.{step}"
    if not isinstance(output, dict) or not output:
        what = "an empty dict" if output == {} else type(output).__name__
        raise UserError(
            f'{name} returned {what}; return a dict of what was measured, e.g. {{"loss": loss}}'
        )
    for key, value in output.items():
        if not is_number(value):
            raise UserError(f"{name} returned {key!r} {described(value)}")


def is_nothing(output: Output) -> bool:
    """Whether a loss is NaN and counts nothing: a mean over weights of 0.

    False where that is known on the GPU alone.
    """
    if output["loss"].device.type not in READ_AT_ONCE:
        return False
    return not output.get("weight", True) and not math.isfinite(output["loss"].item())


def _refuse_frozen(task: Task) -> NoReturn:
    raise UserError(
        f"all weights of {type(task).__name__} are frozen; leave some with requires_grad=True in "
        "each step"
    )


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad


def _exact_weight(weight: Any, task: Task) -> Tensor | float:
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
    return {
        name: value.detach() if isinstance(value, Tensor) and value.requires_grad else value
        for name, value in output.items()
    }


def prefixed(measured: list[Measured], turn: str) -> list[Measured]:
    """What a turn measured, as `<turn>/loss` and so on; a weight stays one."""
    return [
        (rows, {name if name == "weight" else f"{turn}/{name}": v for name, v in output.items()})
        for rows, output in measured
    ]


def cloned(measured: list[Measured]) -> list[Measured]:
    """For steps that are CUDA graphs: each replay writes into the same memory."""
    return [
        (rows, {k: v.clone() if isinstance(v, Tensor) else v for k, v in output.items()})
        for rows, output in measured
    ]


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
