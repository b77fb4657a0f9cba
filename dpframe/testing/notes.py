"""What every process of a job measures, in a file a process: nothing of the strategy carries it."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIX = ".notes"
Note = dict[str, Any]


def write(directory: Path, name: str, value: Any) -> None:
    """At once, so that it is there even if this process ends in the next moment."""
    with (directory / f"{os.getpid()}{SUFFIX}").open("ab") as file:
        pickle.dump((name, value), file)


def read(directory: Path) -> list[Note]:
    """Each process's values by name, in the order of the ranks."""
    notes = [dict(_values(path)) for path in directory.glob(f"*{SUFFIX}")]
    return sorted(notes, key=lambda note: note.get("facts", {}).get("rank", -1))


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the end, or killed while it wrote
                return
