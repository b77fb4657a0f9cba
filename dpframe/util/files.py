"""Paths that keys name, locks, and files that are written whole or not at all; without torch."""

import errno
import json
import logging
import math
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from dpframe.errors import UserError

if sys.platform != "win32":  # which has none
    import fcntl

LOCK = ".lock"  # in a directory that one process at a time writes into
URL = re.compile(r"[A-Za-z][\w+.-]+://")

log = logging.getLogger("dpframe")
CANT_SYNC = {  # what network and FUSE mounts answer that can't sync a file or a directory
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EBADF,
    errno.EACCES,
}


def local_path(key: str, name: str | os.PathLike[str]) -> Path:
    """The file or folder that a key names; `~name` of no user is a name like any other."""
    refuse_url(key, name)
    return Path(os.path.expanduser(name))


def refuse_url(key: str, name: str | os.PathLike[str]) -> None:
    """As a path, `s3://bucket` is the folder `bucket` in one called `s3:`."""
    if URL.match(str(name)):
        raise UserError(
            f"{key}={name} is a URL, and dpframe reads and writes only local files; name a path, "
            "e.g. of a copy or in a mounted folder"
        )


def is_url(name: str | os.PathLike[str]) -> bool:
    return URL.match(str(name)) is not None


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within, this process is the only one that has locked this file, on all machines that see its
    disk; others wait. A process that ends has no lock any more, however it ends. The file is made
    where it is missing, and stays. On Windows nothing is locked."""
    file = local_path("dpframe.locked", path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _no_lock(file, error) from None
    try:
        _lock(descriptor, file)
        yield
    finally:
        _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    """A child that was forked within has the file open, too: to close it would not be enough."""
    if sys.platform != "win32":
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _lock(descriptor: int, file: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        log.warning("waiting for %s, which another process has locked", file)
    except OSError as error:
        raise _no_lock(file, error) from None
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _no_lock(file: Path, error: OSError) -> UserError:
    return UserError(f"{file} can't be locked: {error.strerror}; name a file on another disk")


def claim(directory: Path, what: str, *, instead: str) -> IO[str]:
    """Until the file that this returns is closed, the directory is this process's, and refused to
    others. The kernel closes it when the process ends, however that happens."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("a+")
    except OSError as error:
        raise UserError(f"{what} {directory} can't be made: {error.strerror}; {instead}") from None
    if sys.platform == "win32":
        return file
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            print(
                f"dpframe: the file system of {directory} has no locks ({error.strerror}); make "
                "sure that nothing else writes there",
                file=sys.stderr,
            )
            return file
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise UserError(
            f"{what} {directory} is in use by {owner}; end that first, or {instead}"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def is_claimed(directory: Path) -> bool:
    """Whether a process has the directory now."""
    if sys.platform == "win32":
        return False
    try:
        with (directory / LOCK).open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES)
    return False


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """The file or folder to write to, beside `path`, and then renamed over it: where that fails, or
    the process is killed, `path` is as it was."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        if path.is_dir():  # a folder is only renamed over an empty one
            shutil.rmtree(path)
        part.replace(path)
    finally:
        _remove(part)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all; bytes that are not text stay what they are."""
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")


def json_text(content: Any, indent: int | None = None) -> str:
    """For programs: JSON has no number that is not finite, so that null stands for it."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    return [*map(_finite, content)] if isinstance(content, list | tuple) else content


def json_object(path: Path) -> dict[str, Any]:
    """What a file holds that anybody may have written; {} if that is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def remove_leftovers(directory: Path) -> None:
    """Removes what killed processes left half-written."""
    for part in directory.glob(".*.[0-9]*.part"):
        _remove(part)


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """A file or a directory, where its file system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in CANT_SYNC:
            raise
        _warn_unsynced(path if path.is_dir() else path.parent, error.strerror)


@cache  # once is enough
def _warn_unsynced(directory: Path, why: str) -> None:
    log.warning(
        "the file system of %s can't sync all it writes (%s): its newest checkpoints survive "
        "a killed process, but perhaps not a power cut",
        directory,
        why,
    )
