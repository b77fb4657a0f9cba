"""A checkpoint's seal: the SHA-256 of what is before it and the step, as the zip file's comment.

Every zip reader skips a comment, so torch and others read a sealed file like any other. Nothing
here imports torch: the checkpoint to resume from is chosen before torch is there.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import BinaryIO, NamedTuple

# The length of the comment, then the comment. Earlier versions wrote no step.
SEAL = re.compile(rb"(..)(dpframe sha256 ([0-9a-f]{64})((?: step \d{1,20})?))\Z", re.DOTALL)
LONGEST = 128  # bytes of a seal
BLOCK = 1 << 20


class Sealing:
    """A binary file that is written once from start to end; `close` adds the seal."""

    def __init__(self, file: BinaryIO, *, step: int | None = None) -> None:
        self._file = file
        self._step = b"" if step is None else b" step %d" % step
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._hash.update(self._step)
        comment = b"dpframe sha256 " + self._hash.hexdigest().encode() + self._step
        self._file.seek(-2, os.SEEK_END)  # a zip file without a comment ends with its length, 0
        self._file.write(len(comment).to_bytes(2, "little") + comment)
        self._file.flush()


def flaw(path: Path) -> str:
    """What is wrong with a sealed file, or '' if it is as it was written."""
    if not path.is_file():  # e.g. a pipe that nobody writes into
        return "it is no file"
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return "it is empty"
            seal = _seal(file)
            if seal is None:
                return "its seal is missing: it is cut short, or no checkpoint of dpframe's"
            return "" if _hash(file, seal) == seal.hash else "it is damaged: its hash is different"
    except OSError as error:
        return error.strerror or str(error)


def step_of(path: Path) -> int:
    """The optimizer updates of a checkpoint; -1 where it does not tell."""
    with path.open("rb") as file:
        seal = _seal(file)
    return int(seal.step.split()[1]) if seal is not None and seal.step else -1


def newest_good(directory: Path, *, but: Path | None = None) -> Path | None:
    """The checkpoint that was written last, of those that are whole.

    Copying a run gives its files new times, in any order: a file that looks newer than `last.ckpt`
    is taken in its place only if it has more steps, e.g. after a kill between the two.
    """
    paths = sorted((path for path in directory.glob("*.ckpt") if path != but), key=_age)
    good = next((path for path in paths if not flaw(path)), None)
    last = directory / "last.ckpt"
    if good in (None, last) or last not in paths or flaw(last):
        return good
    return good if step_of(good) > step_of(last) else last


def instead_of(path: Path) -> str:
    """The end of an error about a bad checkpoint."""
    good = newest_good(path.parent, but=path)
    return f"; the newest good one there is {good}" if good else "; there is no good one beside it"


def written_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # a link to nowhere, or removed since it was listed
        return 0


def _age(path: Path) -> tuple[int, bool, bool]:
    """Of files of one moment, `last` and `best` come first."""
    return -written_at(path), path.name != "last.ckpt", path.name != "best.ckpt"


class _Seal(NamedTuple):
    begin: int  # where the file goes over into it
    hash: bytes
    step: bytes  # e.g. b" step 40"


def _seal(file: BinaryIO) -> _Seal | None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LONGEST))
    match = SEAL.search(file.read())
    if match is None or int.from_bytes(match[1], "little") != len(match[2]):
        return None
    return _Seal(size - len(match[0]), match[3], match[4])


def _hash(file: BinaryIO, seal: _Seal) -> bytes:
    """Of what `Sealing` hashed: there the length of the comment was still 0."""
    hashed, left = hashlib.sha256(), seal.begin
    file.seek(0)
    while left and (block := file.read(min(left, BLOCK))):
        hashed.update(block)
        left -= len(block)
    hashed.update(b"\0\0" + seal.step)
    return hashed.hexdigest().encode()
