"""The conformance kit: whether a strategy changes numbers, loses rows or leaves things behind.

In a plugin's own tests:

    from dpframe.testing import check_strategy

    def test_my_strategy_keeps_the_numbers():
        check_strategy(MyStrategy, gpus=2, accelerator="cpu")

At the command line: `python -m dpframe mode=verify recipe=boston strategy=ddp trainer.gpus=2`.
"""

from dpframe.plugins.verify.course import Recipe
from dpframe.plugins.verify.evidence import Finding
from dpframe.plugins.verify.verification import Verdict, check_strategy, verify

__all__ = ["Finding", "Recipe", "Verdict", "check_strategy", "verify"]
