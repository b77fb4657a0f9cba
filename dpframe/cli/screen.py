"""The standard streams: always open, and never the reason why a run ends."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpframe.errors import Failure


def open_all() -> None:
    """Opens closed streams as /dev/null: else the next file that is opened gets their number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal shows a ? for our …
    sys.stdout = _Asked(_innermost(sys.stdout))  # type: ignore[assignment]
    sys.stderr = _Unread(_innermost(sys.stderr))  # type: ignore[assignment]


def _let_go(stream: Any) -> None:
    """Drops what is still to be printed."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def goes_on_unread() -> Iterator[None]:
    """Inside, a closed pipe or a full disk loses what is printed, and the run goes on."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Unread(_innermost(stream)) for stream in before)  # type: ignore
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before


class _Unread:
    """A stream that nobody needs to read."""

    def __init__(self, stream: Any) -> None:
        self.innermost = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.innermost, name)

    def write(self, text: str) -> int:
        try:
            return self.innermost.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self.innermost.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        _let_go(self.innermost)


class _Asked(_Unread):
    """A stream for what the user asked to see: if it can't be printed, the command fails."""

    def _lose(self, error: OSError) -> None:
        super()._lose(error)
        if isinstance(error, BrokenPipeError):
            raise error
        raise Failure(f"the output can't be written: {error.strerror}") from None


def _innermost(stream: Any) -> Any:
    return getattr(stream, "innermost", stream)
