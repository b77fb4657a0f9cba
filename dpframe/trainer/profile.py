"""Where a run's time goes: `trainer.profile=true` times its parts, and tells at the end."""

import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer

log = logging.getLogger("dpframe")
COLLECTIVES = ("reduce", "gather", "share", "tally", "weight_sync")
PARTS = (
    "data wait",
    "forward",
    "backward",
    "optimizer",
    "communication",
    "logging",
    "callbacks",
    "validation",
    "rest",
)


class Profile:
    """Each moment counts for one part: the innermost that is being timed.

    On a GPU every part ends with a wait for it, so such a run is slower than others; what the
    gradients' all-reduce takes within the backward is told apart where the strategy knows it.
    """

    def __init__(self, trainer: "Trainer") -> None:
        strategy = trainer.strategy
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._waits = strategy.device.type == "cuda"
        self._inside = ["rest"]
        for owner, names, part in (
            (strategy, COLLECTIVES, "communication"),
            (trainer.update, ("backward",), "backward"),
            (trainer.update, ("step",), "optimizer"),
            (trainer.report, ("log", "flush"), "logging"),
        ):
            for name in names:
                setattr(owner, name, self._timed(part, getattr(owner, name)))
        if trainer.has_validation:
            measure = self._timed("validation", trainer.validation.means_of)
            trainer.validation.means_of = measure  # type: ignore[method-assign]
        for hooks in trainer.hooks.values():
            hooks[:] = [self._timed("callbacks", hook) for hook in hooks]
        trainer.step.register_forward_pre_hook(lambda *_: self._enter("forward"))
        trainer.step.register_forward_hook(lambda *_: self._leave())
        self._steps_before, self._data_before = trainer.global_step, trainer.data_seconds
        self._since = time.perf_counter()

    def tell(self, trainer: "Trainer") -> None:
        """As a table, and as profile/… in the dashboard, in seconds."""
        self._count()
        steps = trainer.global_step - self._steps_before
        self._move("rest", "data wait", trainer.data_seconds - self._data_before)
        self._move("backward", "communication", trainer.strategy.backward_communication() * steps)
        scalars = {f"profile/{p.replace(' ', '_')}": s for p, s in self.seconds.items()}
        trainer.report.log(scalars, step=trainer.global_step)
        if trainer.strategy.is_main:
            log.info("%s", self._table(steps))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return timed

    def _enter(self, part: str) -> None:
        self._count()
        self._inside.append(part)

    def _leave(self) -> None:
        self._count()
        self._inside.pop()

    def _move(self, source: str, target: str, seconds: float) -> None:
        seconds = min(seconds, self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def _table(self, steps: int) -> str:
        whole = sum(self.seconds.values()) or 1.0
        rows = [f"{'where the time went':<20}{'seconds':>9}{'share':>8}{'ms a step':>11}"]
        for part, seconds in self.seconds.items():
            each = 1e3 * seconds / max(steps, 1)
            rows.append(f"{part:<20}{seconds:>9.3f}{seconds / whole:>8.1%}{each:>11.3f}")
        return "\n".join(rows)

    def _count(self) -> None:
        if self._waits:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._inside[-1]] += now - self._since
        self._since = now
