"""An error's traceback as it is printed: it begins at the user's code, and folds dpframe's frames.

A bug of dpframe's keeps all frames. So does run.log, and HYDRA_FULL_ERROR=1 shows them on screen.
"""

import os
import sysconfig
import traceback
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

HOUSE = str(Path(__file__).parent) + os.sep
RECIPES = os.path.join(HOUSE, "recipes", "")  # of an installed dpframe: they are like the user's
STDLIB = sysconfig.get_path("stdlib") + os.sep
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def whole(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def shown(error: BaseException) -> str:
    trace = traceback.TracebackException.from_exception(error)
    if os.environ.get("HYDRA_FULL_ERROR") != "1" and _is_raised_by_user(trace.stack):
        _fold(trace)
    return "".join(trace.format()).rstrip()


def last_lines(error: BaseException) -> str:
    """The error's type and text, without notes."""
    trace = traceback.TracebackException.from_exception(error)
    trace.__notes__ = None
    return "".join(trace.format_exception_only()).rstrip()


def _fold(trace: traceback.TracebackException) -> None:
    """With the errors that it came of."""
    trace.stack = _Folded(trace.stack)
    for other in (trace.__cause__, trace.__context__, *(trace.exceptions or ())):
        if other is not None:
            _fold(other)


class _Folded(traceback.StackSummary):
    """A line stands for frames of dpframe's, and one for all up to the first of the user's."""

    def format(self, **options: Any) -> list[str]:
        if not _is_raised_by_user(self):
            return super().format(**options)
        first = next(index for index, frame in enumerate(self) if _is_users(frame))
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


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(HOUSE) and not frame.filename.startswith(RECIPES)


def _is_users(frame: traceback.FrameSummary) -> bool:
    """Neither dpframe's nor of an installed package or Python."""
    path = frame.filename
    if path.startswith(HOUSE):
        return path.startswith(RECIPES)
    return not (path.startswith(("<frozen", STDLIB)) or any(part in path for part in INSTALLED))
