"""A checkpoint at an address, e.g. s3://bucket/best.ckpt, as a file of a cache of this machine."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from dpframe.checkpoint import seal
from dpframe.errors import Failure, UserError
from dpframe.util import files

PROGRAM = Path(__file__).with_name("fetching.py")
HASH = "#sha256="
VERSION = "version.json"  # of what is in a folder of the cache; written last


def local_file(key: str, name: str | os.PathLike[str]) -> Path:
    """The file or folder that a key names, fetched if it is an address."""
    return _fetched(key, str(name)) if files.is_url(name) else files.local_path(key, name)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/dpframe, by default ~/.cache/dpframe."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "dpframe")


@cache  # in one process it stays the same, even if the file at the address does not
def _fetched(key: str, address: str) -> Path:
    """One process of a machine fetches it, unless the cache has this version; the others wait."""
    url, _, hash = address.partition(HASH)
    name = Path(urlsplit(url).path).name
    if not name:
        raise UserError(f"{key}={address} names no file; name a checkpoint, e.g. {url}last.ckpt")
    folder = cache_folder() / seal.digest(url.encode())[:32]
    file = folder / name
    with files.locked(folder / files.LOCK):
        files.remove_leftovers(folder)
        if not (hash and file.is_file() and seal.digest_of(file) == hash):
            _fetch(key, url, file)
            if hash and (found := seal.digest_of(file)) != hash:
                raise UserError(f"{key}={address}: its sha256 is {found}; fix one of them")
    return file


def _fetch(key: str, url: str, file: Path) -> None:
    note, part = file.with_name(VERSION), file.with_name(f".{file.name}.{os.getpid()}.part")
    known = note.read_text(encoding="utf-8") if note.is_file() and file.is_file() else None
    try:
        version = _run(key, [(url, part)], known)
        if not part.exists():  # it is as it was
            return
        _fetch_parts(key, url, part)
        damage = seal.damage(part)
        if damage not in ("", seal.UNSEALED):  # another program's has no seal
            raise Failure(f"{key}={url}: {damage}")
        note.unlink(missing_ok=True)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
        seal.remove_parts(file.parent)
    if version is not None:
        files.write_text(note, version)


def _fetch_parts(key: str, url: str, file: Path) -> None:
    """Those of a sharded checkpoint: a list of files, and these."""
    if (parts := seal.parts_of(file)) is None:
        return
    folder, base = file.parent / parts.name, f"{url.rpartition('/')[0]}/{parts.name}"
    folder.mkdir(exist_ok=True)
    _run(key, [(f"{base}/{seal.MANIFEST}", folder / seal.MANIFEST)])
    with suppress(seal.Damaged):  # which is told with what else is wrong
        names = seal.hashes_of(folder)
        _run(key, [(f"{base}/{name}", folder / name) for name in names])


def _run(key: str, pairs: list[tuple[str, Path]], known: str | None = None) -> str | None:
    """Copies the files, and returns the version of the first."""
    given = json.dumps([[(url, str(file)) for url, file in pairs], known])
    command = [sys.executable, "-P", str(PROGRAM)]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True)
    try:
        told = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        told = {"error": f"to fetch it ended with exit code {done.returncode}"}
    if "error" in told:
        kind = UserError if told.get("is_mistake") else Failure
        raise kind(f"{key}={pairs[0][0]}: {' '.join(told['error'].split())}")
    return told["version"]
