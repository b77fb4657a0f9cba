"""Manual optimization: backwards whose gradients are the whole job's, and optimizers that count."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpframe import Strategy, UserError
from dpframe.plugin import current_share, updated_by
from dpframe.plugins.lightning.module import family

CHECKED = 3  # first steps of each optimizer, in which the ranks compare their gradients
TOLERANCE = 1e-6


class ByHand:
    """What `self.optimizers()` and `self.manual_backward` do."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.losses: list[Tensor] = []  # of the step at hand
        self.steps = 0  # of all optimizers together, as Lightning counts them
        self.steppers: list[Any] = []
        self._is_shared = False  # the backward at hand
        self._alone: set[int] = set()  # ids of weights with gradients of this rank alone
        self._hooks: list[Any] = []

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        self.steppers = []
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for optimizer in optimizers:
            if self._strategy.world_size > 1:
                self._hooks += map(self._watched, updated_by(optimizer))
            optimizer.register_step_post_hook(self._count)
            stepper = stepper_of(family(self.task.module))(optimizer)
            stepper.by_hand, stepper.looks = self, CHECKED
            self.steppers.append(stepper)

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """The loss is a mean over this replica's rows: its share of the one over all rows."""
        module, strategy = self.task.module, self._strategy
        self.losses.append(loss.detach())
        if strategy.world_size == 1:
            return module.backward(loss, *args, **options)
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        before = [weight.grad for weight in weights]
        if self._alone:  # what was cleared since is of no rank any more
            self._alone -= {id(weight) for weight in weights if weight.grad is None}
        for weight in weights:
            weight.grad = None
        part = (
            current_share.rows / current_share.total
            if current_share.rows
            else 1 / strategy.world_size
        )
        self._is_shared = True
        module.backward(loss * part, *args, **options)
        self._is_shared = False
        add_up(weights, strategy)
        for weight, earlier in zip(weights, before, strict=True):
            if earlier is not None:
                weight.grad = earlier if weight.grad is None else earlier + weight.grad
        return None

    def check(self, optimizer: Optimizer, *, together: bool) -> None:
        """Refuses gradients that the ranks have not shared, e.g. of a plain `loss.backward()`.
        Gradients that came without a backward are seen where the ranks look `together`."""
        if self._strategy.world_size == 1:
            return
        for weight in updated_by(optimizer) if self._alone else ():
            if id(weight) in self._alone and weight.grad is not None:
                self._refuse(optimizer)
        if not together:
            return
        here = sum(
            float(weight.grad.double().abs().sum())
            for group in optimizer.param_groups
            for weight in group["params"]
            if weight.grad is not None
        )
        ranks = self._strategy.world_size
        (total,) = self._strategy.collectives.sum_numbers([here])
        if abs(total - ranks * here) > TOLERANCE * ranks * here:
            self._refuse(optimizer)

    def _refuse(self, optimizer: Optimizer) -> NoReturn:
        raise UserError(
            f"{type(self.task.module).__name__} steps {type(optimizer).__name__} with gradients "
            "that differ between the ranks; call self.manual_backward(loss) instead of "
            "loss.backward(), equally often on all ranks"
        )

    def _watched(self, weight: Tensor) -> Any:
        is_trained = weight.requires_grad
        hook = weight.requires_grad_(True).register_post_accumulate_grad_hook(self._note)
        weight.requires_grad_(is_trained)
        return hook

    def _note(self, weight: Tensor) -> None:
        if not self._is_shared:
            self._alone.add(id(weight))

    @property
    def _strategy(self) -> Strategy:
        return self.task.held.trainer.strategy

    def _count(self, *_: Any) -> None:
        self.steps += 1


@torch.no_grad()
def add_up(weights: Sequence[Tensor], strategy: Strategy) -> None:
    """Sums the weights' gradients over all processes; None where none has one."""
    there = [weight.grad is not None for weight in weights]
    flags = torch.tensor(there, dtype=torch.float32)
    has_some = strategy.collectives.sum(flags).tolist()
    shared = [weight for weight, some in zip(weights, has_some, strict=True) if some]
    for dtype in dict.fromkeys(weight.dtype for weight in shared):
        alike = [weight for weight in shared if weight.dtype == dtype]
        flat = torch.cat([_dense(weight).flatten() for weight in alike])
        parts = strategy.collectives.sum(flat).split([weight.numel() for weight in alike])
        for weight, part in zip(alike, parts, strict=True):
            weight.grad = part.view_as(weight)


def _dense(weight: Tensor) -> Tensor:
    if weight.grad is None:
        return torch.zeros_like(weight)
    return weight.grad.to_dense() if weight.grad.is_sparse else weight.grad


@cache
def stepper_of(package: str) -> Any:
    """A LightningOptimizer that asks dpframe, not Lightning's strategy."""
    base: Any = import_module(f"{package}.core.optimizer").LightningOptimizer

    class Stepper(base):  # type: ignore[misc]
        by_hand: ByHand
        looks: int

        def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            def closed() -> Any:
                value = closure() if closure is not None else None
                self.by_hand.check(self.optimizer, together=self.looks > 0)
                self.looks -= 1
                self.by_hand.task.module.on_before_optimizer_step(self.optimizer)
                return value

            return self.optimizer.step(closed, **options)

        @contextmanager
        def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
            with self.by_hand.task.module.toggled_optimizer(self):
                yield

    return Stepper
