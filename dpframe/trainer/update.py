"""An optimizer update: scaling, clipping, the fused step, and the learning rate's schedule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpframe import lean
from dpframe.data import move
from dpframe.errors import UserError, suggestion
from dpframe.metrics import SOMETIMES_WEIGHTED
from dpframe.strategies.base import Strategy
from dpframe.task import Measured, Task, has_sparse, optimizer_of
from dpframe.trainer.placement import align
from dpframe.trainer.settings import TrainerSettings

FUSED_DEVICES = ("cpu", "cuda")
FUSED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Update:
    def __init__(
        self,
        task: Task,
        strategy: Strategy,
        settings: TrainerSettings,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.strategy = strategy
        self.settings = settings
        self.scaler = scaler
        self.parameters = list(task.parameters())  # one that is frozen may thaw later
        if not any(parameter.requires_grad for parameter in self.parameters):
            raise UserError(f"{type(task).__name__} has no parameter to train")
        if settings.lean and settings.compile_mode is None:
            lean.prepare()
        self.optimizer, self.scheduler = optimizer_of(task)
        updated = {
            id(weight) for group in self.optimizer.param_groups for weight in group["params"]
        }
        self._others = [weight for weight in self.parameters if id(weight) not in updated]
        is_fused = fuse(self.optimizer, task)
        self._awaits_momenta = is_fused and isinstance(self.optimizer, torch.optim.SGD)
        self.is_plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        self.schedules_steps = (
            self.scheduler is not None
            and not self.is_plateau
            and settings.scheduler_every == "step"
        )
        self._step = lean.step_of(self.optimizer) if settings.lean else self.optimizer.step
        self.backward: Callable[[Tensor], Any] = Tensor.backward
        if scaler is not None:
            self.backward = lambda loss: scaler.scale(loss).backward()
        self.grad_norm: Tensor | float = float("nan")
        self.is_weighted: bool | None = None  # whether steps return a weight, after the first one

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def weights_of(self, measured: list[Measured]) -> list[Any]:
        """Each share's weight; none where steps return no weight."""
        for _, output in measured:
            if ("weight" in output) is not self.is_weighted:
                self._agree_on_weights(measured)
        if not self.is_weighted:
            return []
        return [output["weight"] if rows else 0.0 for rows, output in measured]

    def _agree_on_weights(self, measured: list[Measured]) -> None:
        """The processes agree once, after the first batch; a later batch that differs is refused
        in the process that has it."""
        here = {"weight" in output for _, output in measured}
        if self.is_weighted is None:
            several = self.strategy.tally([float(True in here), float(False in here)])
            if 0.0 in several:
                self.is_weighted = here == {True}
                return
        raise UserError(SOMETIMES_WEIGHTED)

    def step(self, rows: int, weights: list[Any], *, wants_norm: bool) -> None:
        """Steps by the gradient of the exact mean over the step's rows, or weights."""
        settings = self.settings
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if weights:
            self._reweigh(rows, weights)
        if settings.clip_norm is not None:
            self.grad_norm = clip_grad_norm_(self._updated(), settings.clip_norm)
        elif wants_norm:
            self.grad_norm = get_total_norm([weight.grad for weight in self._updated()])
        if settings.clip_value is not None:
            clip_grad_value_(self._updated(), settings.clip_value)
        if self._awaits_momenta:
            self._awaits_momenta = _unfuse_late(self.optimizer)
        if self.scaler is None:
            self._step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # what zero_grad does, without its profiling
        for parameter in self._others:
            parameter.grad = None
        if self.schedules_steps:
            self.scheduler.step()

    def skip(self) -> None:
        """What a step that is left out still does."""
        self.optimizer.zero_grad()
        for parameter in self._others:
            parameter.grad = None
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
        if name not in metrics:
            raise UserError(
                f"trainer.plateau_monitor={name} is not measured; {suggestion(name, metrics)}"
            )
        self.scheduler.step(metrics[name])

    def _reweigh(self, rows: int, weights: list[Any]) -> None:
        """Makes a mean over rows one over weights: their sum is known only after the forwards."""
        here = torch.zeros((), dtype=torch.float64, device=self.strategy.device)
        for weight in weights:  # numbers, and tensors on any replica's device
            here = here + move(weight, here.device)
        total = self.strategy.reduce(here.sum())
        factor = torch.where(total == 0, 0.0, rows / total)  # what counts nothing moves nothing
        for weight in self._updated():
            weight.grad.mul_(factor.to(weight.grad))
        if all(_is_missing(parameter.grad) for parameter in self.parameters):
            # Each share counted nothing and was NaN. The gradients are 0, as of a finite one.
            for parameter in self.parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def _updated(self) -> list[Any]:
        """What the optimizer updates and has a gradient: no other gradient is part of a norm.

        The values of a sparse gradient stand in for it, since torch takes no norm of it: they
        share its memory, and what it leaves out is zero.
        """
        weights: list[Any] = []
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight.grad.is_sparse:
                    weight.grad = weight.grad.coalesce()
                    values = weight.grad.values()
                    weight = values.detach()
                    weight.grad = values
                if weight.grad is not None:
                    weights.append(weight)
        return weights

    def kinds(self) -> dict[str, str | None]:
        return {
            "optimizer": type(self.optimizer).__name__,
            "scheduler": self.scheduler and type(self.scheduler).__name__,
            "scheduler's steps": getattr(self.scheduler, "total_steps", None),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
        }

    def load_state_dict(
        self, state: dict[str, Any], there: dict[str, Any], here: dict[str, Any]
    ) -> None:
        """What is of another kind than in `there` starts from its beginning."""
        is_same = {name: there[name] == kind for name, kind in self.kinds().items()}
        defaults = dict(self.optimizer.defaults)
        if is_same["optimizer"]:
            self.optimizer.load_state_dict(state["optimizer"])
            if there.get("trainer.precision") == here["trainer.precision"]:
                self._keep_types(state["optimizer"])
            align(self.optimizer)
        if self.scheduler is not None and is_same["scheduler"] and is_same["scheduler's steps"]:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        for name, value in defaults.items():
            if any(
                key.endswith(f"optimizer.{name}") and there.get(key) != here.get(key)
                for key in {*there, *here}
            ):
                self._set(name, value)

    def _keep_types(self, saved: dict[str, Any]) -> None:
        """Torch converts what it loads to its weight's type, even NAdam's product of momenta."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for weight, number in zip(weights, numbers, strict=True):
            kept = self.optimizer.state.get(weight, {})
            for name, value in saved["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dtype != kept[name].dtype:
                    kept[name] = value.to(kept[name].device)

    def _set(self, name: str, value: Any) -> None:
        """A changed setting of the optimizer; a schedule continues in proportion to the rate."""
        for index, group in enumerate(self.optimizer.param_groups):
            if name != "lr":
                group[name] = value
                continue
            factor = value / group.get("initial_lr", group["lr"])
            group["lr"] = group["lr"] * factor
            if "initial_lr" in group:
                group["initial_lr"] = value
            if getattr(self.scheduler, "base_lrs", None):
                self.scheduler.base_lrs[index] = value


def fuse(optimizer: Optimizer, model: nn.Module) -> bool:
    """Has an optimizer of torch use its fused kernels: one call for all weights, not ten for each.

    They round differently in the last digit. Not where the user chose an implementation, nor for
    weights or gradients that the kernels can't take.
    """
    defaults, groups = optimizer.defaults, optimizer.param_groups
    choices = ("fused", "foreach", "capturable", "differentiable")
    is_chosen = defaults.get("fused", False) is not None or any(map(defaults.get, choices))
    is_chosen |= any(group.get("fused") is not None or group.get("foreach") for group in groups)
    is_stock = type(optimizer).__module__.startswith("torch.optim.")
    # What is frozen has no gradient: the kernels leave it out, whatever its type.
    weights = [weight for group in groups for weight in group["params"] if weight.requires_grad]
    fits = all(w.device.type in FUSED_DEVICES and w.dtype in FUSED_DTYPES for w in weights)
    if is_chosen or not is_stock or not fits or has_sparse(model):
        return False
    for group in groups:
        group["fused"] = True
    return True


def _unfuse_late(optimizer: Optimizer) -> bool:
    """Before a step: takes `fused` from the groups whose step can't be; True: look again.

    SGD's kernel takes the momenta of all weights that have a gradient, or of none. A momentum
    begins with its weight's first gradient, e.g. when the weight is thawed.
    """
    looks_again = False
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        has_begun = ["momentum_buffer" in optimizer.state.get(w, ()) for w in group["params"]]
        pairs = zip(group["params"], has_begun, strict=True)
        is_mixed = len({begun for weight, begun in pairs if weight.grad is not None}) > 1
        group["fused"] = None if is_mixed else True
        looks_again |= is_mixed or not all(has_begun)
    return looks_again


def _is_missing(gradient: Tensor | None) -> bool:
    """None, or a sparse one without an entry."""
    if gradient is None:
        return True
    return gradient.is_sparse and not gradient.coalesce().indices().numel()
