"""Hosts that are made up: namespaces of Linux, each with a name, an address and a disk of its own.

    with hosts(tmp_path, 2) as (a, b):
        with a.started(words) as job: ...

They are held by processes that sleep, so that nothing is left when these are killed.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import forked
from command import environment

NAMESPACES = ("net", "uts", "mnt")
HOLD = """
hostname {name}
mount -t tmpfs tmpfs {folder}/disk
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
echo
exec sleep infinity
"""


@cache
def why_not() -> str:
    """Why this machine makes up no hosts; '': it does."""
    if lacking := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"needs {', '.join(lacking)} (Debian's iproute2 and util-linux)"
    command = ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "x", "type", "bridge"]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"needs root and bridges: {done.stderr.strip()}" if done.returncode else ""


@contextmanager
def hosts(folder: Path, count: int) -> Iterator[list["Host"]]:
    """`node1` has 10.77.0.1, and so on; all have `folder/shared`, and each a `folder/disk`."""
    for name in ("shared", "disk"):
        (folder / name).mkdir(parents=True)
    names = [f"10.77.0.{number} node{number}\n" for number in range(1, count + 1)]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
    with ExitStack() as held:
        switch = held.enter_context(_held("switch", folder))
        _in(switch, "ip link add br0 type bridge", "ip link set br0 up")
        made = []
        for number in range(1, count + 1):
            pid = held.enter_context(_held(f"node{number}", folder))
            _in(
                switch,
                f"ip link add port{number} type veth peer name eth0 netns {pid}",
                f"ip link set port{number} master br0",
                f"ip link set port{number} up",
            )
            _in(pid, f"ip addr add 10.77.0.{number}/24 dev eth0", "ip link set eth0 up")
            made.append(Host(number, pid, switch, folder))
        yield made


class Host:
    def __init__(self, number: int, pid: int, switch: int, folder: Path) -> None:
        self.name, self.address = f"node{number}", f"10.77.0.{number}"
        self.shared = folder / "shared"
        self.local = folder / "disk"  # as the host sees it
        self.disk = Path(f"/proc/{pid}/root{self.local}")
        self._number, self._pid, self._switch = number, pid, switch

    def started(
        self, words: Sequence[str], folder: Path | None = None, **variables: str
    ) -> AbstractContextManager[forked.Job]:
        """`python -m dpframe WORDS` on this host, by default on its own disk."""
        enter = partial(_enter, self._pid)
        return forked.started(words, folder or self.disk, enter=enter, **variables)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Its value there, in a process of its own."""
        return forked.fresh(_called, self._pid, function, args)

    def agent(self, program: Path) -> Path:
        """Writes a program that is called as `ssh HOST COMMAND`, and always comes here."""
        enter = f"nsenter --target={self._pid} --net --uts --mount"
        program.write_text(f'#!/bin/sh\nshift\nexec {enter} sh -c "$*"\n')
        program.chmod(0o755)
        return program

    def run(self, *commands: str) -> list[str]:
        return _in(self._pid, *commands)

    def torchrun(self, *words: str, **variables: str) -> subprocess.Popen:
        """`torchrun WORDS -m dpframe …` on this host, in new interpreters."""
        enter = ["nsenter", f"--target={self._pid}", "--net", "--uts", "--mount"]
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        with open(self.disk / "printed", "a") as out, open(self.disk / "said", "a") as err:
            return subprocess.Popen(
                [*enter, f"--wdns={self.local}", *command],
                env=environment(**variables),
                stdout=out,
                stderr=err,
            )

    def power_off(self) -> None:
        """Kills all that runs on it; its disk stays."""
        own = os.readlink(f"/proc/{self._pid}/ns/net")
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if int(entry.name) != self._pid and os.readlink(entry / "ns/net") == own:
                    os.kill(int(entry.name), signal.SIGKILL)

    def cut(self) -> None:
        """Its cable."""
        _in(self._switch, f"ip link set port{self._number} down")

    def mend(self) -> None:
        _in(self._switch, f"ip link set port{self._number} up")


@contextmanager
def _held(name: str, folder: Path) -> Iterator[int]:
    command = ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-ec"]
    held = subprocess.Popen(
        [*command, HOLD.format(name=name, folder=folder)], stdout=subprocess.PIPE
    )
    assert held.stdout is not None
    try:
        assert held.stdout.readline() == b"\n", f"{name} can't be made up"
        yield held.pid
    finally:
        held.kill()
        held.wait()
        held.stdout.close()


def _in(pid: int, *commands: str) -> list[str]:
    """What they print in that process's namespaces."""
    enter = ["nsenter", "--target", str(pid), "--net", "--uts", "--mount"]
    return [subprocess.check_output([*enter, *each.split()], text=True) for each in commands]


def _called(pid: int, function: Callable[..., Any], args: tuple) -> Any:
    _enter(pid)
    return function(*args)


def _enter(pid: int) -> None:
    """In a process that has one thread."""
    setns: Callable[[int, int], int] = ctypes.CDLL(None, use_errno=True).setns
    files = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    for file in files:
        if setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)
