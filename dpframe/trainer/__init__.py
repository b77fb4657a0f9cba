"""The Trainer: one readable loop, and the settings beside it."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpframe.trainer.evaluation import Predictions
    from dpframe.trainer.loop import Trainer
    from dpframe.trainer.report import Run

__all__ = ["Predictions", "Run", "Trainer"]

_HOME = {"Predictions": "evaluation", "Run": "report", "Trainer": "loop"}


def __getattr__(name: str) -> object:  # `dpframe.trainer.settings` never waits for torch
    if name in _HOME:
        return getattr(importlib.import_module(f"dpframe.trainer.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpframe.trainer' has no attribute '{name}'")
