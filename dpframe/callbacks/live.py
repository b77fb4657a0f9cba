"""One line that is drawn over itself, e.g. for a cell of a notebook."""

import sys
import time
from typing import TYPE_CHECKING

from dpframe.callbacks.newest import NewestLoss
from dpframe.callbacks.progress import current_epoch, inline, out_of
from dpframe.trainer.callback import Callback

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

REDRAW_SECONDS = 0.2


class Live(Callback):
    """Draws the line: epoch, step, rate and the newest metrics."""

    reads_metrics = True

    def __init__(self) -> None:
        self.width = 0  # of the line on screen
        self.next_draw = 0.0
        self.newest = NewestLoss()

    def on_step_end(self, trainer: "Trainer") -> None:
        if time.perf_counter() >= self.next_draw:
            self._draw(trainer)

    on_epoch_end = on_step_end

    def on_fit_end(self, trainer: "Trainer") -> None:
        self._draw(trainer, is_over=True)
        self.on_exception(trainer)

    def on_exception(self, trainer: "Trainer", error: BaseException | None = None) -> None:
        if self.width:
            print(flush=True)
        self.width, self.newest = 0, NewestLoss()

    def _draw(self, trainer: "Trainer", *, is_over: bool = False) -> None:
        if not trainer.strategy.is_main:
            return
        self.next_draw = time.perf_counter() + REDRAW_SECONDS
        step = f"step {trainer.global_step}{out_of(trainer.total_steps)}"
        numbers = trainer.step_metrics | trainer.metrics
        if not is_over:
            numbers = self.newest.beside(trainer, numbers)
        line = "  ".join([current_epoch(trainer), step, inline(numbers)])
        print(f"\r{line:<{self.width}}", end="", flush=True)
        self.width = len(line)


def is_notebook() -> bool:
    """Whether a kernel runs this, and no terminal shows what it prints."""
    kernel = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    return kernel is not None and kernel.initialized() and not sys.stdout.isatty()
