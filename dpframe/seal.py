"""A seal at a checkpoint's end: the hash of all that is before it, as the comment of its zip file.

Every zip reader skips a comment, so torch and others read a sealed file as any other.
"""

import hashlib
import os
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

MARK = b"dpframe sha256 "
LENGTH = len(MARK) + 64
HEAD = LENGTH.to_bytes(2, "little") + MARK  # a zip file without a comment ends with its length, 0
BLOCK = 1 << 20
LATIN = ("text", "latin1")  # how torch writes bytes
END = struct.Struct("<4sQ2H2L4Q 4sLQL 4s4H2L")  # the three records that torch ends a zip file with


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
    if not path.is_file():  # a pipe, say, that nobody writes into
        return "it is no file"
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
            if seal != HEAD + found.encode():
                return "it is damaged: its hash is another one"
            return _bomb(file, size)
    except OSError as error:
        return error.strerror or str(error)


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


def _bomb(file: BinaryIO, size: int) -> str:
    """Anybody can seal a file: one that takes up more memory than its size is not unpacked."""
    file.seek(0)
    begins_as_torchs = file.read(4) == b"PK\3\4"  # else torch reads it as its older format
    at = size - LENGTH - 2 - END.size
    file.seek(max(0, at))
    values = END.unpack(file.read(END.size)) if at > 0 else (b"",) * 20
    (length, start), locator = values[8:10], values[10:14]
    # Else another reader might see other entries than those that are checked here.
    is_torchs = values[0] == b"PK\6\6" and locator == (b"PK\6\7", 0, at, 1)
    if not begins_as_torchs or not is_torchs or length + start != at:
        return "it is no zip file as torch writes them"
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(
                entry.compress_type or entry.file_size != entry.compress_size for entry in entries
            ):
                return "it has compressed entries, which torch never writes"
            pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or sum(entry.file_size for entry in entries) > size:
                return "its entries are not those that torch writes"
            pickle = archive.read(pickles[0])
            # Makes as many bytes as it is told to.
            if b"\nbytearray\n" in pickle:
                return "it holds a bytearray, which no checkpoint of dpframe's does"
            if _grows(pickle, size):
                return f"it has more parts than its {size} bytes can hold"
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, IndexError):
        return "it is no zip file as torch writes them"
    return ""


def _grows(pickle: bytes, size: int) -> bool:
    """Whether unpickling could make more than there is: torch hashes a tuple part by part wherever
    it stands again, and `encode`, which it calls for bytes, can double them each time."""
    stack: list[Any] = []  # a number is how many parts there are; else a mark, a name or a text
    memo: dict[Any, Any] = {}
    for code, value, _ in pickletools.genops(pickle):
        if "PUT" in code.name:
            memo[value] = stack[-1]
        elif code.name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo.get(value, 1))
        elif code.name == "MARK":
            stack.append(None)
        elif code.name in ("BINUNICODE", "GLOBAL"):
            stack.append(value)
        else:
            taken = _taken(stack, code)
            if code.name == "REDUCE" and taken[0] == "_codecs encode" and taken[1] != LATIN:
                return True
            is_latin = code.name == "TUPLE2" and isinstance(taken[0], str) and taken[1] == "latin1"
            made = 1 + sum(part if isinstance(part, int) else 1 for part in taken)
            if made > size:
                return True
            stack += [LATIN if is_latin else made for _ in code.stack_after]
    return False


def _taken(stack: list[Any], code: pickletools.OpcodeInfo) -> list[Any]:
    """What an operation takes from the stack."""
    count = len(code.stack_before)
    if pickletools.stackslice in code.stack_before:  # down to the mark, and what is before it
        mark = len(stack) - 1 - stack[::-1].index(None)
        count = len(stack) - mark + code.stack_before.index(pickletools.markobject)
    taken, stack[len(stack) - count :] = stack[len(stack) - count :], []
    return taken


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
