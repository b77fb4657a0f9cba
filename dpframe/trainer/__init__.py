"""The Trainer: one readable loop, and the settings beside it."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer
    from dpframe.trainer.predictions import Predictions
    from dpframe.trainer.recorder import RunInfo

__all__ = ["Predictions", "RunInfo", "Trainer"]

_HOME = {"Predictions": "predictions", "RunInfo": "recorder", "Trainer": "loop"}


def __getattr__(name: str) -> object:  # `dpframe.trainer.settings` never waits for torch
    if name in _HOME:
        return getattr(importlib.import_module(f"dpframe.trainer.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpframe.trainer' has no attribute '{name}'")
