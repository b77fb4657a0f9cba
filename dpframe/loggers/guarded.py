"""A Guarded logger that fails, on a full disk say, warns once and is left out: training goes on."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dpframe.loggers.base import Logger, Scalar

if TYPE_CHECKING:
    from torch import nn


class Guarded(Logger):
    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self.has_failed = False

    def open(
        self, run_dir: str, *, config: str, hparams: dict[str, Scalar], purge_step: int | None
    ) -> None:
        self._attempt(
            self.logger.open, run_dir, config=config, hparams=hparams, purge_step=purge_step
        )

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        self._attempt(self.logger.log, scalars, step=step)

    def graph(self, module: "nn.Module", batch: Any) -> None:
        self._attempt(self.logger.graph, module, batch)

    def flush(self) -> None:
        self._attempt(self.logger.flush)

    def dashboard(self, run_dir: str) -> str:
        return self.logger.dashboard(run_dir)

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        self._attempt(self.logger.close, metrics, succeeded=succeeded)

    def _attempt(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self.has_failed:
            return
        try:
            call(*args, **kwargs)
        except Exception as error:
            self.has_failed = True
            logging.getLogger("dpframe").warning(
                "%s stopped: %s: %s; training goes on without it",
                type(self.logger).__name__,
                type(error).__name__,
                error,
            )
