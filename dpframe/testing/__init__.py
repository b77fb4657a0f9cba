"""The conformance kit: whether a strategy changes numbers, loses rows or leaves things behind.

In a plugin's own tests:

    from dpframe.testing import check_strategy

    def test_my_strategy_keeps_the_numbers():
        check_strategy(MyStrategy, gpus=2, accelerator="cpu")

At the command line: `python -m dpframe mode=verify recipe=boston strategy=ddp trainer.gpus=2`.

How it works: `verification` launches `measure` by the strategy. Each process trains the courses
of `course` and notes what it sees in a file. `evidence` is these notes, beside what `reference`
gives in plain torch; `checks` judge it by `distance`.
"""

from dpframe.testing.course import Recipe
from dpframe.testing.evidence import Finding
from dpframe.testing.verification import Verdict, check_strategy, verify

__all__ = ["Finding", "Recipe", "Verdict", "check_strategy", "verify"]
