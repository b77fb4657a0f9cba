"""What hooks log has to be the same in all processes, before anything is decided by it."""

import pytest

from dpframe import UserError
from dpframe.strategies.collectives import Collectives
from dpframe.trainer.hooks import LogCheck


class Two(Collectives):
    """Rank 0 of two processes, of which the other's numbers are these."""

    world_size = 2

    def __init__(self, other: LogCheck | None = None) -> None:
        self.other = other
        self.own: list[float] = []

    def sum_numbers(self, numbers: list[float]) -> list[float]:
        self.own = numbers
        if self.other is None:
            raise LookupError
        return [a + b for a, b in zip(numbers, numbers_of(self.other), strict=True)]


def numbers_of(check: LogCheck) -> list[float]:
    with pytest.raises(LookupError):
        check.on_validation_end()
    return check._collectives.own  # type: ignore[attr-defined]


def checked(mine: dict[str, float], theirs: dict[str, float]) -> None:
    other = LogCheck(Two())
    other.add(theirs)
    check = LogCheck(Two(other))
    check.add(mine)
    check.on_validation_end()


def test_the_same_numbers_pass_but_for_their_last_digits():
    checked({"val/f1": 0.5, "val/b": float("nan")}, {"val/f1": 0.5 + 1e-9, "val/b": float("nan")})


@pytest.mark.parametrize("theirs", [{"val/f1": 0.6}, {"val/f2": 0.5}, {}])
def test_another_number_name_or_none_is_refused_with_what_was_logged(theirs):
    with pytest.raises(UserError, match=r"trainer\.log got val/f1=0\.5 on rank 0, and something"):
        checked({"val/f1": 0.5}, theirs)
