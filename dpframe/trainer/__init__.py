"""The Trainer: one readable loop, and the settings beside it."""

from typing import TYPE_CHECKING

from dpframe.util.lazy import lazy

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer
    from dpframe.trainer.predictions import Predictions
    from dpframe.trainer.recorder import RunInfo

__all__ = ["Predictions", "RunInfo", "Trainer"]

_HOMES = {"Predictions": "predictions", "RunInfo": "recorder", "Trainer": "loop"}
# `dpframe.trainer.settings` never waits for torch.
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
