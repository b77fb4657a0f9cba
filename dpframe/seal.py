"""A seal at a checkpoint's end: the hash of all that is before it, as the comment of its zip file.

Every zip reader skips a comment, so torch and others read a sealed file as any other.
"""

import hashlib
import os
import pickletools
import zipfile
from pathlib import Path
from typing import BinaryIO

MARK = b"dpframe sha256 "
LENGTH = len(MARK) + 64
HEAD = LENGTH.to_bytes(2, "little") + MARK  # a zip file without a comment ends with its length, 0
BLOCK = 1 << 20


class Sealing:
    """A file to write to once from start to end; `close` adds the seal."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.seek(-2, os.SEEK_END)
        self._file.write(HEAD + self._hash.hexdigest().encode())
        self._file.flush()


def flaw(path: Path) -> str:
    """What is wrong with a sealed file, or '' if it is as it was written."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size < LENGTH + 2:
                return "it is empty" if size == 0 else "it is cut short, or no checkpoint"
            file.seek(-LENGTH - 2, os.SEEK_END)
            seal = file.read()
            if not seal.startswith(HEAD):
                return "its seal is missing: it is cut short, or no checkpoint of dpframe's"
            found = _hash_before(file, size - LENGTH - 2)
    except OSError as error:
        return error.strerror or str(error)
    return "" if seal == HEAD + found.encode() else "it is damaged: its hash is another one"


def newest_good(directory: Path, *, but: Path | None = None) -> Path | None:
    """The checkpoint that was written last, of those that are whole.

    Copying a run gives its files new times, in any order: a file that looks newer than `last.ckpt`
    is taken in its place only if it has more steps, as after a kill between the two.
    """
    found = sorted((path for path in directory.glob("*.ckpt") if path != but), key=_age)
    good = next((path for path in found if not flaw(path)), None)
    last = directory / "last.ckpt"
    if good in (None, last) or last not in found or flaw(last):
        return good
    return good if step_of(good) > step_of(last) else last


def written_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # a link to nowhere, or removed since it was listed
        return 0


def instead_of(path: Path) -> str:
    """To end an error about a bad checkpoint with."""
    good = newest_good(path.parent, but=path)
    return f"; the newest good one there is {good}" if good else "; there is no good one beside it"


def step_of(path: Path) -> int:
    """Read without torch, which is not imported yet, and without running what is in the file."""
    with zipfile.ZipFile(path) as file:
        name = next(name for name in file.namelist() if name.endswith("/data.pkl"))
        codes = pickletools.genops(file.read(name))
        values = [value for code, value, _ in codes if "PUT" not in code.name]
    step = values[values.index("global_step") + 1] if "global_step" in values else None
    return step if isinstance(step, int) else -1


def _age(path: Path) -> tuple[int, bool, bool]:
    """Of files of one moment, `last` and `best` are named first."""
    return -written_at(path), path.name != "last.ckpt", path.name != "best.ckpt"


def _hash_before(file: BinaryIO, end: int) -> str:
    """Of the content as it was hashed: with the two bytes that the seal's length has taken."""
    found, left = hashlib.sha256(), end
    file.seek(0)
    while left:
        block = file.read(min(left, BLOCK))
        if not block:
            raise OSError(0, "it is cut short")
        found.update(block)
        left -= len(block)
    found.update(b"\0\0")
    return found.hexdigest()
