"""One line that is drawn over itself, e.g. for a cell of a notebook."""

import time
from typing import TYPE_CHECKING

from dpframe.errors import printable
from dpframe.trainer.callback import Callback

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

REDRAW_SECONDS = 0.2


class Live(Callback):
    reads_metrics = True

    def __init__(self) -> None:
        self.width = 0  # of the line on screen
        self.next_draw = 0.0

    def on_step_end(self, trainer: "Trainer") -> None:
        if time.perf_counter() >= self.next_draw:
            self._draw(trainer)

    def on_epoch_end(self, trainer: "Trainer") -> None:
        self.on_step_end(trainer)

    def on_fit_end(self, trainer: "Trainer") -> None:
        self._draw(trainer)
        self._end(trainer)

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None:
        self._end(trainer)

    def _draw(self, trainer: "Trainer") -> None:
        if not trainer.strategy.is_main:
            return
        self.next_draw = time.perf_counter() + REDRAW_SECONDS
        epochs, steps = trainer.settings.max_epochs, trainer.total_steps
        numbers = trainer.step_metrics | trainer.metrics
        parts = [
            f"epoch {trainer.progress.current_epoch}{f'/{epochs}' if epochs else ''}",
            f"step {trainer.global_step}{f'/{steps}' if steps else ''}",
            *(f"{name} {value:.4g}" for name, value in numbers.items()),
        ]
        line = printable("  ".join(parts))
        print(f"\r{line:<{self.width}}", end="", flush=True)
        self.width = len(line)

    def _end(self, trainer: "Trainer") -> None:
        if self.width:
            print(flush=True)
        self.width = 0
