"""What a rank does: its main function, and what it tells the process that started it."""

import faulthandler
import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from dpframe.errors import Interrupted
from dpframe.launch import signals, watchdog
from dpframe.launch.rank_errors import describe
from dpframe.launch.signals import SIGNALS, Interruption

SAFE_PATH = "PYTHONSAFEPATH"


def rank_main(
    environment: dict[str, str],
    messages: Connection,
    pulse: Connection,
    work: bytes | tuple[Callable[..., Any], tuple],
) -> None:
    """The first function of a rank; `work` is pickled for a process that was not forked."""
    gc.freeze()  # a collection would copy all that a fork shares with its parent
    signals.end_with_parent()
    signals.forget()
    os.environ.pop(SAFE_PATH, None)  # unless it is in the user's environment
    os.environ.update(environment)
    faulthandler.enable()
    watchdog.connect(pulse.fileno())
    parent = Parent(messages)
    parent.send("begun")
    parent.open()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code = do_work(parent, work)
    signals.end_children()  # a DataLoader in a cycle would wait seconds for its workers
    gc.collect()  # as in `cli.exit`: of a process that is not a fork the interpreter ends
    sys.exit(code)


def do_work(parent: "Parent", work: bytes | tuple[Callable[..., Any], tuple]) -> int:
    """Tells the parent how the work has ended, and returns the exit code."""
    try:
        run, args = pickle.loads(work) if isinstance(work, bytes) else work
        value = run(*args)
        parent.send("done", value if os.environ["RANK"] == "0" else None)
    except Interrupted as error:
        parent.send("interrupted", (error.number, error.said))
    except BaseException as error:
        return parent.fail(error)
    return 0


def has_parent() -> bool:
    """Whether another process waits for this rank, and tells how the job has ended."""
    return isinstance(signals.current(), Parent)


def notify_parent(name: str, value: Any) -> None:
    """Sends the parent what it wants to know if the job ends badly."""
    if isinstance(parent := signals.current(), Parent):
        parent.send("told", (name, value))


def fail(error: BaseException, *, is_late: bool = False) -> None:
    """Tells the parent how this rank fails, before it lets go of what it has; late is an error
    that came after the job's end."""
    parent = signals.current()
    if isinstance(parent, Parent) and not isinstance(error, Interrupted):
        parent.fail(error, is_late=is_late)


class Parent(Interruption):
    """In a rank: the process that started it counts its signals and watches it."""

    ends_at_second = False  # the parent ends it
    exit_code: int | None = None  # of the failure that it was told

    def __init__(self, messages: Any) -> None:
        """`messages` is the rank's end of a pipe, or what stands in for one."""
        super().__init__(is_quiet=True)
        self._messages = messages
        self._hang_seconds: float | None = None

    def send(self, kind: str, value: Any = None) -> None:
        # Pickled here, by value: multiprocessing would share a tensor's memory, which ends with us.
        self._messages.send_bytes(pickle.dumps((kind, value)))

    def fail(self, error: BaseException, *, is_late: bool = False) -> int:
        """The exit code; it is told of the first failure alone."""
        if self.exit_code is None:
            fault = describe(error)
            fault.is_consequence = fault.is_consequence or is_late
            self.exit_code = fault.exit_code
            self.send("failed", fault)
        return self.exit_code

    def begin(self) -> None:
        if not self.has_begun:
            self.send("may save")
        super().begin()

    @contextmanager
    def watched(self, hang_seconds: float | None) -> Iterator[None]:
        self._hang_seconds = hang_seconds
        self.send("watch", hang_seconds)
        yield
        self.send("watch", None)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        self.send("watch", None)
        try:
            yield
        finally:
            self.send("watch", self._hang_seconds)
