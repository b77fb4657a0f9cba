"""A rank: who it is, as its environment says; what it does first and last; what it tells."""

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from dpframe import heartbeat, interruption
from dpframe.errors import Interrupted, UserError
from dpframe.interruption import SIGNALS, STOP, Interruption

TORCH = f"{os.sep}torch{os.sep}"
SAFE_PATH = "PYTHONSAFEPATH"
SIGNALED = (*SIGNALS, STOP)

_parent: "Parent | None" = None


class Rank(NamedTuple):
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def is_rank() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def are_several() -> bool:
    """Whether this process is one of several, e.g. of torchrun's."""
    return is_rank() and os.environ["WORLD_SIZE"] not in ("", "0", "1")


def this_rank() -> Rank:
    """What torchrun and our own launch put into the environment, checked."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    variables = {name: os.environ.get(name, "") for name in names}
    variables["LOCAL_RANK"] = variables["LOCAL_RANK"] or variables["RANK"]
    variables["LOCAL_WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] or variables["WORLD_SIZE"]
    shown = " ".join(f"{name}={value or '(unset)'}" for name, value in variables.items())
    if not all(value.isdigit() for value in variables.values()):
        raise UserError(
            f"strategy=ddp was not launched and finds {shown}; start this program by torchrun "
            "--nproc-per-node=N, or use the command, dpframe … strategy=ddp"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(f"the environment has {shown} but no {name}; use torchrun, or unset it")
    this = Rank(*(int(variables[name]) for name in names))
    if not (this.rank < this.world_size and this.local_rank < this.local_world_size):
        raise UserError(f"the environment contradicts itself: {shown}; unset it or use torchrun")
    return this


def has_parent() -> bool:
    """Whether another process waits for this rank, and tells how the job has ended."""
    return _parent is not None


def tell(name: str, value: Any) -> None:
    """Sends the parent what it wants to know if the job ends badly."""
    if _parent is not None:
        _parent.send("told", (name, value))


# ---- how it fails


@dataclass
class Fault:
    rank: int
    text: str  # what is shown last
    brief: str  # what is shown of a peer
    line: str | None = None  # a UserError's or a Failure's, alone
    exit_code: int = 1
    is_echo: bool = False  # its peers were gone, or did not come
    is_hang: bool = False
    is_in_users_code: bool = False  # and not in a collective of dpframe's
    time: int = field(default_factory=time.time_ns)


def fault_of(error: BaseException) -> Fault:
    from torch.distributed import DistError

    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return Fault(
        rank=int(os.environ["RANK"]),
        text="".join(traceback.format_exception(error)).rstrip(),
        brief=f"ended after it: {type(error).__name__}: {error}".splitlines()[0],
        line=str(error) if isinstance(error, UserError) else None,
        exit_code=getattr(error, "exit_code", 1),
        is_echo=isinstance(error, DistError) or "gloo/transport" in str(error),
        is_in_users_code=ends_in_users_code(files[::-1]),
    )


def ends_in_users_code(files: list[str]) -> bool:
    """By the innermost frame, which comes first, that is not torch's."""
    rest = [file for file in files if TORCH not in file]
    return bool(rest) and not rest[0].startswith(heartbeat.HOUSE)


# ---- its life


class Parent:
    """The process that started this rank, as the rank sees it."""

    def __init__(self, messages: Connection) -> None:
        self._messages = messages

    def send(self, kind: str, value: Any = None) -> None:
        # Pickled here, by value: multiprocessing would share a tensor's memory, which ends with us.
        self._messages.send_bytes(pickle.dumps((kind, value)))

    @contextmanager
    def watching(self, hang_seconds: float | None) -> Iterator[None]:
        self.send("watch", hang_seconds)
        heartbeat.start()
        try:
            yield
        finally:
            heartbeat.stop()
        self.send("watch", None)

    def pause(self) -> None:
        self.send("paused")
        self._messages.recv_bytes()


def live(
    environment: dict[str, str],
    can_pause: bool,
    messages: Connection,
    pulse: Connection,
    work: bytes | tuple[Callable[..., Any], tuple],
) -> None:
    """The first function of a rank; `work` is pickled for a process that was not forked."""
    global _parent
    interruption.end_with_parent()
    interruption.forget()
    os.environ.pop(SAFE_PATH, None)  # unless it is in the user's environment
    os.environ.update(environment)
    faulthandler.enable()
    heartbeat.connect(pulse.fileno())
    _parent = Parent(messages)
    stop = Interruption(is_quiet=True, parent=_parent)
    stop.open()
    with stop.pauses() if can_pause else nullcontext():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALED)
        code = _outcome(_parent, work)
    sys.exit(code)


def _outcome(parent: Parent, work: bytes | tuple[Callable[..., Any], tuple]) -> int:
    try:
        run, args = pickle.loads(work) if isinstance(work, bytes) else work
        value = run(*args)
        parent.send("done", value if os.environ["RANK"] == "0" else None)
    except Interrupted as error:
        parent.send("interrupted", (error.number, error.said))
    except BaseException as error:
        fault = fault_of(error)
        parent.send("failed", fault)
        return fault.exit_code
    return 0
