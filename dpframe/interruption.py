"""Signals that end a run: the first is remembered until a step ends, a second ends it at once."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpframe import orphans
from dpframe.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ECHO_SECONDS = 0.25  # `timeout` and torchrun send what a terminal sent already: no second signal
STARTUP_SECONDS = 1.0  # there is nothing to save yet

_installed: "Interruption | None" = None


def installed() -> "Interruption | None":
    """This process's, which the command line or the start of a rank has opened."""
    return _installed


def look() -> None:
    """For the pauses of a start-up: ends it where a signal has come."""
    if _installed is not None and _installed.number is not None:
        raise Interrupted(_installed.number)


def allow(grace_seconds: float) -> None:
    if _installed is not None:
        _installed.grace_seconds = grace_seconds


class Interruption:
    """Handlers that do nothing, and a thread that Python's C handler wakes by a pipe.

    So a signal is noticed while the main thread is in C code for long, and nothing is broken off
    where it can't be. Whoever works asks for `number` where work can be broken off.
    """

    def __init__(
        self,
        *,
        grace_seconds: float = 30.0,
        inbox: Any = None,
        tell: Callable[[int], None] | None = None,
        is_quiet: bool = False,
    ) -> None:
        """In a rank, the parent's signals come by `inbox`, and its own are told to the parent."""
        self.grace_seconds = grace_seconds
        self.number: int | None = None  # of the first signal
        self.has_begun = False  # from then on there may be something to save
        self._inbox = inbox
        self._tell = tell
        self._is_quiet = is_quiet
        self._since = 0.0
        self._thread: threading.Thread | None = None
        self._handlers: dict[int, Any] = {}

    def open(self) -> None:
        """Does nothing where signals are not ours to handle: outside the main thread."""
        global _installed
        if threading.current_thread() is not threading.main_thread() or _installed is not None:
            return
        self.wakes, self._writes = os.pipe()
        os.set_blocking(self.wakes, False)
        os.set_blocking(self._writes, False)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and a shell's `&`
                self._handlers[number] = signal.signal(number, _do_nothing)
        self._fd_before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        _installed = self
        self._start()

    def close(self) -> None:
        global _installed
        if _installed is not self:
            return
        self._stop()
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        _installed = None
        os.close(self.wakes)
        os.close(self._writes)

    def begin(self) -> None:
        """There may be something to save from here on: a signal waits for the next look."""
        self.has_begun = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside there is no thread: one may fork, and has to wait at `wakes` and `heed` it."""
        self._stop()
        try:
            yield
        finally:
            if self.number is None:  # else we are on the way out, which nothing needs to hurry
                self._start()

    def heed(self) -> bool:
        """Takes in what has woken us; whether it is to end at once."""
        came = [self._signalled(number) for number in self._read() if number in SIGNALS]
        return any(came)

    def remember(self, number: int) -> None:
        """What another process was signalled."""
        if self.number is None:
            self.number, self._since = number, time.monotonic()

    # ---- the thread

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="interruption", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        if self._thread is not None:
            os.write(self._writes, b"\0")
            self._thread.join()
            task = Path(f"/proc/self/task/{self._thread.native_id}")
            deadline = time.monotonic() + 1
            while task.exists() and time.monotonic() < deadline:
                time.sleep(0.0001)  # Python has let go of it, the system has not: a fork would see
            self._thread = None

    def _watch(self) -> None:
        waiting = select.poll()
        waiting.register(self.wakes, select.POLLIN)
        if self._inbox is not None:
            waiting.register(self._inbox.fileno(), select.POLLIN)
        while True:
            left = self._seconds_left()
            if left is not None and left <= 0:
                self._end(f"not done in trainer.grace_seconds={self.grace_seconds:g}, so killed")
            ready = [fd for fd, _ in waiting.poll(None if left is None else 1000 * left + 1)]
            if self._inbox is not None and self._inbox.fileno() in ready and not self._receive():
                waiting.unregister(self._inbox.fileno())  # the parent is gone
                self._inbox = None
            if self.wakes in ready:
                numbers = self._read()
                came = [self._signalled(number) for number in numbers if number in SIGNALS]
                if any(came):
                    self._end("twice; ended at once")
                if 0 in numbers:
                    return

    def _read(self) -> bytes:
        try:
            return os.read(self.wakes, 4096)
        except BlockingIOError:
            return b""

    def _receive(self) -> bool:
        try:
            self.remember(self._inbox.recv())
        except (EOFError, OSError):
            return False
        return True

    def _signalled(self, number: int) -> bool:
        if self.number is not None:
            return time.monotonic() - self._since > ECHO_SECONDS
        self.remember(number)
        if self._tell is not None:
            self._tell(number)
        return False

    def _seconds_left(self) -> float | None:
        if self.number is None:
            return None
        patience = self.grace_seconds if self.has_begun else STARTUP_SECONDS
        return self._since + patience - time.monotonic()

    def _end(self, why: str) -> None:
        assert self.number is not None
        if not self._is_quiet:
            name = signal.Signals(self.number).name
            because = f", {why}" if self.has_begun else ""
            with suppress(OSError):  # a full device
                os.write(2, f"dpframe: interrupted by {name}{because}\n".encode())
        os._exit(128 + self.number)


def forget() -> None:
    """In a fork, first thing: the parent's pipe is not ours to wake."""
    global _installed
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
    if _installed is not None:
        os.close(_installed.wakes)
        os.close(_installed._writes)
        _installed = None


def leave_to_parent() -> None:
    """In a data worker: it ends with its parent, and not before, be the whole group signalled."""
    orphans.die_with_parent()
    forget()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_when_the_parent_asks, daemon=True).start()


def _end_when_the_parent_asks() -> None:
    while True:  # torch's DataLoader ends a worker that hangs by SIGTERM
        if signal.sigwaitinfo([signal.SIGTERM]).si_pid == os.getppid():
            os._exit(0)


def _do_nothing(number: int, frame: Any) -> None:
    """Its being there is what has the pipe written to."""
