"""What a check finds, and how numbers are put into words."""

from collections.abc import Iterable
from typing import NamedTuple

TOLERANCE = 1e-12
SHOWN = 6  # numbers of a long list


class Found(NamedTuple):
    """Nothing is wrong where there is no cause."""

    compared: str
    measured: str
    cause: str = ""
    is_void: bool = False  # there was nothing to look at


def counted(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def shown(numbers: Iterable[int], most: int = SHOWN) -> str:
    kept = list(numbers)
    return " ".join(map(str, kept[:most])) + (" …" if len(kept) > most else "")
