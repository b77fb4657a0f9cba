"""A rank from within: what its process does before and after the work, and what it tells home."""

import faulthandler
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from dpframe import interruption, orphans
from dpframe.errors import Interrupted
from dpframe.interruption import SIGNALS, Interruption
from dpframe.strategies import fault, ranks

_home: "_Home | None" = None


def tell(name: str, value: Any) -> None:
    """Something that the parent will want to know should the job end badly."""
    if _home is not None:
        _home.send("told", (name, value))


def has_parent() -> bool:
    """Whether one waits for this rank, and tells how the job has ended."""
    return _home is not None


class _Home:
    """The way to the parent, for the main thread and the one that minds the signals."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.lock = threading.Lock()

    def send(self, kind: str, value: Any) -> None:
        # Pickled here, by value: multiprocessing would share a tensor's memory, which ends with us.
        message = pickle.dumps((kind, value))
        with self.lock:
            self.pipe.send_bytes(message)


def live(
    rank: int,
    count: int,
    pipe: Connection,
    stacks: Connection,
    others: Sequence[Connection],
    run: Callable[..., Any],
    args: tuple,
) -> None:
    """The first function of a rank; `others` are the parent's ends, where a fork has them too."""
    global _home
    orphans.die_with_parent()
    ranks.forget_safe_path()
    interruption.forget()
    for other in others:
        other.close()
    # A C handler: it works wherever the main thread may hang.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    home = _home = _Home(pipe)
    port, grace_seconds, pauses = pipe.recv()
    if pauses:  # the parent says when: not in the middle of a collective, which has a timeout
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    os.environ.update(ranks.environment_of(rank, count, port))
    stop = Interruption(
        grace_seconds=grace_seconds,
        inbox=pipe,
        tell=home.send,
        is_quiet=True,
    )
    stop.open()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the parent has blocked them meanwhile
    sys.exit(_outcome(home, run, args))


def _outcome(home: _Home, run: Callable[..., Any], args: tuple) -> int:
    try:
        value = run(*args)
        home.send("done", value if os.environ["RANK"] == "0" else None)
    except Interrupted as error:
        home.send("interrupted", (error.number, error.said))
    except BaseException as error:
        noted = fault.noted(error)
        home.send("failed", noted)
        return noted.exit_code
    return 0
