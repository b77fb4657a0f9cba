"""Callbacks act at the loop's hooks; the Trainer calls only those that a callback overrides."""

from dpframe.trainer.callback import Callback

__all__ = ["Callback"]
