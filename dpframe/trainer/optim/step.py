"""An optimizer update: scaling, clipping, the fused step, and the learning rate's schedule."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_
from torch.optim import SGD, Adafactor, Muon, Rprop
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpframe.composite import name_of, parts_of
from dpframe.errors import UserError, metric_of
from dpframe.parameters import updated_by
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.compute import dynamo
from dpframe.trainer.compute.placement import DTYPES, align, with_default_dtype
from dpframe.trainer.optim.optimizers import Made, fuse, unfuse_late
from dpframe.trainer.optim.rates import ScaledRates
from dpframe.trainer.optim.schedule import (
    StepSchedule,
    follows_count,
    go_on,
    options_of,
    warn_of_end,
)
from dpframe.trainer.optim.state import (
    Mismatch,
    Options,
    fitted,
    group_order,
    have_same_rates,
    keep_types,
    named_state,
    options_of_groups,
    set_options,
)
from dpframe.trainer.outputs import Measured, Weighting
from dpframe.trainer.profile import timed
from dpframe.trainer.settings import TrainerSettings

NEEDS_WHOLE = (Adafactor, Muon, Rprop)  # torch has no step of these on parts of weights


class NotFinite(Exception):
    """A closure has met a loss or gradients that are not."""


class OptimizerStep:
    """One optimizer of a task and all that its step needs; `name` is "" where there is no other.

    `module` is the task's training step as the strategy has wrapped it, for this optimizer: `use`
    sets it. `step` is `_clip_and_step`, and `backward` torch's, in a profile timed.
    """

    module: nn.Module
    forward: Callable[..., tuple[Tensor, list[Measured]]]
    backward: Callable[[Tensor], Any]
    step: Callable[..., bool]  # clips, steps the optimizer and its schedule

    def __init__(
        self,
        name: str,
        made: Made,
        task: Task,
        strategy: Strategy,
        settings: TrainerSettings,
        scaler: torch.amp.GradScaler | None,
        scaled_rates: ScaledRates | None,
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
        self._fitted = partial(fitted, self._named, strategy.sharding)
        # Whoever saves or loads its state, e.g. a strategy that has one of each process.
        with suppress(AttributeError):  # a user's class that has not called Optimizer.__init__
            self.optimizer.register_state_dict_post_hook(partial(named_state, self._named))
            self.optimizer.register_load_state_dict_pre_hook(self._fitted)
        parts = parts_of(self.optimizer)
        for part in parts:
            fuse(part, task, strategy.sharding.fused_optimizers)
        fused = (p for p in parts if all(group.get("fused") for group in p.param_groups))
        # See `unfuse_late`.
        self._await_momenta = [part for part in fused if isinstance(part, SGD)]
        self.is_plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        self.plateau_monitor = settings.plateau_monitor
        self.schedules_steps = (
            self.scheduler is not None
            and not self.is_plateau
            and (settings.scheduler_every == "step" or isinstance(self.scheduler, StepSchedule))
        )
        self.options: dict[str, Any] = {  # as they were made, since training changes some
            "kind": name_of(self.optimizer),
            "precision": settings.precision,
            "groups": options_of_groups(self.optimizer),
            "schedule": {
                "kind": type(self.scheduler).__name__,
                "steps": getattr(self.scheduler, "total_steps", None),
                "by_step": self.schedules_steps,
                "options": options_of(self.scheduler),
            },
        }
        self.clip_norm, self.clip_value = of_turn(name, settings.clip_norm, settings.clip_value)
        whole = parts if self.needs_closure else [p for p in parts if isinstance(p, NEEDS_WHOLE)]
        if strategy.sharding.cuts and whole:
            raise UserError(
                f"{type(whole[0]).__name__} needs whole weights in each process, and "
                f"{strategy.name} cuts them; use strategy=ddp, or another optimizer"
            )
        if self.needs_closure:
            self._refuse_with_closure()
        if scaler is not None and strategy.sharding.cuts:
            raise UserError(
                f"trainer.precision={settings.precision} can't be combined with {strategy.name}, "
                "whose ranks would scale their losses by themselves; use trainer.precision=bf16"
            )
        self.weighting = Weighting(strategy.collectives, strategy.device, strategy.sums)
        self._optimize = (
            dynamo.step_of(self.optimizer) if settings.skip_dynamo_import else self.optimizer.step
        )
        backward = Tensor.backward if scaler is None else partial(_scaled_backward, scaler)
        self.backward = timed("backward", backward, is_profiled=settings.profile)
        if self.dtype is not None:  # what is computed again there makes floats, as in the forward
            self.backward = with_default_dtype(self.dtype, self.backward)
        self.step = timed("optimizer", self._clip_and_step, is_profiled=settings.profile)
        self.refuses: Callable[[Tensor], bool] | None = None  # a norm that leaves out its step
        self.is_refused = False  # this step, by a loss of gradients that were computed again
        # Of the step that is logged next, if it had a turn.
        self.grad_norm: Tensor | None = None
        self.rates: dict[str, float] | None = None

    def learning_rates(self) -> dict[str, float]:
        """The learning rates by the names of their groups; the first group's also by ""."""
        groups = self.optimizer.param_groups
        factor = 1.0 if self.scaled_rates is None else self.scaled_rates.now()
        rates = {str(group["name"]): group["lr"] for group in groups if "name" in group}
        return {n: float(rate) * factor for n, rate in {"": groups[0]["lr"], **rates}.items()}

    def use(self, module: nn.Module) -> None:
        """`module` computes the loss of this optimizer from now on."""
        self.module = module
        self.forward = timed("forward", module, is_profiled=self.settings.profile)
        if self.dtype is not None:
            self.forward = with_default_dtype(self.dtype, self.forward)

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
                    f"trainer.{key}={value} can't be combined with {kind}, which computes the "
                    f"gradients of a step several times; use trainer.{key}={use}, or another "
                    "optimizer"
                )

    def unscale(self) -> None:
        """Takes the scaler's factor out of the gradients."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def scale_gradients(self, factor: Tensor) -> None:
        for weight in self._parts():
            weight.grad.mul_(factor.to(weight.grad))
        self.fill_gradients()

    def _clip_and_step(
        self, closure: Callable[[], Tensor] | None = None, *, is_logged: bool
    ) -> bool:
        """`closure` computes the gradients again, for an optimizer that needs that. False: they are
        not finite, and the step has to be left out."""
        if self.clip_norm is not None or is_logged or self.refuses is not None:
            norm = self._total_norm()
            if self.is_refused or (self.refuses is not None and self.refuses(norm)):
                return False
            if self.clip_norm is not None:
                clip_grads_with_norm_(self._parts(), self.clip_norm, norm)
            if is_logged:
                self.grad_norm, self.rates = norm, self.learning_rates()
        if self.clip_value is not None:
            clip_grad_value_(self._parts(), self.clip_value)
        if self._await_momenta:
            self._await_momenta = [part for part in self._await_momenta if unfuse_late(part)]
        if self.scaled_rates is not None:
            self.scaled_rates.apply(self.optimizer)
        try:
            if closure is not None:
                self.optimizer.step(closure)  # type: ignore[arg-type]  # torch's returns tensors too
            elif self.scaler is None:
                self._optimize()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        except NotFinite:
            return False
        finally:
            if self.scaled_rates is not None:
                self.scaled_rates.undo(self.optimizer)
        self.clear()
        if self.schedules_steps:
            self.scheduler.step()
        return True

    def clear(self) -> None:
        """As zero_grad without its profiling; also for the weights of other optimizers."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for parameter in self._others:
            parameter.grad = None

    def skip(self, *, is_logged: bool) -> None:
        """In place of `step`, after a loss or gradients that are not finite."""
        self.is_refused = False
        if is_logged:
            self.rates = self.learning_rates()
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
        name = self.plateau_monitor
        if is_stale and name.startswith("val/"):
            return
        self.scheduler.step(metric_of("trainer.plateau_monitor", name, metrics))

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

    def check_again(self) -> None:
        """After gradients that a closure has computed."""
        if self.refuses is not None and self.refuses(self._total_norm()):
            raise NotFinite

    def _total_norm(self) -> Tensor:
        return self.strategy.sharding.total_norm([weight.grad for weight in self._updated()])

    def _parts(self) -> list[Any]:
        """This process's parts of what `_updated` returns; they share its memory."""
        sharding = self.strategy.sharding
        if not sharding.cuts:
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
            f"{whose}optimizer": self.options["kind"],
            f"{whose}scheduler": self.scheduler and type(self.scheduler).__name__,
            f"{whose}scheduler's steps": getattr(self.scheduler, "total_steps", None),
        }

    def state_dict(self) -> dict[str, Any]:
        return {  # by the keys of a checkpoint
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
            "options": self.options,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the optimizer of this name was, with the options that it has now.

        `state` is a whole checkpoint. A schedule goes on with the rates that it had there. If an
        option that decides them has changed, it is stepped again from its start, to where it was.
        Of an optimizer of another class nothing but that place is taken over. The order matters:
        the schedule steps first, as loading the optimizer overwrites the rates that it sets.
        """
        here, before = self.options, self._own(state["options"])
        saved, of_scheduler = self._own(state["optimizer"]), self._own(state["scheduler"])
        is_same_class = before["kind"] == here["kind"]
        groups = self._in_our_order(saved, before) if is_same_class else before["groups"]
        keeps_rates = (
            is_same_class
            and before["schedule"] == here["schedule"]
            and have_same_rates(self.optimizer, here["groups"], groups)
        )
        if keeps_rates:
            self._load_schedule(of_scheduler)
        else:
            self._step_schedule(of_scheduler, before["schedule"], state["progress"])
        if not is_same_class:
            return
        now = options_of_groups(self.optimizer)  # which loading replaces by those of there
        self._load_optimizer(saved, keeps_types=before["precision"] == here["precision"])
        with_rates = not keeps_rates and follows_count(self.scheduler)
        set_options(self.optimizer, here["groups"], groups, now, with_rates=with_rates)
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(self._own(state["scaler"]))

    def _own(self, states: dict[str, Any]) -> Any:
        return states[self.name] if self.name else states

    def _in_our_order(self, saved: dict[str, Any], before: dict[str, Any]) -> Options:
        """The options of the groups there, each in the place that its weights' group has here."""
        order = group_order(self._named, self.optimizer, saved)
        is_same_kind = before["schedule"]["kind"] == self.options["schedule"]["kind"]
        if is_same_kind and self.scheduler is not None and order != sorted(order):
            raise Mismatch(
                f"{type(self.scheduler).__name__} keeps its rates in the order of the optimizer's "
                "groups, which differs here"
            )
        return [before["groups"][place] for place in order]

    def _load_schedule(self, saved: Any) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved)
            if self.strategy.is_main:
                warn_of_end(self.scheduler)

    def _step_schedule(self, saved: Any, before: dict[str, Any], progress: dict[str, int]) -> None:
        """`saved` tells how often, or what it follows, if the schedule there is alike enough;
        otherwise the progress does."""
        if follows_count(self.scheduler):
            is_told = before["by_step"] == self.schedules_steps
        else:
            is_told = before["kind"] == self.options["schedule"]["kind"]
        at = progress["global_step" if self.schedules_steps else "epoch"]
        go_on(self.scheduler, saved if is_told else None, before["options"], at)

    def _load_optimizer(self, saved: dict[str, Any], *, keeps_types: bool) -> None:
        saved = self._fitted(self.optimizer, saved)
        self.optimizer.load_state_dict(saved)
        if keeps_types:
            keep_types(self.optimizer, saved)
        align(self.optimizer)


def _scaled_backward(scaler: torch.amp.GradScaler, loss: Tensor) -> None:
    scaler.scale(loss).backward()


def _is_missing(gradient: Tensor | None) -> bool:
    """None, or a sparse one without an entry."""
    if gradient is None:
        return True
    return gradient.is_sparse and not gradient.coalesce().indices().numel()


def of_turn(name: str, *settings: Any) -> list[Any]:
    """The settings' values for the optimizer of this name."""
    return [value.get(name) if isinstance(value, dict) else value for value in settings]
