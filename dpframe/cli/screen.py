"""The standard streams: there from the start, and never the reason why a run ends."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def open_all() -> None:
    """A closed stream becomes /dev/null, lest the next file to be opened takes its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal shows a ? for our …


def let_go() -> None:
    """What is still to be printed goes nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


@contextmanager
def goes_on_unread() -> Iterator[None]:
    """Inside, a pipe's reader that leaves and a full disk cost the run its screen, no more."""
    stream = sys.stdout
    sys.stdout = _Unread(stream)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout = stream


class _Unread:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            let_go()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            let_go()
