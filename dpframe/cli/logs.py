"""`run.log` has every rank's lines with their rank; the screen shows the main one's."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dpframe.errors import printable


@contextmanager
def logging_to(directory: Path, *, rank: int) -> Iterator[None]:
    """Sends what is logged, here and by user code, to the run's file and the main one's screen."""
    root = logging.getLogger()
    before = root.level
    handlers = [_file(directory / "run.log", rank)] + ([_screen()] if rank == 0 else [])
    root.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def _file(path: Path, rank: int) -> logging.Handler:
    # Opened to append: the lines of the ranks interleave.
    handler = _File(path, delay=True, encoding="utf-8", errors="replace")
    form = f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(_EachLine(form))
    return handler


class _EachLine(logging.Formatter):
    """Says of each line of a message whose it is: those of other ranks come between them."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        start = super().formatMessage(record).removesuffix(record.message)
        return start + _shown(record, record.message).replace("\n", f"\n{start}")


class _File(logging.FileHandler):
    """A full disk costs the run its log, and one line on the screen."""

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
    """A record may say `extra={"on_screen": False}`: it is drawn there in another way."""
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(lambda record: getattr(record, "on_screen", True))
    handler.setFormatter(_Plain())
    return handler


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = _shown(record, super().format(record))
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def _shown(record: logging.LogRecord, text: str) -> str:
    """Ours may quote a file; what others log may have colours."""
    return printable(text) if record.name.partition(".")[0] == "dpframe" else text
