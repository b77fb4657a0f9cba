"""Files that are written whole or not at all: beside their target, then renamed over it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """The file to write to: where that fails, or the process is killed, `path` is as it was."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def sweep(directory: Path) -> None:
    """Removes what killed processes left half-written."""
    for part in directory.glob(".*.[0-9]*.part"):
        part.unlink(missing_ok=True)
