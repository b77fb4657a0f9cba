"""A Task is what a recipe trains: model, loss and optimizer in one nn.Module."""

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from dpframe.errors import UserError
from dpframe.metrics import described, is_number
from dpframe.parameters import grouped, optimizer_over

Output = dict[str, Any]
"""A step returns {"loss": scalar, **metrics}, and "weight" where the mean is not over rows."""
Measured = tuple[int, Output]
"""The rows of a share, and what the step measured on them."""
READ_AT_ONCE = {"cpu"}  # devices whose numbers can be read without waiting for the device
Autocast = Callable[[], AbstractContextManager]


class Task(nn.Module):
    """Override `training_step`; the rest has a default. Steps return what they measured."""

    steps_per_epoch = 0  # all three set by the Trainer before configure_optimizer
    total_steps = 0
    scheduler_steps = 0  # how often its scheduler will be stepped

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"{type(self).__name__} was given an optimizer; pass what makes one, e.g. "
                "functools.partial(torch.optim.SGD, lr=0.1): it is made once the weights are placed"
            )
        if net is not None:
            self.net = net
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler

    def training_step(self, batch: Any) -> Output:
        raise UserError(
            f"{type(self).__name__} has no training_step; a Task that is fitted needs one"
        )

    def validation_step(self, batch: Any) -> Output:
        return self.training_step(batch)

    def test_step(self, batch: Any) -> Output:
        return self.validation_step(batch)

    def predict_step(self, batch: Any) -> Any:
        """A tensor whose first dimension is the rows, a list of an entry a row, or tuples and dicts
        of these."""
        raise UserError(f"{type(self).__name__} has no predict_step; mode=predict needs one")

    @classmethod
    def has_own(cls, step: str) -> bool:
        """Whether this kind of task has written the step itself."""
        return getattr(cls, step) is not getattr(Task, step)

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Turns the exact means of a pass into what is reported, e.g. the root of a mean."""
        return means

    def configure_optimizer(self) -> Any:
        """The optimizer, or (optimizer, scheduler)."""
        name = type(self).__name__
        if hasattr(self, "configure_optimizers"):
            raise UserError(
                f"{name}.configure_optimizers is never called; rename it to configure_optimizer, "
                f"and {RETURNS_OPTIMIZER}"
            )
        if self.make_optimizer is None:
            raise UserError(
                f"{name} has no optimizer; set task.optimizer or write configure_optimizer"
            )
        optimizer = optimizer_over(self.make_optimizer, self._named())
        if self.make_scheduler is None:
            return optimizer
        return optimizer, self.make_scheduler(optimizer, **self._known_lengths(self.make_scheduler))

    def parameter_groups(self, groups: Mapping[str, Any]) -> list[dict[str, Any]]:
        """For a `configure_optimizer` of the task's own: what `task.optimizer.groups` does."""
        return grouped(self._named(), groups, key="groups")

    def _named(self) -> list[tuple[str, Tensor]]:
        """The parameters; one that is in several places has several names."""
        return list(self.named_parameters(remove_duplicate=False))

    def _known_lengths(self, make_scheduler: Callable[..., Any]) -> dict[str, int]:
        """`total_steps` for a scheduler that takes it and has none yet, e.g. OneCycleLR."""
        keywords = getattr(make_scheduler, "keywords", {})
        wanted = inspect.signature(make_scheduler).parameters
        if "total_steps" not in wanted or {"total_steps", "epochs"} & set(keywords):
            return {}
        if not self.scheduler_steps:
            raise UserError(
                "task.scheduler needs total_steps, and nothing says how long training will be; "
                "set trainer.max_steps or task.scheduler.total_steps"
            )
        return {"total_steps": self.scheduler_steps}


def has_sparse(module: nn.Module) -> bool:
    """Whether the module makes sparse gradients: its embeddings say so."""
    return any(getattr(part, "sparse", False) for part in module.modules())


class Nothing(torch.autograd.Function):
    """A loss of 0 without a gradient: 0 times the gradient of a NaN would be NaN.

    The whole backward still runs, so that no other rank waits for a collective in it.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        return None


class TrainStep(nn.Module):
    """What a strategy wraps: one forward of the task, its loss scaled to its part of the step."""

    def __init__(self, task: Task, autocast: Autocast | None = None) -> None:
        super().__init__()
        self.task = task
        self.autocast = autocast
        self.has_sparse = has_sparse(task)

    def forward(self, share: tuple[Any, int], of: float) -> tuple[Tensor, list[Measured]]:
        """A share has `rows` of the step's rows; `of` is all rows over the replicas averaged over.

        A replica whose share is empty is lent one row and has rows=0: it takes part in every
        collective and adds exactly nothing. So does a share of weight 0, even if its mean is NaN.
        """
        batch, rows = share
        if self.autocast is None:
            output = self.task.training_step(batch)
        else:
            with self.autocast():
                output = self.task.training_step(batch)
        loss = loss_of(output, self.task)
        is_weighted = "weight" in output
        weight = _exact_weight(output["weight"], self.task) if is_weighted else rows
        if (is_weighted or not rows) and is_nothing(rows, output):
            loss = Nothing.apply(loss)
            if self.has_sparse:
                loss = loss + self._no_rows()
        elif is_weighted or rows != of:
            loss = loss * (weight / of if rows else 0.0)
        return loss, [(rows, detached(output))]

    def _no_rows(self) -> Any:
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


class EvalStep(nn.Module):
    """One forward of `validation_step`, `test_step` or `predict_step`."""

    def __init__(self, task: Task, step: str, autocast: Autocast | None = None) -> None:
        super().__init__()
        self.task = task
        self.step = step
        self.autocast = autocast

    def forward(self, share: tuple[Any, int]) -> list[tuple[int, Any]]:
        batch, rows = share
        step = getattr(self.task, self.step)
        if self.autocast is None:
            output = step(batch)
        else:
            with self.autocast():
                output = step(batch)
        if self.step != "predict_step":  # whose output is checked where it is joined
            _check_evaluated(output, self.task, self.step)
        return [(rows, output)]

    @staticmethod
    def combine(results: list[list[tuple[int, Any]]]) -> list[tuple[int, Any]]:
        return [measured for part in results for measured in part]


def optimizer_of(task: Task) -> tuple[torch.optim.Optimizer, Any]:
    """Its optimizer, and its scheduler or None."""
    returned = task.configure_optimizer()
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    optimizer, scheduler = returned if is_pair else (returned, None)
    is_other = isinstance(scheduler, torch.optim.Optimizer | type)
    is_scheduler = scheduler is None or all(
        callable(getattr(scheduler, method, None))
        for method in ("step", "state_dict", "load_state_dict")
    )
    if not isinstance(optimizer, torch.optim.Optimizer) or is_other or not is_scheduler:
        method = f"{type(task).__name__}.configure_optimizer"
        raise UserError(f"{method} returned {_kind(returned)}; {RETURNS_OPTIMIZER}")
    required = [
        parameter.name
        # Of the class: a scheduler has wrapped the optimizer's own, which then shows its self.
        for parameter in list(inspect.signature(type(optimizer).step).parameters.values())[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        raise UserError(
            f"{type(optimizer).__name__}.step needs a {required[0]}, and dpframe calls it without; "
            "use an optimizer whose step() needs nothing, e.g. torch.optim.Adam"
        )
    return optimizer, scheduler


RETURNS_OPTIMIZER = "return one optimizer, or (optimizer, scheduler)"


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kinds = [type(part).__name__ for part in value] if isinstance(value, list | tuple) else []
    if isinstance(value, tuple):
        return f"({', '.join(kinds)})"
    return f"[{', '.join(kinds)}]" if isinstance(value, list) else f"a {type(value).__name__}"


def refuse_stateful_metrics(task: Task, replicas: int, where: str) -> None:
    """A metric that adds up by itself knows neither lent rows nor the other replicas."""
    for name, module in task.named_modules() if replicas > 1 else ():
        if any(kind.__module__.split(".")[0] == "torchmetrics" for kind in type(module).__mro__):
            raise UserError(
                f"{type(task).__name__}.{name} is a {type(module).__name__} of torchmetrics, which "
                f"would count rows that are lent to the {replicas} replicas of {where}; return "
                "numbers from the step, their means are exact, or use trainer.gpus=1"
            )


def loss_of(output: Any, task: Task) -> Tensor:
    """The loss in a training step's output."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad:
        return loss
    raise UserError(f"{type(task).__name__}.training_step returned {_describe(output)}")


def _check_evaluated(output: Any, task: Task, step: str) -> None:
    """Refuses what a validation or test step must not return."""
    name = f"{type(task).__name__}.{step}"
    if not isinstance(output, dict) or not output:
        what = "an empty dict" if output == {} else type(output).__name__
        raise UserError(f"{name} returned {what}; return a dict of what was measured")
    for key, value in output.items():
        if not is_number(value):
            raise UserError(f"{name} returned {key!r} {described(value)}")


def is_nothing(rows: int, output: Output) -> bool:
    """Whether a loss is NaN and counts nothing: a lent row's, or a mean over weights of 0.

    False where that is known on the GPU alone, and in torch.compile.
    """
    if torch.compiler.is_compiling() or output["loss"].device.type not in READ_AT_ONCE:
        return False
    is_counted = rows and output.get("weight", True)
    return not is_counted and not math.isfinite(output["loss"].item())


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
    return weight.double().reshape(())


def detached(output: Output) -> Output:
    return {
        name: value.detach() if isinstance(value, Tensor) and value.requires_grad else value
        for name, value in output.items()
    }


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
    return "a loss without a gradient; compute it from the output, without .detach() or .item()"
