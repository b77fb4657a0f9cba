"""What a process has beside its work: children, threads, open ports, a process group."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_SECONDS = 2.0  # for what is on its way out
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
PROC = Path("/proc")


class Leftovers:
    """Remembers what there is when made; `found` says what has come since and stays."""

    def __init__(self, *, with_ports: bool) -> None:
        self.with_ports = with_ports
        self.before = self._present()

    def found(self) -> list[str]:
        deadline = time.monotonic() + GRACE_SECONDS
        while (new := sorted(self._present() - self.before)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return new

    def _present(self) -> set[str]:
        ports = _listened_at() if self.with_ports else ()
        return {*_present(), *(f"port {port}" for port in ports)}


def _present() -> Iterator[str]:
    yield from (_described(pid) for pid in _descendants())
    yield from (f"thread {thread.name}" for thread in threading.enumerate())
    yield from (f"environment variable {n}" for n in RANK_VARIABLES if n in os.environ)
    distributed = sys.modules.get("torch.distributed")  # nobody imported it: nobody used it
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        yield "process group"


def _descendants() -> Iterator[int]:
    """The living processes below this one, but for multiprocessing's own lasting helpers."""
    parents = dict(_parents())
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        is_below = above == os.getpid() and pid != os.getpid()
        if is_below and not any(own in _command(pid) for own in ("resource_tracker", "forkserver")):
            yield pid


def _parents() -> Iterator[tuple[int, int]]:
    for entry in PROC.glob("[0-9]*"):  # none elsewhere than on Linux
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended while we looked
        if state != "Z":
            yield int(entry.name), int(parent)


def _described(pid: int) -> str:
    return f"process {pid}: {_command(pid)}"


def _command(pid: int) -> str:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:80]


def _listened_at() -> Iterator[int]:
    """The TCP ports that this process listens at."""
    own = set(_sockets())
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "self/net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                yield int(fields[1].rpartition(":")[2], 16)


def _sockets() -> Iterator[str]:
    for entry in PROC.glob("self/fd/*"):
        try:
            yield os.readlink(entry)
        except OSError:
            continue  # the one that lists them
