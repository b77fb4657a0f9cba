"""The optimizers of a task, and whose turn it is."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dpframe.errors import UserError, suggestion
from dpframe.strategies.base import Strategy
from dpframe.strategies.collectives import Collectives
from dpframe.task import Task
from dpframe.trainer.compute import dynamo
from dpframe.trainer.optim.by_hand import ByHand
from dpframe.trainer.optim.modes import Modes
from dpframe.trainer.optim.optimizers import check_signature, optimizers_of
from dpframe.trainer.optim.rates import ScaledRates
from dpframe.trainer.optim.step import OptimizerStep
from dpframe.trainer.settings import TrainerSettings


class Turns(dict[str, OptimizerStep]):
    """By the optimizers' names; one alone has the name ""."""

    def __init__(
        self,
        by_name: dict[str, OptimizerStep],
        task: Task,
        collectives: Collectives,
        by_hand: ByHand | None,
    ) -> None:
        """`by_hand` takes the place of all where the task steps its optimizers itself."""
        super().__init__(by_name)
        self._task = task
        self._collectives = collectives
        self._compares_turns = collectives.world_size > 1 and task.has_own("turns")
        self.by_hand = by_hand
        self.modes = Modes(update.optimizer for update in by_name.values())
        self.current = next(iter(by_name.values()))  # the one whose turn it is
        self._single_update: tuple[OptimizerStep, ...] = ()  # empty: several take turns
        if by_hand is not None:
            self._single_update = (by_hand,)
        elif not self.current.name:
            self._single_update = (self.current,)

    def taking_turns(self) -> Iterable[OptimizerStep]:
        """Those of this step, one after the other; in each turn only its own weights get
        gradients."""
        return self._single_update or self._turns()

    def _turns(self) -> Iterator[OptimizerStep]:
        task = type(self._task).__name__
        names = list(self._task.turns())
        if self._compares_turns:
            self._refuse_other_turns(names)
        for name in names:
            if name not in self:
                raise UserError(
                    f"{task}.turns returned {name!r}, which is no optimizer; "
                    f"{suggestion(str(name), self)}"
                )
            self.current = self[name]
            with self.current.alone():
                if not self.current.has_trained():
                    raise UserError(
                        f"{task}: all weights of {name} are frozen in its turn; leave it out of "
                        "turns() until some are thawed"
                    )
                yield self.current

    def _refuse_other_turns(self, names: list[str]) -> None:
        """Processes that train different weights would add up gradients of different things."""
        collectives = self._collectives
        here = float(zlib.crc32(repr(names).encode()))
        if collectives.sum_numbers([here]) != [here * collectives.world_size]:
            raise UserError(
                f"{type(self._task).__name__}.turns returned {names} on rank {collectives.rank} "
                "and something else on another one; decide it by self.global_step and self.epoch"
            )

    def learning_rates(self, *, used: bool = False) -> dict[str, float]:
        """`lr`, and by the names of optimizers and groups, e.g. `lr/generator/backbone`; `used`: of
        those that had a turn in the step that is logged, what they used in it."""
        return {
            "/".join(filter(None, ("lr", name, group))): rate
            for name, update in self.items()
            for group, rate in ((used and update.rates) or update.learning_rates()).items()
        }

    def pop_logged(self, *, beside: Iterable[str]) -> dict[str, float]:
        """Of a step that is logged: the learning rates that it has used, and `grad_norm`, or by the
        names of the optimizers that have made it. They are told once, `beside` what it measured."""
        logged = self.learning_rates(used=True)
        for name, update in self.items():
            if update.grad_norm is not None:
                logged["/".join(filter(None, ("grad_norm", name)))] = float(update.grad_norm)
            update.grad_norm = update.rates = None
        own = () if self._task.adapter.prefers_metrics else {*logged, "samples_per_second"}
        for name in beside:
            if name in own:
                raise UserError(
                    f"{type(self._task).__name__}.training_step returned {name!r}, and step/{name} "
                    "is a number of the Trainer's own; rename it"
                )
        return logged

    def monitored(self) -> list[tuple[str, str]]:
        """The metric that a schedule waits for, by its key."""
        plateaus = [update for update in self.values() if update.is_plateau]
        return [("trainer.plateau_monitor", each.plateau_monitor) for each in plateaus]

    def each(self, read: Callable[[OptimizerStep], Any]) -> Any:
        """The value of the only one, or of several a dict by their names."""
        values = {name: read(update) for name, update in self.items()}
        return values.get("", values)  # one alone has no name

    def state_dict(self) -> dict[str, Any]:
        states = {name: update.state_dict() for name, update in self.items()}
        if "" in states:
            return states[""]
        parts = next(iter(states.values()))
        return {part: {name: states[name][part] for name in states} for part in parts}


def turns_of(
    task: Task,
    strategy: Strategy,
    settings: TrainerSettings,
    scaler: torch.amp.GradScaler | None,
    scaled_rates: ScaledRates | None,
) -> Turns:
    """Makes the task's optimizers, and checks them."""
    if not any(parameter.requires_grad for parameter in task.parameters()):
        raise UserError(
            f"{type(task).__name__} has no parameter to train; leave some with requires_grad=True"
        )
    if settings.skip_dynamo_import and settings.compile_mode is None:
        dynamo.skip_import()
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
    by_name = {
        name: OptimizerStep(name, made, task, strategy, settings, scaler, scaled_rates)
        for name, made in optimizers.items()
    }
    by_hand = ByHand(task, strategy, settings) if task.optimizes_by_hand else None
    return Turns(by_name, task, strategy.collectives, by_hand)
