"""What a run prints, which never ends it, and what it logs: of all ranks to run.log."""

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpframe.errors import Failure, Interrupted, UserError, printable
from dpframe.util import traces
from dpframe.util.terminal import coloured


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
    sys.stdout = _Stream(sys.stdout, is_needed=True)  # type: ignore[assignment]
    sys.stderr = _Stream(sys.stderr)  # type: ignore[assignment]


@contextmanager
def goes_on_unread() -> Iterator[None]:
    """Within, output that a closed pipe or a full disk refuses is lost, and the run goes on."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Stream(sys.stdout), _Stream(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before


class _Stream:
    """Loses what can't be printed, and raises then only if the user asked for it: `is_needed`."""

    def __init__(self, stream: Any, *, is_needed: bool = False) -> None:
        self.innermost = getattr(stream, "innermost", stream)
        self._is_needed = is_needed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.innermost, name)

    def write(self, text: str) -> int:
        with self._losing():
            self.innermost.write(text)
        return len(text)

    def flush(self) -> None:
        with self._losing():
            self.innermost.flush()

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.innermost.fileno())
            os.close(null)
            if self._is_needed and isinstance(error, BrokenPipeError):
                raise
            if self._is_needed:
                raise Failure(f"the output can't be written: {error.strerror}") from None


@contextmanager
def logging_to(directory: Path, *, rank: int, logs_error: bool = True) -> Iterator[None]:
    """Sends what dpframe and user code log to the run's file, and of rank 0 to the screen. A
    machine that does not see the directory shows its warnings.

    The error that ends the run goes only into the file: the command prints it on the screen last.
    """
    root = logging.getLogger()
    before = root.level
    handlers = [_file(directory, f"rank {rank}")] + ([_screen()] if rank == 0 else [])
    if rank > 0 and not directory.is_dir():
        handlers = [_screen()]
        handlers[0].setLevel(logging.WARNING)
    root.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        if logs_error:
            is_line = isinstance(error, (UserError, Interrupted))
            reason = str(error) if is_line else traces.whole(error)
            reason = getattr(error, "details", "") + reason
            logging.getLogger("dpframe").error("%s", reason, extra={"on_screen": False})
        raise
    finally:
        root.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def append(directory: Path, reason: str) -> None:
    """Appends what ended a job of ranks: its parent knows which of them failed first."""
    handler = _file(directory, "parent")
    level = {"levelno": logging.ERROR, "levelname": "ERROR"}
    handler.handle(logging.makeLogRecord({"name": "dpframe", "msg": reason, **level}))
    handler.close()


def _file(directory: Path, owner: str) -> logging.Handler:
    # Opened to append: the lines of the ranks interleave.
    handler = _File(directory / "run.log", delay=True, encoding="utf-8", errors="replace")
    form = f"%(asctime)s [{owner}] %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(_EachLine(form))
    return handler


class _EachLine(logging.Formatter):
    """Starts each line of a message with its rank: lines of other ranks come between them."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        start = super().formatMessage(record).removesuffix(record.message)
        return start + _shown(record, record.message).replace("\n", f"\n{start}")


class _File(logging.FileHandler):
    """On a full disk the run goes on without a log, and says so once."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # at the first line, in a directory that was deleted meanwhile
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        self.addFilter(lambda record: False)  # removed, the next handler would miss this record
        logging.getLogger("dpframe").warning(
            "%s can't be written: %s; training goes on without it",
            self.baseFilename,
            sys.exc_info()[1],
        )

    def close(self) -> None:
        with suppress(OSError):  # what could not be written before can't be now
            super().close()


def _screen() -> logging.Handler:
    """Leaves out records with `extra={"on_screen": False}`: the progress bar shows them."""
    handler = _Screen()
    handler.addFilter(lambda record: getattr(record, "on_screen", True))
    handler.setFormatter(_Plain())
    return handler


class _Screen(logging.StreamHandler):
    """Writes to what standard output is at the time: a progress bar puts lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = _shown(record, super().format(record))
        if record.levelno < logging.WARNING:
            return text
        colour = "yellow" if record.levelno == logging.WARNING else "red"
        return f"{coloured(f'{record.levelname.lower()}:', colour)} {text}"


def _shown(record: logging.LogRecord, text: str) -> str:
    """What dpframe logs may quote a file; what others log may have colours."""
    return printable(text) if record.name.partition(".")[0] == "dpframe" else text
