"""Signals and the end of processes: a run saves what it has, and no child outlives its parent."""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from typing import Any, Protocol

from dpframe import heartbeat
from dpframe.errors import Interrupted
from dpframe.heartbeat import SIGNALS as SIGNALS
from dpframe.heartbeat import Watcher

STOP = signal.SIGTSTP  # Ctrl-Z
ECHO_SECONDS = 0.25  # `timeout` and torchrun repeat what a terminal sent: no second signal
STARTUP_SECONDS = 1.0  # there is nothing to save yet
END_SECONDS = 1.0  # for a child to end by itself
LONGEST_FOLDER = 50  # bytes; a socket's path has 107

_installed: "Interruption | None" = None


def installed() -> "Interruption | None":
    """The one of this process, which the command or the start of a rank has opened."""
    return _installed


def look() -> None:
    """Ends a start-up in which a signal has come."""
    if _installed is not None and _installed.number is not None:
        raise Interrupted(_installed.number)


def allow(grace_seconds: float) -> None:
    if _installed is not None:
        _installed.grace_seconds = grace_seconds


@contextmanager
def watched(hang_seconds: float | None) -> Iterator[None]:
    """Within, this process is ended if `beat` is not called for that many seconds."""
    if _installed is None:
        yield
        return
    with _installed.watched(hang_seconds):
        yield


class Parent(Protocol):
    """What a rank tells the process that started it, and waits for."""

    pulse: int  # the pipe that takes signals and beats

    def send(self, kind: str, value: Any = None) -> None: ...

    def receive(self) -> Any: ...


class Interruption:
    """Remembers the first signal until someone asks for its `number` where work can be broken off.

    The second signal ends the process at once, and an alarm does when the time to save is over.
    Python calls handlers between two bytecodes, so a process that never leaves C code is ended by
    its watcher, or a rank by its parent.
    """

    def __init__(
        self,
        *,
        grace_seconds: float = 30.0,
        is_quiet: bool = False,
        parent: Parent | None = None,
        can_pause: bool = False,
    ) -> None:
        """In a rank, `parent` counts the signals, and `can_pause` if it handles Ctrl-Z."""
        self.grace_seconds = grace_seconds
        self.number: int | None = None  # of the first signal
        self.has_begun = False  # from then on there may be something to save
        self.is_to_pause = False  # Ctrl-Z
        self._is_quiet = is_quiet
        self._parent = parent
        self._can_pause = can_pause
        self._has_ranks = False
        self._since = 0.0
        self._handlers: dict[int, Any] = {}

    def open(self) -> None:
        """Outside the main thread, where Python takes no handlers, it does nothing."""
        global _installed
        if threading.current_thread() is not threading.main_thread() or _installed is not None:
            return
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and a shell's `&`
                self._handle(number, self._note)
        if self._parent is not None:
            if self._can_pause:
                self._handle(STOP, self._note_stop)
            signal.set_wakeup_fd(self._parent.pulse, warn_on_full_buffer=False)
        _installed = self

    def close(self) -> None:
        global _installed
        if _installed is not self:
            return
        if signal.SIGALRM in self._handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        _installed = None

    def begin(self) -> None:
        """From here on there may be something to save: a signal waits for the end of a step."""
        if not self.has_begun and self._parent is not None:
            self._parent.send("begun")
        self.has_begun = True

    def remember(self, number: int) -> None:
        """The signal of another process."""
        if self.number is None:
            self.number, self._since = number, time.monotonic()

    @contextmanager
    def watched(self, hang_seconds: float | None) -> Iterator[None]:
        """A rank is watched by its parent, another process by a small one beside it."""
        limit = None if heartbeat.is_debugged() else hang_seconds
        try:
            if self._parent is None:
                with Watcher(limit, grace_seconds=self.grace_seconds, is_quiet=self._is_quiet):
                    yield
            else:
                self._parent.send("watch", limit)
                heartbeat.start(self._parent.pulse, limit)
                yield
                heartbeat.stop()
                self._parent.send("watch", None)
        finally:
            heartbeat.stop()
            self.has_begun = False

    @contextmanager
    def heeded_by_ranks(self) -> Iterator[Any]:
        """Within, the first signal and Ctrl-Z are left to the caller. What this yields becomes
        readable when a signal comes."""
        wakes, write = multiprocessing.Pipe(duplex=False)
        os.set_blocking(write.fileno(), False)
        before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        stops = signal.getsignal(STOP) is signal.SIG_DFL
        if stops:
            signal.signal(STOP, self._note_stop)
        self._has_ranks = True
        try:
            yield wakes
        finally:
            self._has_ranks = False
            if stops:
                signal.signal(STOP, signal.SIG_DFL)
            signal.set_wakeup_fd(before)
            wakes.close()
            write.close()

    def pause(self) -> None:
        """Between two steps of a rank, until its parent goes on."""
        if self._parent is not None and self.number is None:
            self._parent.send("paused")
            self._parent.receive()
        self.is_to_pause = False

    def stop_here(self) -> None:
        """Does what Ctrl-Z does by default; returns when the process goes on."""
        self.is_to_pause = False
        signal.signal(STOP, signal.SIG_DFL)
        signal.raise_signal(STOP)
        signal.signal(STOP, self._note_stop)

    # ---- the handlers

    def _handle(self, number: int, handler: Any) -> None:
        self._handlers[number] = signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self.number is not None:
            if self._parent is None and time.monotonic() - self._since > ECHO_SECONDS:
                self._exit(", twice; ended at once" if self.has_begun or self._has_ranks else "")
            return
        self.remember(number)
        if not self._has_ranks:
            self._handle(signal.SIGALRM, self._give_up)
            patience = self.grace_seconds if self.has_begun else STARTUP_SECONDS
            signal.setitimer(signal.ITIMER_REAL, max(patience, 0.001))

    def _note_stop(self, number: int, frame: Any) -> None:
        self.is_to_pause = True

    def _give_up(self, number: int, frame: Any) -> None:
        late = f", not done in trainer.grace_seconds={self.grace_seconds:g}, so killed"
        self._exit(late if self.has_begun else "")

    def _exit(self, why: str) -> None:
        assert self.number is not None
        if not self._is_quiet:
            name = signal.Signals(self.number).name
            with suppress(OSError):  # a full device
                os.write(2, f"dpframe: interrupted by {name}{why}\n".encode())
        os._exit(128 + self.number)


# ---- children


def forget() -> None:
    """In a fork, first thing: what the parent watches and handles is not its child's."""
    global _installed
    _installed = None
    heartbeat.stop()
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


def end_with_parent() -> None:
    """Called first thing in a child. Elsewhere than on Linux, a child ends when it notices."""
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    import fcntl

    # The kernel kills this process when the parent's end of the pipe closes, even if the
    # interpreter never runs again.
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def leave_to_parent() -> None:
    """In a data worker: it ends with its parent, not before, even if the whole group is signalled.

    A rank that saves or stops at the end of a step still waits for a batch.
    """
    end_with_parent()
    forget()
    for number in (signal.SIGINT, signal.SIGHUP, STOP):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_when_the_parent_asks, daemon=True).start()


def _end_when_the_parent_asks() -> None:
    while True:  # torch's DataLoader ends a worker that hangs by SIGTERM
        if signal.sigwaitinfo([signal.SIGTERM]).si_pid == os.getppid():
            os._exit(0)


def end_children() -> None:
    """Ends data workers that SIGTERM does not end, e.g. stopped ones: Python waits for them."""
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.terminate()
    deadline = time.monotonic() + END_SECONDS
    for child in children:
        child.join(max(0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()


def share_sockets() -> None:
    """Makes one folder for the sockets of all data workers, which is removed with this process.

    Left to itself, multiprocessing makes one in every worker: it stays where the worker is killed,
    and a long TMPDIR makes its sockets' paths too long.
    """
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before
