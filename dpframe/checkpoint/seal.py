"""The seal of a checkpoint: a checksum that shows which file is the newest undamaged one.

A seal is the SHA-256 of what is before it and the step, as the zip file's comment. Every zip reader
skips a comment, so torch and others read a sealed file like any other. Nothing here imports torch:
the checkpoint to resume from is chosen before torch is there.

A sharded checkpoint is a sealed file and a folder beside it, with the files that ranks have written
and a list of them. The seal names the folder and has the list's hash; the list has the files'.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

# The length of the comment, then the comment; weights alone have no step.
SEAL = re.compile(
    rb"(..)(dpframe sha256 ([0-9a-f]{64})"
    rb"((?: step (\d{1,20}))?(?: parts (step\d{1,20}-[0-9a-f]{1,20}\.parts) ([0-9a-f]{64}))?))\Z",
    re.DOTALL,
)
LONGEST = 256  # bytes of a seal
SETTLED = 2_000_000_000  # ns after which a change of a file shows in its time on every file system
BLOCK = 1 << 20
MANIFEST = "parts.json"
UNSEALED = "it has no checksum: truncated, or not written by dpframe"
DAMAGED = "damaged: its hash is different"
STRANGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a list of parts may raise that no save has written."""


class Damaged(Exception):
    """What is wrong with a list of parts."""


class Parts(NamedTuple):
    """The folder of a sharded checkpoint's parts, and the hash of their list."""

    name: str
    hash: str


def add(file: BinaryIO, *, step: int | None = None, parts: Parts | None = None) -> None:
    """Adds it to a zip file without a comment, which ends with the comment's length, 0."""
    facts = b"" if step is None else b" step %d" % step
    facts += b"" if parts is None else f" parts {parts.name} {parts.hash}".encode()
    comment = b"dpframe sha256 " + _hash(file, file.seek(0, os.SEEK_END), facts) + facts
    file.seek(-2, os.SEEK_END)
    file.write(len(comment).to_bytes(2, "little") + comment)


def damage(path: Path, *, reads_parts: bool = True) -> str:
    """What is wrong with a sealed file, or '' if it and its parts are as they were written."""
    if not path.is_file():  # e.g. a pipe that nobody writes into
        return "it is no file"
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return "it is empty"
            sealed = _parse_seal(file)
            if sealed is None:
                return UNSEALED
            sealed_hash = partial(_hash, file, sealed.begin, b"\0\0" + sealed.facts)
            if _once(file, sealed_hash) != sealed.hash:
                return f"it is {DAMAGED}"
    except OSError as error:
        return error.strerror or str(error)
    if sealed.parts is None:
        return ""
    return _damage_of_parts(
        path.parent / sealed.parts.name, sealed.parts.hash, reads_all=reads_parts
    )


def _damage_of_parts(folder: Path, hash: str, *, reads_all: bool) -> str:
    if not folder.is_dir():
        return f"its folder {folder.name} is missing, which belongs beside it"
    if damage := damage_of_part(folder / MANIFEST, hash):
        return damage
    try:
        hashes = hashes_of(folder)
    except Damaged as error:
        return str(error)
    damages = (damage_of_part(folder / name, wanted) for name, wanted in hashes.items())
    return next(filter(None, damages), "") if reads_all else ""


def hashes_of(folder: Path) -> dict[str, str]:
    """The files of a sharded checkpoint and their hashes, from its list."""
    name = f"{folder.name}/{MANIFEST}"
    try:
        hashes = json.loads((folder / MANIFEST).read_bytes()).get("files")
    except STRANGE:
        hashes = None
    if not isinstance(hashes, dict) or any(Path(part).name != part for part in hashes):
        raise Damaged(f"{name} is no list of files that dpframe writes")
    return hashes


def damage_of_part(path: Path, hash: str) -> str:
    name = f"{path.parent.name}/{path.name}"
    try:
        return "" if digest_of(path) == hash else f"{name} is {DAMAGED}"
    except OSError as error:
        return f"{name}: {error.strerror or error}"


def digest_of(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise OSError("it is no file")  # a pipe that nobody writes into, or a device without end
    with path.open("rb") as file:
        return _once(file, lambda: hashlib.file_digest(file, "sha256").hexdigest())


def digest(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()


def step_of(path: Path) -> int:
    """The optimizer updates of a checkpoint; -1 where it does not tell."""
    sealed = _read_seal(path)
    return -1 if sealed is None else sealed.step


def parts_of(path: Path) -> Parts | None:
    """The parts that it names, if it is a sharded checkpoint."""
    sealed = _read_seal(path)
    return None if sealed is None else sealed.parts


def remove_parts(folder: Path, names: Iterable[str] | None = None) -> None:
    """Removes folders of parts, of `names` or of all, that no checkpoint in `folder` names."""
    found = [path.name for path in folder.glob("step*-*.parts")] if names is None else names
    needed = {parts.name for path in folder.glob("*.ckpt") if (parts := parts_of(path))}
    for name in {*found} - needed:
        shutil.rmtree(folder / name, ignore_errors=True)


def newest_good(directory: Path, *, but: Path | None = None) -> Path | None:
    """The checkpoint that was written last, of those that are whole.

    Copying a run gives its files new times, in any order: a file that looks newer than `last.ckpt`
    is taken in its place only if it has more steps, e.g. after a kill between the two. Without a
    whole `last.ckpt` the one of the most steps is taken.
    """
    # Of files of one moment, `last` and `best` come first.
    names = ["best.ckpt", "last.ckpt"]
    age = lambda path: (time_of(path), path.name in names, path.name == "last.ckpt")  # noqa: E731
    paths = sorted((path for path in directory.glob("*.ckpt") if path != but), key=age)
    last = directory / "last.ckpt"
    has_last = last in paths and not damage(last)
    if not has_last:
        paths.sort(key=step_of)
    for path in reversed(paths):
        if has_last and path == last:
            return last
        if not damage(path):
            return path if not has_last or step_of(path) > step_of(last) else last
    return None


def newest_of_run(directory: str | Path) -> Path | None:
    """None without a directory, too."""
    return newest_good(Path(directory) / "checkpoints") if directory else None


def instead_of(path: Path) -> str:
    """The end of an error about a bad checkpoint."""
    good = newest_good(path.parent, but=path)
    return f"; the newest good one there is {good}" if good else "; there is no good one beside it"


def time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # a link to nowhere, or removed since it was listed
        return 0


_hashes: dict[tuple[int, ...], Any] = {}  # of files as they are, also for ranks that are forked


def _once(file: BinaryIO, call: Callable[[], Any]) -> Any:
    """A file's hash, computed again only if the file has changed."""
    is_now = os.fstat(file.fileno())
    key = (is_now.st_dev, is_now.st_ino, is_now.st_size, is_now.st_mtime_ns, is_now.st_ctime_ns)
    if key not in _hashes:
        found = call()
        if time.time_ns() - is_now.st_ctime_ns < SETTLED:
            return found
        _hashes[key] = found
    return _hashes[key]


class _Seal(NamedTuple):
    begin: int  # where the file goes over into it
    hash: bytes
    facts: bytes  # e.g. b" step 40"
    step: int  # -1: it does not tell
    parts: Parts | None


def _read_seal(path: Path) -> _Seal | None:
    if not path.is_file():  # it is gone, or a pipe that nobody writes into
        return None
    try:
        with path.open("rb") as file:
            return _parse_seal(file)
    except OSError:
        return None


def _parse_seal(file: BinaryIO) -> _Seal | None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LONGEST))
    match = SEAL.search(file.read())
    if match is None or int.from_bytes(match[1], "little") != len(match[2]):
        return None
    step = -1 if match[5] is None else int(match[5])
    parts = None if match[6] is None else Parts(match[6].decode(), match[7].decode())
    return _Seal(size - len(match[0]), match[3], match[4], step, parts)


def _hash(file: BinaryIO, end: int, more: bytes) -> bytes:
    """The SHA-256 of the file up to `end`, and of `more`."""
    digest = hashlib.sha256()
    file.seek(0)
    while end and (block := file.read(min(end, BLOCK))):
        digest.update(block)
        end -= len(block)
    digest.update(more)
    return digest.hexdigest().encode()
