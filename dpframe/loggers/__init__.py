"""Loggers write down what a run measured; the main process alone has any."""

from dpframe.loggers.base import Logger
from dpframe.loggers.guarded import Guarded

__all__ = ["Guarded", "Logger"]
