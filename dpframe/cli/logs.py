"""`run.log` has the lines of all ranks; the screen shows those of the main process."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dpframe.errors import Interrupted, UserError, printable
from dpframe.strategies import ranks


@contextmanager
def logging_to(directory: Path, *, rank: int) -> Iterator[None]:
    """Sends what dpframe and user code log to the run's file, and of rank 0 to the screen.

    The error that ends the run goes only into the file: the command prints it on the screen last.
    """
    root = logging.getLogger()
    before = root.level
    handlers = [_file(directory / "run.log", f"rank {rank}")] + ([_screen()] if rank == 0 else [])
    root.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        if not ranks.has_parent():  # else it is the parent that appends it
            is_line = isinstance(error, (UserError, Interrupted))
            reason = str(error) if is_line else "".join(traceback.format_exception(error)).rstrip()
            logging.getLogger("dpframe").error("%s", reason, extra={"on_screen": False})
        raise
    finally:
        root.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def append(directory: Path, reason: str) -> None:
    """Appends what ended a job of ranks: its parent knows which of them failed first."""
    handler = _file(directory / "run.log", "parent")
    level = {"levelno": logging.ERROR, "levelname": "ERROR"}
    handler.handle(logging.makeLogRecord({"name": "dpframe", "msg": reason, **level}))
    handler.close()


def _file(path: Path, owner: str) -> logging.Handler:
    # Opened to append: the lines of the ranks interleave.
    handler = _File(path, delay=True, encoding="utf-8", errors="replace")
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

    def handleError(self, record: logging.LogRecord) -> None:
        logging.getLogger().removeHandler(self)
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
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(lambda record: getattr(record, "on_screen", True))
    handler.setFormatter(_Plain())
    return handler


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = _shown(record, super().format(record))
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def _shown(record: logging.LogRecord, text: str) -> str:
    """What dpframe logs may quote a file; what others log may have colours."""
    return printable(text) if record.name.partition(".")[0] == "dpframe" else text
