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

from dpframe import heartbeat, orphans
from dpframe.errors import Interrupted
from dpframe.heartbeat import END, Clock, Watcher, beats
from dpframe.heartbeat import SIGNALS as SIGNALS

STOP = signal.SIGTSTP  # Ctrl-Z
TICK_SECONDS = 1.0
ECHO_SECONDS = 0.25  # `timeout` and torchrun send what a terminal sent already: no second signal
STARTUP_SECONDS = 1.0  # there is nothing to save yet

Tell = Callable[[str, Any], None]
"""Takes news: of what kind they are, and their value."""

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
        tell: Tell | None = None,
        is_quiet: bool = False,
    ) -> None:
        """In a rank, the parent's signals come by `inbox`, and its news are told to the parent."""
        self.grace_seconds = grace_seconds
        self.number: int | None = None  # of the first signal
        self.has_begun = False  # from then on there may be something to save
        self.is_to_pause = False  # as the parent wishes: Ctrl-Z
        self._inbox = inbox
        self._tell = tell
        self._is_quiet = is_quiet
        self._clock = Clock()
        self._since = 0.0
        self._tick_seconds: float | None = None  # None: nobody looks after this process
        self._hang_seconds: float | None = None
        self._link: int | None = None  # to the watcher
        self._goes_on = threading.Event()
        self._thread: threading.Thread | None = None
        self._handlers: dict[int, Any] = {}

    def open(self) -> None:
        """Does nothing where signals are not ours to handle: outside the main thread."""
        global _installed
        if threading.current_thread() is not threading.main_thread() or _installed is not None:
            return
        self._main = threading.get_ident()
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
    def watched(self, hang_seconds: float | None) -> Iterator[None]:
        """Within, this process is ended where its work makes no progress in that many seconds.

        A rank's parent does so, else a watcher, which also sees to `grace_seconds`.
        """
        if self._thread is None or not self._thread.is_alive():  # not open, or of before a fork
            yield
            return
        heartbeat.beat()
        self._hang_seconds = None if heartbeat.is_debugged() else hang_seconds
        self._tick_seconds = min(TICK_SECONDS, (self._hang_seconds or TICK_SECONDS) / 4)
        watcher = None
        if self._tell is None:
            watcher = Watcher(
                self.wakes,
                hang_seconds=self._hang_seconds,
                grace_seconds=self.grace_seconds,
                is_quiet=self._is_quiet,
            )
            self._tell, self._link = watcher.send, watcher.link
        self._wake()
        try:
            yield
        finally:
            self._tick_seconds = self._hang_seconds = None
            if watcher is not None:
                self._stop()  # it may be about to write to the watcher
                self._tell = self._link = None
                watcher.close()
                self._start()
            else:
                self._say("beat", None)

    def pause(self) -> None:
        """Between two steps of a rank, until its parent goes on."""
        self._goes_on.clear()
        self._say("paused", None)
        if self.number is None:
            self._goes_on.wait()
        self.is_to_pause = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside there is no thread: one may fork, and has to wait at `wakes` and `heed` it."""
        self._stop()
        stops = signal.getsignal(STOP) is signal.SIG_DFL
        if stops:
            signal.signal(STOP, _do_nothing)
        try:
            yield
        finally:
            if stops:
                signal.signal(STOP, signal.SIG_DFL)
            if self.number is None:  # else we are on the way out, which nothing needs to hurry
                self._start()

    def heed(self) -> bool:
        """Takes in what has woken us; whether it is to end at once."""
        numbers = self._read()
        self.is_to_pause |= STOP in numbers
        came = [self._signalled(number) for number in numbers if number in SIGNALS]
        return any(came)

    def stop_here(self) -> None:
        """What Ctrl-Z does where nobody handles it; returns when the process goes on."""
        self.is_to_pause = False
        signal.signal(STOP, signal.SIG_DFL)
        signal.raise_signal(STOP)
        signal.signal(STOP, _do_nothing)

    def remember(self, number: int) -> None:
        """What another process was signalled."""
        if self.number is None:
            self.number, self._since = number, self._clock.seconds()
            self._goes_on.set()

    # ---- the thread

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="interruption", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        if self._thread is not None:
            self._wake(b"\0")
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
        link, beaten = None, -1
        while True:
            left, tick = self._seconds_left(), self._tick_seconds
            if left is not None and left <= 0:
                self._end(f"not done in trainer.grace_seconds={self.grace_seconds:g}, so killed")
            if link is None and self._link is not None:
                link = self._link
                waiting.register(link, select.POLLIN)
            if tick is not None and (beats.count != beaten or heartbeat.is_at_prompt(self._main)):
                beaten = beats.count
                self._say("beat", self._hang_seconds)
            limits = [seconds for seconds in (left, tick) if seconds is not None]
            patience = min(TICK_SECONDS, *limits) * 1000 + 1 if limits else None
            ready = [fd for fd, _ in waiting.poll(patience)]
            if link in ready:
                with suppress(OSError):
                    if os.read(link, 1) == END:
                        os._exit(1)  # the watcher has said why
                waiting.unregister(link)  # the watcher is gone
                self._tick_seconds = self._tell = None
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
            number = self._inbox.recv()
        except (EOFError, OSError):
            return False
        if number == STOP:
            self.is_to_pause = True
        elif number == signal.SIGCONT:
            self.is_to_pause = False
            self._goes_on.set()
        else:
            self.remember(number)
        return True

    def _signalled(self, number: int) -> bool:
        if self.number is not None:
            return self._clock.seconds() - self._since > ECHO_SECONDS
        self.remember(number)
        self._say("signalled", number)
        return False

    def _say(self, kind: str, value: Any) -> None:
        if self._tell is not None:
            with suppress(OSError):  # who would hear it is gone
                self._tell(kind, value)

    def _wake(self, what: bytes = b"\xff") -> None:
        os.write(self._writes, what)

    def _seconds_left(self) -> float | None:
        if self.number is None:
            return None
        patience = self.grace_seconds if self.has_begun else STARTUP_SECONDS
        return self._since + patience - self._clock.seconds()

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
    for number in (signal.SIGINT, signal.SIGHUP, STOP):  # a rank that is to stop waits for a batch
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
