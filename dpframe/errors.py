"""How a run ends early: a user's mistake, a failure of the machine or the numbers, a signal."""

import signal
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class UserError(Exception):
    """Ends the run with its one line; any exception that is none of these is a bug of ours."""

    exit_code = 2
    told: dict[str, Any] = {}  # where it ended a job of ranks, what they have told their parent


class Failure(UserError):
    """One line too, where no config is wrong: a full disk, a loss that is not a number."""

    exit_code = 1


class Interrupted(BaseException):
    """A signal ends the run, in every process after the same step."""

    def __init__(self, number: int, said: str = "") -> None:
        """`said`: when, and how to go on."""
        super().__init__(f"interrupted by {signal.Signals(number).name}{said}")
        self.number = number
        self.said = said
        self.exit_code = 128 + number


def suggestion(given: str, valid: Iterable[str]) -> str:
    """'did you mean X?', or the list of what there is when nothing is near."""
    names = sorted(set(valid))
    near = get_close_matches(given, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"there is: {', '.join(names)}" if names else "there is none"
