"""What a process has beside its work: children, threads, open ports, a process group."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_SECONDS = 2.0  # for what is about to end
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
HELPERS = ("resource_tracker", "forkserver")  # multiprocessing's own, which stay
PROC = Path("/proc")  # Linux alone has it


class Leftovers:
    """Remembers what there is when made; `new` returns what has come since and stays."""

    def __init__(self, *, with_ports: bool) -> None:
        self.with_ports = with_ports
        self.before = self._present()

    def new(self) -> list[str]:
        deadline = time.monotonic() + GRACE_SECONDS
        while (new := sorted(self._present() - self.before)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return new

    def _present(self) -> set[str]:
        present = {f"process {pid}: {command}" for pid, command in _descendants()}
        present |= {f"thread {thread.name}" for thread in threading.enumerate()}
        present |= {f"environment variable {name}" for name in RANK_VARIABLES if name in os.environ}
        distributed = sys.modules.get("torch.distributed")  # not imported: not used
        if distributed and distributed.is_available() and distributed.is_initialized():
            present.add("process group")
        return present | ({f"port {port}" for port in _ports()} if self.with_ports else set())


def _descendants() -> Iterator[tuple[int, str]]:
    """The living processes below this one, and their command lines."""
    parents: dict[int, int] = {}
    for entry in PROC.glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended in between
        if state != "Z":
            parents[int(entry.name)] = int(parent)
    for pid in parents:
        above = parents[pid]
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid():
            try:
                words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            command = b" ".join(words).decode(errors="replace").strip()[:80]
            if not any(helper in command for helper in HELPERS):
                yield pid, command


def _ports() -> Iterator[int]:
    """The TCP ports that this process listens at."""
    for entry in PROC.glob("self/fd/*"):
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as twin:
                if twin.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    address = twin.getsockname()
                    yield address[1] if isinstance(address, tuple) else address
        except OSError:
            continue  # it was closed in between
