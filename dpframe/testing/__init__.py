"""The conformance kit: whether a strategy changes numbers, loses rows or leaves things behind.

In a plugin's own tests:

    from dpframe.testing import check_strategy

    def test_my_strategy_keeps_the_numbers():
        check_strategy(MyStrategy, gpus=2, accelerator="cpu")

At the command line: `python -m dpframe mode=verify recipe=boston strategy=ddp trainer.gpus=2`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpframe.testing.check import check_strategy
    from dpframe.testing.course import Recipe
    from dpframe.testing.report import Finding, Report
    from dpframe.testing.verification import verify

__all__ = ["Finding", "Recipe", "Report", "check_strategy", "verify"]

_HOME = {
    "Finding": "report",
    "Recipe": "course",
    "Report": "report",
    "check_strategy": "check",
    "verify": "verification",
}


def __getattr__(name: str) -> object:  # the command line uses `verify`, which is below it
    if name in _HOME:
        return getattr(importlib.import_module(f"dpframe.testing.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpframe.testing' has no attribute '{name}'")
