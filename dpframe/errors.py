"""How a run ends early: a user's mistake, a failure of the machine or the numbers, a signal."""

import inspect
import math
import os
import re
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

LACKING = "it is one of dpframe's plugins, which this installation lacks; install dpframe again"


class UserError(Exception):
    """Ends the run with one line. Any exception but those of this module is shown as a bug."""

    exit_code = 2
    told: dict[str, Any] = {}  # what the ranks of a job told their parent before it ended
    details = ""  # a traceback, for run.log alone


class Failure(UserError):
    """One line, but not a mistake of the user's, e.g. a full disk or a loss that is NaN."""

    exit_code = 1


class OutOfMemory(Failure):
    """A device or the machine has no memory left."""


class DeviceLost(Failure):
    """A device failed under its process: a new process may go on from the last checkpoint."""


class Interrupted(BaseException):
    """A signal ends the run, in every process after the same step."""

    def __init__(self, number: int, said: str = "") -> None:
        """`said` adds when that was, and how to resume."""
        super().__init__(f"interrupted by {signal.Signals(number).name}{said}")
        self.number = number
        self.said = said
        self.exit_code = 128 + number

    def __reduce__(self) -> tuple:
        return Interrupted, (self.number, self.said)


def exited(error: SystemExit, *, who: str) -> Failure:
    """The failure for a `sys.exit()` in the middle of the work, whatever its code."""
    called = [
        f"{frame.name} ({os.path.basename(frame.filename)}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.endswith("_sitebuiltins.py")  # exit() and quit()
    ]
    code = "" if error.code is None else repr(error.code)
    return Failure(
        f"{who}sys.exit({code}) in {called[-1]} ended it before its work was done; raise an "
        "exception instead"
    )


@contextmanager
def explain_exits() -> Iterator[None]:
    """Turns a `sys.exit()` inside into a failure."""
    try:
        yield
    except SystemExit as error:
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        raise exited(error, who=f"rank {os.environ.get('RANK')}: " if several else "") from None


# Control characters but for the tab and the end of a line; those that turn the writing direction.
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text from a file that can't control the terminal, e.g. hide what was printed."""
    return STEERING.sub(lambda found: repr(found[0])[1:-1], text)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, with the next one where it ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def listed(items: Iterable[object], most: int, between: str = ", ") -> str:
    """The first ones, and how many more there are."""
    texts = list(map(str, items))
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def suggestion(given: str, valid: Iterable[str]) -> str:
    """'did you mean X?', or the list of what there is when nothing is near."""
    names = sorted(set(valid))
    if near := nearest(given, names):
        return f"did you mean {near}?"
    return f"there is: {', '.join(names)}" if names else "there is none"


def not_one_of(
    key: str, value: object, choices: Sequence[str], *, meant: str | None = None
) -> UserError:
    near = meant or nearest(str(value), choices)
    hint = f"; did you mean {near}?" if near else ""
    return UserError(f"{key}={value} is not one of {', '.join(choices)}{hint}")


def metric_of(key: str, name: str, metrics: Mapping[str, float]) -> float:
    """The metric that `key` names. After an epoch whose steps were all left out, there are none
    of training: NaN."""
    if name.startswith("train/") and not any(other.startswith("train/") for other in metrics):
        return math.nan
    if name not in metrics:
        raise unmeasured(key, name, metrics)
    return metrics[name]


def unmeasured(key: str, name: str, metrics: Iterable[str], more: str = "") -> UserError:
    """`more` says where else the metric could come from."""
    return UserError(f"{key}={name} is not measured{more}; {suggestion(name, metrics)}")


def refuse_miscalled(
    owner: object, method: str, /, *called: str, why: str = "", **named: str
) -> None:
    """Where a method of the user's can't take what it is called with, by position and by name."""
    signature = inspect.signature(getattr(owner, method))
    try:
        signature.bind(*called, **named)
    except TypeError:
        takes, passed = ", ".join(signature.parameters), (*called, *named)
        raise UserError(
            f"{type(owner).__name__}.{method} takes ({takes}) and is called with "
            f"({', '.join(passed)}){why}; write {method}({', '.join(('self', *passed))})"
        ) from None


def no_super(kind: type) -> UserError:
    """A class of the user's that is made without the part of it that is ours or torch's."""
    return UserError(f"{kind.__name__}.__init__ has no super().__init__(); call it first")


def nearest(given: str, names: Iterable[str], *, cutoff: float = 0.5) -> str:
    """In any case of letters, and a class before its module: `Sgd` is near `SGD`, not `sgd`."""
    names_by_letters = {name.lower(): name for name in sorted(names, reverse=True)}
    near = get_close_matches(given.lower(), names_by_letters, n=1, cutoff=cutoff)
    return names_by_letters[near[0]] if near else ""
