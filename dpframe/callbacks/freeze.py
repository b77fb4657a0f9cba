"""Freezes a part of the weights, and thaws it later."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dpframe.errors import UserError
from dpframe.trainer.callback import Callback
from dpframe.util.patterns import Patterns, match_parameters
from dpframe.values import refuse_below

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

log = logging.getLogger("dpframe")


class Freeze(Callback):
    """Freezes what `patterns` match until so many epochs or steps are done; null: to the end.

    The running statistics of frozen norms stay as they are.
    Several of these callbacks thaw in stages: what two of them match is frozen until both thaw it.
    What the task has frozen by itself, or put into evaluation mode, is left so.
    """

    def __init__(
        self,
        patterns: Patterns | None = None,
        thaw_at_epoch: int | None = None,
        thaw_at_step: int | None = None,
    ) -> None:
        for key, value in (("thaw_at_epoch", thaw_at_epoch), ("thaw_at_step", thaw_at_step)):
            refuse_below(f"callbacks.freeze.{key}", value, use="1 or more, or null")
        self.patterns = patterns
        self.thaw_at_epoch = thaw_at_epoch
        self.thaw_at_step = thaw_at_step
        self.matched: list[Tensor] = []  # parameters and buffers
        self.is_over = False
        self.held: dict[int, Any] = {}  # what these callbacks have frozen, and will thaw

    def on_fit_start(self, trainer: "Trainer") -> None:
        task = trainer.task
        if not self.patterns:
            raise UserError(
                "callbacks.freeze.patterns is not set; name what to freeze, e.g. net.backbone"
            )
        named = [
            *task.named_parameters(remove_duplicate=False),
            *task.named_buffers(remove_duplicate=False),
        ]
        key = "callbacks.freeze.patterns"
        self.matched = match_parameters(named, self.patterns, key=key, within=task)
        self.is_over = self._is_over(trainer)
        self._apply(trainer)
        if not any(weight.requires_grad for weight in task.parameters()):
            raise UserError(
                f"callbacks.freeze.patterns={self.patterns} leaves nothing to train; leave out a "
                "part, e.g. patterns=['*','!net.head']"
            )

    def on_epoch_start(self, trainer: "Trainer") -> None:
        self._thaw_if_due(trainer)
        self._apply(trainer)  # the Trainer puts all modules into training mode

    def on_step_end(self, trainer: "Trainer") -> None:
        if trainer.global_step == self.thaw_at_step:
            self._thaw_if_due(trainer)
            self._apply(trainer)

    def on_validation_end(self, trainer: "Trainer") -> None:
        if trainer.mode == "fit":
            self._apply(trainer)

    def _is_over(self, trainer: "Trainer") -> bool:
        """A fact of how far training has come, so that a resumed run is in the same stage."""
        ends = (trainer.epoch, self.thaw_at_epoch), (trainer.global_step, self.thaw_at_step)
        return any(end is not None and done >= end for done, end in ends)

    def _thaw_if_due(self, trainer: "Trainer") -> None:
        if not self.is_over and self._is_over(trainer):
            self.is_over = True
            if trainer.strategy.is_main:
                log.info("step %s: %s is thawed", trainer.global_step, self.patterns)

    def _apply(self, trainer: "Trainer") -> None:
        """What the task has frozen by itself stays so."""
        every = [c for c in trainer.callbacks if isinstance(c, Freeze)]
        self.held = every[0].held  # what two of them match either may thaw
        others = [c for c in every if not c.is_over]
        frozen = {id(tensor) for freeze in others for tensor in freeze.matched}
        for tensor in self.matched:
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                holds = id(tensor) in frozen
                self._hold(tensor, tensor.requires_grad_, holds, is_on=tensor.requires_grad)
        mine = {id(tensor) for tensor in self.matched}
        for module in trainer.task.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name == "running_mean" and id(buffer) in mine:
                    self._hold(module, module.train, id(buffer) in frozen, is_on=module.training)

    def _hold(self, part: Any, turn: Callable[[bool], Any], holds: bool, *, is_on: bool) -> None:
        if holds and is_on:
            turn(False)
            self.held[id(part)] = part
        elif not holds and self.held.pop(id(part), None) is not None:
            turn(True)
