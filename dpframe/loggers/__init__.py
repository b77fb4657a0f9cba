"""Loggers write down what a run measured; the main process alone has any."""

from dpframe.loggers.base import Logger

__all__ = ["Logger"]
