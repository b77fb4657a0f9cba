"""One optimiser update: scaling, clipping, the step, and the learning rate's schedule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpframe import lean
from dpframe.data import move
from dpframe.errors import UserError, suggestion
from dpframe.metrics import SOMETIMES_WEIGHTED
from dpframe.strategies.base import Strategy
from dpframe.task import Measured, Task, optimizer_of
from dpframe.trainer.fused import fuse, unfuse_late
from dpframe.trainer.layout import align
from dpframe.trainer.settings import TrainerSettings


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
        if settings.lean and not settings.compile:
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
        self.backward: Callable[[Tensor], Any] = lean.backward if settings.lean else Tensor.backward
        if scaler is not None:
            self.backward = lambda loss: scaler.scale(loss).backward()
        self.grad_norm: Tensor | float = float("nan")
        self.is_weighted: bool | None = None  # whether steps return a weight, after the first one

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def agree_on_weights(self, measured: list[Measured]) -> None:
        """Once, after the first batch of all, between the processes; a later one that differs is
        refused in the process that has it."""
        here = {"weight" in output for _, output in measured}
        if self.is_weighted is None:
            several = self.strategy.tally([float(True in here), float(False in here)])
            if 0.0 in several:
                self.is_weighted = here == {True}
                return
        raise UserError(SOMETIMES_WEIGHTED)

    def step(self, rows: int, weights: list[Any], *, wants_norm: bool) -> None:
        """The gradients are the step's exact mean when the optimiser sees them."""
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
            self._awaits_momenta = unfuse_late(self.optimizer)
        if self.scaler is None:
            self._step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # as zero_grad does, less the calls that profile it
        for parameter in self._others:
            parameter.grad = None
        if self.schedules_steps:
            self.scheduler.step()

    def skip(self) -> None:
        """All that there is of a step that is left out."""
        self.optimizer.zero_grad()
        for parameter in self._others:
            parameter.grad = None
        if self.schedules_steps:
            self.scheduler.step()

    def end_epoch(self, metrics: dict[str, float], *, is_stale: bool) -> None:
        """`is_stale`: the val/ numbers are those of an earlier epoch, or of the end of training."""
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
        """From a mean over rows to one over weights: their sum is known only after the forwards."""
        here = torch.zeros((), dtype=torch.float64, device=self.strategy.device)
        for weight in weights:  # numbers, and tensors on any replica's device
            here = here + move(weight, here.device)
        total = self.strategy.reduce(here.sum())
        factor = torch.where(total == 0, 0.0, rows / total)  # what counts nothing has no gradient
        for weight in self._updated():
            weight.grad.mul_(factor.to(weight.grad))
        if all(_is_missing(parameter.grad) for parameter in self.parameters):
            # Each share was nothing, and NaN; where one is finite its gradients are 0, so here too.
            for parameter in self.parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def _updated(self) -> list[Any]:
        """What the optimizer takes and has a gradient: the others' have no part in a norm.

        A sparse gradient's values stand in for it, as torch takes no norm of it: they are its own
        memory, and what it leaves out is zero.
        """
        found: list[Any] = []
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight.grad.is_sparse:
                    weight.grad = weight.grad.coalesce()
                    values = weight.grad.values()
                    weight = values.detach()
                    weight.grad = values
                if weight.grad is not None:
                    found.append(weight)
        return found

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
        """What is of another kind than it was `there` begins anew."""
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
        """Torch makes all that it loads of its weight's type: NAdam's product of momenta too."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for weight, number in zip(weights, numbers, strict=True):
            kept = self.optimizer.state.get(weight, {})
            for name, value in saved["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dtype != kept[name].dtype:
                    kept[name] = value.to(kept[name].device)

    def _set(self, name: str, value: Any) -> None:
        """A changed setting of the optimiser; a schedule goes on in proportion to the new rate."""
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


def _is_missing(gradient: Tensor | None) -> bool:
    """None, or a sparse one without an entry."""
    if gradient is None:
        return True
    return gradient.is_sparse and not gradient.coalesce().indices().numel()
