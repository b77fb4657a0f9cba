"""Which rank this process is, by its environment; and how it may start more of them."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from dpframe.errors import UserError

SAFE_PATH, MARK = "PYTHONSAFEPATH", "dpframe"


def _native_threads() -> int:
    """Those that Python did not start."""
    if sys.platform != "linux":
        return 0
    return len(os.listdir("/proc/self/task")) - (threading.active_count() - 1)


# What importing torch and NumPy started: idle, and made to survive a fork. More than these are
# the pools of a process that has computed something, and those do not survive one.
NATIVE_THREADS = _native_threads()


HERE = "127.0.0.1"  # where the ranks that we start find each other, and nobody else finds them


class Rank(NamedTuple):
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def is_rank() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def are_several() -> bool:
    """Whether torchrun, say, started this process as one of several."""
    return is_rank() and os.environ["WORLD_SIZE"] not in ("", "0", "1")


def this_rank() -> Rank:
    """What torchrun and our own supervisor put into the environment, checked."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {name: os.environ.get(name, "") for name in names}
    given["LOCAL_RANK"] = given["LOCAL_RANK"] or given["RANK"]
    given["LOCAL_WORLD_SIZE"] = given["LOCAL_WORLD_SIZE"] or given["WORLD_SIZE"]
    shown = " ".join(f"{name}={value or '(unset)'}" for name, value in given.items())
    if not all(value.isdigit() for value in given.values()):
        raise UserError(
            f"strategy=ddp was not launched and finds {shown}; start this program by torchrun "
            "--nproc-per-node=N, or use the command, dpframe … strategy=ddp"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(f"the environment has {shown} but no {name}; use torchrun, or unset it")
    here = Rank(*(int(given[name]) for name in names))
    if not (here.rank < here.world_size and here.local_rank < here.local_world_size):
        raise UserError(f"the environment contradicts itself: {shown}; unset it or use torchrun")
    return here


def store_of_agent() -> str:
    """The address of the store that outlives a process group; '': there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun would give a rank; the store is the parent's, at any free port."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "ROLE_WORLD_SIZE": count,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    words = {"MASTER_ADDR": HERE, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if sys.platform == "linux":  # gloo and NCCL would listen where others can reach this machine
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            words[name] = os.environ.get(name, "lo")
    return {name: str(number) for name, number in numbers.items()} | words


def _fork_is_safe() -> bool:
    """A child of a process with other threads inherits locks that nobody will ever release."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    return _native_threads() <= min(NATIVE_THREADS, os.cpu_count() or 1)


def start_method(*, uses_cuda: bool) -> str:
    return "fork" if _fork_is_safe() and not uses_cuda else "spawn"


@contextmanager
def safe_path() -> Iterator[None]:
    """A spawned process begins as `python -c`, with the current directory first: a ./pickle.py
    there would run before it has its parent's path."""
    if SAFE_PATH in os.environ:
        yield
        return
    os.environ[SAFE_PATH] = MARK
    try:
        yield
    finally:
        del os.environ[SAFE_PATH]


def forget_safe_path() -> None:
    """In the child: what it starts itself is not ours."""
    if os.environ.get(SAFE_PATH) == MARK:
        del os.environ[SAFE_PATH]
