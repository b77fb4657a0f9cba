"""An error's traceback as it is printed: it begins at the user's code, and folds dpframe's frames.

A bug of dpframe's keeps all frames. So does run.log, and HYDRA_FULL_ERROR=1 shows them on screen.
"""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

HOUSE = str(Path(__file__).parent.parent) + os.sep
RECIPES = os.path.join(HOUSE, "recipes", "")  # of an installed dpframe: they are like the user's
STDLIB = sysconfig.get_path("stdlib") + os.sep
AUTOGRAD = os.path.join("torch", "autograd", "")
ORIGINAL = "Original Traceback (most recent call last):\n"  # in torch's message of a data worker's
FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)\n(?:    .*\n)*')
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def whole(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def shown(error: BaseException) -> str:
    trace = traceback.TracebackException.from_exception(error)
    there = str(error).partition(ORIGINAL)[2].rstrip()
    found = [*FRAME.finditer(there)]
    frames = [traceback.FrameSummary(at[1], int(at[2]), at[3]) for at in found]
    is_users = any(map(_is_raised_by_user, (trace.stack, frames))) or _is_of_autograd(trace.stack)
    if os.environ.get("HYDRA_FULL_ERROR") == "1" or not is_users:
        return whole(error)
    _fold(trace)
    text = "".join(trace.format()).rstrip()
    if not frames:
        return text
    return text.replace(there, "".join(_Folded(frames).format()) + there[found[-1].end() :])


def last_lines(error: BaseException) -> str:
    """The error's type and text, without notes."""
    trace = traceback.TracebackException.from_exception(error)
    trace.__notes__ = None
    return "".join(trace.format_exception_only()).rstrip()


def _fold(trace: traceback.TracebackException, *, is_users: bool = True) -> None:
    """With those of the errors that it came of that are the user's, too."""
    if is_users:
        trace.stack = _Folded(trace.stack)
    for other in (trace.__cause__, trace.__context__, *(trace.exceptions or ())):
        if other is not None:
            _fold(other, is_users=_is_raised_by_user(other.stack))


class _Folded(traceback.StackSummary):
    """A line stands for frames of dpframe's, and one for all up to the first of the user's."""

    def format(self, **options: Any) -> list[str]:
        first = next((index for index, frame in enumerate(self) if _is_users(frame)), len(self))
        how = " (HYDRA_FULL_ERROR=1 shows them)"
        lines = [_line(first, how)] * bool(first)
        for is_ours, frames in groupby(self[first:], _is_ours):
            part = traceback.StackSummary(frames)
            lines += [_line(len(part))] if is_ours else part.format(**options)
        return lines


def _line(count: int, how: str = "") -> str:
    return f"  … {count} frame{'s' * (count > 1)} of dpframe{how}\n"


def _is_raised_by_user(frames: Iterable[traceback.FrameSummary]) -> bool:
    """Whether the innermost frame that is not a library's is the user's."""
    owners = [_is_users(frame) for frame in frames if _is_users(frame) or _is_ours(frame)]
    return bool(owners) and owners[-1]


def _is_of_autograd(frames: list[traceback.FrameSummary]) -> bool:
    """Whether a backward has failed: it runs what the user's steps have computed."""
    return bool(frames) and AUTOGRAD in frames[-1].filename


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(HOUSE) and not frame.filename.startswith(RECIPES)


def _is_users(frame: traceback.FrameSummary) -> bool:
    """Neither dpframe's nor of an installed package or Python."""
    path = frame.filename
    if path.startswith(HOUSE):
        return path.startswith(RECIPES)
    return not (path.startswith(("<frozen", STDLIB)) or any(part in path for part in INSTALLED))
