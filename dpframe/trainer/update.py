"""An optimizer update: scaling, clipping, the fused step, and the learning rate's schedule."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpframe import lean
from dpframe.accelerator import has_float64
from dpframe.data import move
from dpframe.errors import UserError, refuse_unmeasured, suggestion
from dpframe.floats import making
from dpframe.metrics import SOMETIMES_WEIGHTED
from dpframe.parameters import has_sparse, updated_by
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.optimizer_state import (
    Mismatch,
    computed_as,
    group_order,
    in_order,
    keeps_own_type,
    named_state,
)
from dpframe.trainer.optimizers import Made, check_signature, optimizers_of
from dpframe.trainer.outputs import Measured
from dpframe.trainer.placement import DTYPES, align
from dpframe.trainer.rates import ScaledRates
from dpframe.trainer.settings import TrainerSettings

STATES = ("optimizer", "scheduler", "scaler")
FUSED = {  # the optimizers that have fused kernels, by device; None: all that take the argument
    "cpu": None,
    "cuda": None,
    "mps": ("SGD", "Adam", "AdamW"),
    "xpu": ("SGD", "Adam", "AdamW"),
}
NEEDS_WHOLE = ("Adafactor", "Muon", "Rprop")  # torch has no step of these on parts of weights
FUSED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Update:
    """One optimizer of a task and all that its step needs; `name` is "" where there is no other.

    `module` is the task's training step as the strategy has wrapped it, for this optimizer.
    """

    module: nn.Module
    forward: Callable[..., tuple[Tensor, list[Measured]]]

    def __init__(
        self,
        name: str,
        made: Made,
        task: Task,
        strategy: Strategy,
        settings: TrainerSettings,
        scaler: torch.amp.GradScaler | None,
        scaled_rates: ScaledRates | None = None,
    ) -> None:
        self.name = name
        self.strategy = strategy
        self.settings = settings
        self.dtype = DTYPES.get(settings.precision)
        self.scaler = scaler
        self.scaled_rates = scaled_rates
        self.optimizer, self.scheduler, self.needs_closure = made
        self.parameters = list(task.parameters())  # with frozen ones, which may thaw later
        updated = {id(weight) for weight in updated_by(self.optimizer)}
        self._others = [weight for weight in self.parameters if id(weight) not in updated]
        self._named = list(task.named_parameters(remove_duplicate=False))
        # Whoever saves or loads its state, e.g. a strategy that has one of each process.
        with suppress(
            AttributeError
        ):  # a class of one's own that has not called Optimizer.__init__
            self.optimizer.register_state_dict_post_hook(partial(named_state, self._named))
            self.optimizer.register_load_state_dict_pre_hook(self._adapted)
        sharding = strategy.sharding
        kinds = None if sharding is None else sharding.fused_optimizers
        fuse(self.optimizer, task, kinds=kinds)
        is_fused = all(group.get("fused") for group in self.optimizer.param_groups)
        self._awaits_momenta = is_fused and isinstance(self.optimizer, torch.optim.SGD)
        self.is_plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        self.schedules_steps = (
            self.scheduler is not None
            and not self.is_plateau
            and settings.scheduler_every == "step"
        )
        self.clip_norm, self.clip_value = of_turn(name, settings.clip_norm, settings.clip_value)
        kind = type(self.optimizer).__name__
        if strategy.sharding is not None and (self.needs_closure or kind in NEEDS_WHOLE):
            raise UserError(
                f"{kind} needs whole weights in each process, and {strategy.name} cuts them; use "
                "strategy=ddp, or another optimizer"
            )
        if self.needs_closure:
            self._refuse_with_closure()
        if scaler is not None and strategy.sharding is not None:
            raise UserError(
                f"trainer.precision={settings.precision} can't be had with {strategy.name}, whose "
                "ranks would scale their losses by themselves; use trainer.precision=bf16"
            )
        self._step = lean.step_of(self.optimizer) if settings.lean else self.optimizer.step
        self.backward: Callable[[Tensor], Any] = Tensor.backward
        if scaler is not None:
            self.backward = lambda loss: scaler.scale(loss).backward()
        self.grad_norm: Tensor | float = float("nan")
        self.timed: Callable[[Any], Any] = lambda module: module  # unless there is a profile
        self.is_weighted: bool | None = None  # whether steps return a weight, after the first one

    def learning_rates(self) -> dict[str, float]:
        """The learning rates by the names of their groups; the first group's also by ""."""
        groups = self.optimizer.param_groups
        factor = 1.0 if self.scaled_rates is None else self.scaled_rates.now()
        rates = {str(group["name"]): group["lr"] for group in groups if "name" in group}
        return {n: float(rate) * factor for n, rate in {"": groups[0]["lr"], **rates}.items()}

    def run(self, module: nn.Module) -> None:
        """`module` computes the loss of this optimizer from now on."""
        self.module, self.forward = module, self.timed(module)
        if self.dtype is not None:
            self.forward = making(self.dtype, self.forward)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, only the weights of this optimizer get gradients."""
        frozen = [weight for weight in self._others if weight.requires_grad]
        for weight in frozen:
            weight.requires_grad_(False)
        try:
            yield
        finally:
            for weight in frozen:
                weight.requires_grad_(True)

    def has_trained(self) -> bool:
        """Whether not all of its weights are frozen."""
        return any(weight.requires_grad for weight in updated_by(self.optimizer))

    def _refuse_with_closure(self) -> None:
        """Each call of the closure makes new gradients, neither clipped nor scaled."""
        kind, settings = type(self.optimizer).__name__, self.settings
        for key, value, use in (
            ("clip_norm", self.clip_norm, "null"),
            ("clip_value", self.clip_value, "null"),
            ("precision", self.scaler and settings.precision, "bf16 or 32"),
        ):
            if value is not None:
                raise UserError(
                    f"trainer.{key}={value} can't be had with {kind}, which computes the gradients "
                    f"of a step several times; use trainer.{key}={use}, or another optimizer"
                )

    def weights_of(self, measured: list[Measured]) -> list[Any]:
        """Each share's weight; none where steps return no weight.

        The processes agree once, after the first batch; a later batch that differs is refused in
        the process that has it."""
        if self.is_weighted is None:
            here = {"weight" in output for _, output in measured}
            several = self.strategy.collectives.sum_numbers(
                [float(True in here), float(False in here)]
            )
            if 0.0 not in several:
                raise UserError(SOMETIMES_WEIGHTED)
            self.is_weighted = several[0] > 0
        for _, output in measured:
            if ("weight" in output) is not self.is_weighted:
                raise UserError(SOMETIMES_WEIGHTED)
        return [output["weight"] for _, output in measured] if self.is_weighted else []

    def complete(self, rows: int, weights: list[Any]) -> None:
        """Turns the sum of the backwards into the gradient of the mean over rows or weights."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.is_weighted:
            self._reweigh(rows, weights)

    def step(self, closure: Callable[[], Tensor] | None = None, *, wants_norm: bool) -> None:
        """`closure` computes the gradients again, for an optimizer that needs that."""
        if self.clip_norm is not None:
            self.grad_norm = self._total_norm()
            clip_grads_with_norm_(self._parts(), self.clip_norm, self.grad_norm)
        elif wants_norm:
            self.grad_norm = self._total_norm()
        if self.clip_value is not None:
            clip_grad_value_(self._parts(), self.clip_value)
        if self._awaits_momenta:
            self._awaits_momenta = _unfuse_late(self.optimizer)
        unscaled = None if self.scaled_rates is None else self.scaled_rates.apply(self.optimizer)
        if closure is not None:
            self.optimizer.step(closure)  # type: ignore[arg-type]  # torch's returns tensors too
        elif self.scaler is None:
            self._step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scaled_rates is not None and unscaled is not None:
            self.scaled_rates.undo(self.optimizer, unscaled)
        self.clear()
        if self.schedules_steps:
            self.scheduler.step()

    def clear(self) -> None:
        """As zero_grad without its profiling; also for the weights of other optimizers."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for parameter in self._others:
            parameter.grad = None

    def skip(self) -> None:
        """In place of `step`, after a loss that is not finite."""
        self.clear()
        if self.schedules_steps:
            self.scheduler.step()

    def end_epoch(self, metrics: dict[str, float], *, is_stale: bool) -> None:
        """`is_stale`: the val/ numbers are an earlier epoch's, or of the end of training."""
        if self.scheduler is None or self.schedules_steps:
            return
        if not self.is_plateau:
            self.scheduler.step()
            return
        name = self.settings.plateau_monitor
        if is_stale and name.startswith("val/"):
            return
        refuse_unmeasured("trainer.plateau_monitor", name, metrics)
        self.scheduler.step(metrics[name])

    def _reweigh(self, rows: int, weights: list[Any]) -> None:
        """Turns a mean over rows into one over weights, whose sum is known after the forwards."""
        device = self.strategy.device
        if not has_float64(device):  # the host sums them
            device, weights = torch.device("cpu"), [float(weight) for weight in weights]
        if self.strategy.logical_shares:  # the host sums them without rounding
            column = [float(weight) for weight in weights]
            weights = self.strategy.collectives.sum_columns([column], is_exact=True)
        here = torch.zeros((), dtype=torch.float64, device=device)
        for weight in weights:  # numbers, and tensors on any replica's device
            here = here + move(weight, here.device)
        total = here if self.strategy.logical_shares else self.strategy.collectives.sum(here.sum())
        factor = torch.where(total == 0, 0.0, rows / total)  # a weight of 0 gives no gradient
        for weight in self._parts():
            weight.grad.mul_(factor.to(weight.grad))
        self.fill_gradients()

    def fill_gradients(self) -> None:
        """Sets all gradients to 0 where there are none: of shares without rows, or whose weights
        are 0. The step still updates e.g. a momentum."""
        if all(_is_missing(parameter.grad) for parameter in self.parameters):
            for parameter in self.parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def _updated(self) -> list[Any]:
        """What the optimizer updates and has a gradient: no other gradient is part of a norm.

        The values of a sparse gradient stand in for it, since torch takes no norm of it: they
        share its memory, and what it leaves out is zero.
        """
        weights: list[Any] = []
        for weight in updated_by(self.optimizer):
            if weight.grad is not None and weight.grad.is_sparse:
                weight.grad = weight.grad.coalesce()
                values = weight.grad.values()
                weight = values.detach()
                weight.grad = values
            if weight.grad is not None:
                weights.append(weight)
        return weights

    def _total_norm(self) -> Tensor:
        gradients, sharding = [weight.grad for weight in self._updated()], self.strategy.sharding
        return get_total_norm(gradients) if sharding is None else sharding.total_norm(gradients)

    def _parts(self) -> list[Any]:
        """This process's parts of what `_updated` returns; they share its memory."""
        if (sharding := self.strategy.sharding) is None:
            return self._updated()
        parts = []
        for weight in self._updated():
            part = sharding.local(weight.detach())
            part.grad = sharding.local(weight.grad)
            parts.append(part)
        return parts

    def kinds(self) -> dict[str, str | None]:
        whose = self.name and f"{self.name}'s "
        return {
            f"{whose}optimizer": type(self.optimizer).__name__,
            f"{whose}scheduler": self.scheduler and type(self.scheduler).__name__,
            f"{whose}scheduler's steps": getattr(self.scheduler, "total_steps", None),
        }

    def state_dict(self) -> dict[str, Any]:
        return {  # of the names STATES
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
        }

    def load_state_dict(
        self, state: dict[str, Any], there: dict[str, Any], here: dict[str, Any]
    ) -> None:
        """An optimizer or scheduler of another class than in `there` starts afresh."""
        has_optimizer, has_scheduler, has_length = (
            there.get(name) == kind for name, kind in self.kinds().items()
        )
        options = [
            {**group, "lr": group.get("initial_lr", group["lr"])}
            for group in self.optimizer.param_groups
        ]
        if has_optimizer:
            own = self._own(state["optimizer"])
            if has_scheduler and self.scheduler is not None:
                self._refuse_other_order(own)
            saved = self._adapted(self.optimizer, own)
            self.optimizer.load_state_dict(saved)
            if there.get("trainer.precision") == here["trainer.precision"]:
                self._keep_types(saved)
            align(self.optimizer)
        if self.scheduler is not None and has_scheduler and has_length:
            self.scheduler.load_state_dict(self._own(state["scheduler"]))
        scaler = self._own(state["scaler"]) if has_optimizer else None
        if self.scaler is not None and scaler is not None:
            self.scaler.load_state_dict(scaler)
        mine = f"optimizers.{self.name}" if self.name else "optimizer"
        key = re.compile(rf"{mine}\.(groups\.(?P<group>[^.]+)\.)?(?P<option>\w+)$")
        found = {match[0]: match for match in map(key.search, {*there, *here}) if match}
        changed = {
            (match["group"], match["option"])
            for match in found.values()
            if there.get(match.string) != here.get(match.string)
        }
        for index, group in enumerate(self.optimizer.param_groups):
            has_own_rate = f"{mine}.groups.{group.get('name')}.lr" in found
            whose = group["name"] if has_own_rate else None
            for option in self.optimizer.defaults:
                if option == "lr" and (whose, "lr") in changed:
                    self._set_rate(index, options[index]["lr"])
                elif option != "lr" and any(name == option for _, name in changed):
                    group[option] = options[index][option]

    def _refuse_other_order(self, saved: dict[str, Any]) -> None:
        order = group_order(self._named, self.optimizer, saved)
        if order != sorted(order):
            raise Mismatch(
                f"{type(self.scheduler).__name__} keeps its rates in the order of the optimizer's "
                "groups, which is another one here"
            )

    def _own(self, states: dict[str, Any]) -> Any:
        return states[self.name] if self.name else states

    def _adapted(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Saved state for the weights of here: matched by name, checked, and e.g. a momentum cut
        as its weight is."""
        saved = in_order(self._named, optimizer, saved)
        if (sharding := self.strategy.sharding) is not None:
            weights, states = updated_by(optimizer), dict(saved["state"])
            for number, weight in enumerate(weights):
                states[number] = {
                    name: sharding.shard_like(value, weight) if isinstance(value, Tensor) else value
                    for name, value in states.get(number, {}).items()
                }
            saved["state"] = {number: state for number, state in states.items() if state}
        return computed_as(optimizer.param_groups, saved)

    def _keep_types(self, saved: dict[str, Any]) -> None:
        """Restores the types that torch converts to the weight's, e.g. of NAdam's mu_product."""
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        for number, weight in enumerate(updated_by(self.optimizer)):
            kept = self.optimizer.state.get(weight, {})
            for name, value in saved["state"].get(number, {}).items():
                is_own = isinstance(value, Tensor) and keeps_own_type(name, is_fused=is_fused)
                if is_own and value.dtype != kept[name].dtype:
                    kept[name] = value.to(kept[name].device)

    def _set_rate(self, index: int, rate: float) -> None:
        """A changed learning rate of a group; a schedule continues in proportion to it."""
        group = self.optimizer.param_groups[index]
        before = group.get("initial_lr", group["lr"])
        group["lr"] = group["lr"] * (rate / before) if before else rate
        if "initial_lr" in group:
            group["initial_lr"] = rate
        if getattr(self.scheduler, "base_lrs", None):
            self.scheduler.base_lrs[index] = rate


class ByHand(Update):
    """Replaces the loop's update where a task steps its optimizers in training_step. An Update of
    each optimizer keeps its state."""

    name = ""
    needs_closure = False
    is_weighted = False
    scaler = None

    def __init__(self, task: Task, strategy: Strategy, settings: TrainerSettings) -> None:
        self.timed = lambda module: module
        self.dtype = DTYPES.get(settings.precision)
        self.backward = lambda loss: None
        kind = (task.own_class or type(task)).__name__
        if strategy.replicas > strategy.world_size:
            raise UserError(
                f"{kind} steps its optimizers itself, and the {strategy.replicas} replicas of "
                f"{strategy.name} in one process would each do so; use strategy=ddp"
            )
        if strategy.sharding is not None:
            raise UserError(
                f"{kind} steps its optimizers itself, with whole gradients, and {strategy.name} "
                "cuts them; use strategy=ddp"
            )
        for key, value, plain in (
            ("accumulate", settings.accumulate, 1),
            ("clip_norm", settings.clip_norm, None),
            ("clip_value", settings.clip_value, None),
            ("compile.mode", settings.compile_mode, None),
            ("on_nonfinite", settings.on_nonfinite, "stop"),
        ):
            if value != plain:
                raise UserError(
                    f"trainer.{key}={value}: {kind} steps its optimizers itself; do this in its "
                    f"training_step, and use trainer.{key}={'null' if plain is None else plain}"
                )
        if settings.precision == "fp16":
            raise UserError(
                f"trainer.precision=fp16 scales the loss, and {kind} steps its optimizers itself; "
                "use trainer.precision=bf16 or 32"
            )

    def weights_of(self, measured: list[Measured]) -> list[Any]:
        return []

    def fill_gradients(self) -> None: ...

    def step(self, closure: Callable[[], Tensor] | None = None, *, wants_norm: bool) -> None: ...


def updates_of(
    task: Task,
    strategy: Strategy,
    settings: TrainerSettings,
    scaler: torch.amp.GradScaler | None,
    scaled_rates: ScaledRates | None = None,
) -> dict[str, Update]:
    """The Updates by the names of their optimizers."""
    if not any(parameter.requires_grad for parameter in task.parameters()):
        raise UserError(
            f"{type(task).__name__} has no parameter to train; leave some with requires_grad=True"
        )
    if settings.lean and settings.compile_mode is None:
        lean.prepare()
    optimizers = optimizers_of(task)
    for key in ("clip_norm", "clip_value"):
        limits = getattr(settings, key)
        for name in limits if isinstance(limits, dict) else ():
            if name not in optimizers:
                raise UserError(
                    f"trainer.{key}.{name}: there is no such optimizer; "
                    f"{suggestion(name, filter(None, optimizers))}"
                )
    turns = [] if task.optimizes_by_hand else list(optimizers)
    check_signature(task, turns)
    task.optimizer_names = tuple(filter(None, turns))
    return {
        name: Update(name, made, task, strategy, settings, scaler, scaled_rates)
        for name, made in optimizers.items()
    }


def each_of(updates: dict[str, Update], read: Callable[[Update], Any]) -> Any:
    """The value of the only update, or of several a dict by their names."""
    values = {name: read(update) for name, update in updates.items()}
    return values.get("", values)  # one alone has no name


def states_of(updates: dict[str, Update]) -> dict[str, Any]:
    states = {name: update.state_dict() for name, update in updates.items()}
    if "" in states:
        return states[""]
    return {part: {name: states[name][part] for name in states} for part in STATES}


def of_turn(name: str, *settings: Any) -> list[Any]:
    """The settings' values for the optimizer of this name."""
    return [value.get(name) if isinstance(value, dict) else value for value in settings]


def fuse(optimizer: Optimizer, model: nn.Module, kinds: Sequence[str] | None = None) -> bool:
    """Has an optimizer of torch use its fused kernels: one call for all weights, not ten for each.

    They round differently in the last digit. Not where the user chose an implementation, nor for
    weights or gradients that the kernels can't take; if `kinds` are given, for these alone.
    """
    defaults, groups = optimizer.defaults, optimizer.param_groups
    choices = ("fused", "foreach", "capturable", "differentiable")
    is_chosen = defaults.get("fused", False) is not None or any(map(defaults.get, choices))
    is_chosen |= any(group.get("fused") is not None or group.get("foreach") for group in groups)
    is_stock = type(optimizer).__module__.startswith("torch.optim.")
    # What is frozen has no gradient: the kernels leave it out, whatever its type.
    weights = [weight for group in groups for weight in group["params"] if weight.requires_grad]
    kind = type(optimizer).__name__
    have = [name for name, those in FUSED.items() if those is None or kind in those]
    is_stock &= kinds is None or kind in kinds
    fits = all(w.device.type in have and w.dtype in FUSED_DTYPES for w in weights)
    if is_chosen or not is_stock or not fits or has_sparse(model):
        return False
    for group in groups:
        group["fused"] = True
    for weight, state in optimizer.state.items():  # Adagrad has made its own for other kernels
        state["step"] = state["step"].to(weight.device, torch.float32)
    _skips_by_itself(optimizer, True)
    return True


def _unfuse_late(optimizer: Optimizer) -> bool:
    """Before a step: takes `fused` from the groups whose step can't be; True: look again.

    SGD's kernel takes the momenta of all weights that have a gradient, or of none. A momentum
    begins with its weight's first gradient, e.g. when the weight is thawed. A step in which one
    begins is GradScaler's to skip: torch would leave it in memory that nobody has written.
    """
    looks_again = begins = False
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        has_begun = ["momentum_buffer" in optimizer.state.get(w, ()) for w in group["params"]]
        pairs = zip(group["params"], has_begun, strict=True)
        updated = {begun for weight, begun in pairs if weight.grad is not None}
        group["fused"] = None if len(updated) > 1 else True
        begins |= False in updated
        looks_again |= begins or not all(has_begun)
    _skips_by_itself(optimizer, not begins)
    return looks_again


def _skips_by_itself(optimizer: Optimizer, does: bool) -> None:
    """Fused kernels skip a step whose gradients are not finite, so that GradScaler does not read
    from the GPU whether to. `fused=True` in the constructor sets the same."""
    optimizer._step_supports_amp_scaling = does  # type: ignore[attr-defined]


def _is_missing(gradient: Tensor | None) -> bool:
    """None, or a sparse one without an entry."""
    if gradient is None:
        return True
    return gradient.is_sparse and not gradient.coalesce().indices().numel()
