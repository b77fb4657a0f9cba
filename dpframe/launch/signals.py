"""Signals and the end of processes: a run saves what it has, and no child outlives its parent."""

import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import util
from multiprocessing.connection import wait
from typing import Any

from dpframe.errors import Interrupted
from dpframe.launch import watchdog

# Slurm's, before a time limit
USR1 = () if watchdog.STACK == signal.SIGUSR1 else (signal.SIGUSR1,)
_NAME = f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"
PREEMPTION = getattr(signal, _NAME, signal.SIGUSR2)  # submitit's, before a time limit, too
SIGNALS = tuple(dict.fromkeys([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *USR1, PREEMPTION]))
ECHO_SECONDS = 0.25  # `timeout` and torchrun repeat what a terminal sent: no second signal
OVER = b"\0"  # no signal has this number
LONGEST_FOLDER = 50  # bytes; a socket's path has 107

_current: "Interruption | None" = None


def current() -> "Interruption | None":
    """The one of this process, which the command or the start of a rank has opened."""
    return _current


def install(interruption: "Interruption") -> None:
    """For a process that is told of signals and handles none itself."""
    global _current
    _current = interruption


def raise_if_signaled() -> None:
    """Ends a start-up in which a signal has come."""
    if _current is not None and _current.number is not None:
        raise Interrupted(_current.number)


def set_grace(seconds: float) -> None:
    if _current is not None:
        _current.grace_seconds = seconds


def watched(hang_seconds: float | None) -> AbstractContextManager[None]:
    """Within, a run that makes no progress, or does not end at a signal, is ended. A program that
    handles signals itself is not watched."""
    return nullcontext() if _current is None else _current.watched(hang_seconds)


def unwatched() -> AbstractContextManager[None]:
    """Within, this process may take as long as it likes."""
    return nullcontext() if _current is None else _current.unwatched()


def describe_lateness(grace_seconds: float) -> str:
    """What a run that was interrupted adds if it had to be killed."""
    return f", not done in trainer.grace_seconds={grace_seconds:g}, so killed"


class Interruption:
    """Remembers the first signal until someone asks for its `number` where work can be broken off.

    The process ends at once if nothing has begun, or with the second signal. Python calls handlers
    between two bytecodes, so that C code may keep a process from hearing one: a rank is then ended
    by its parent, and another process by a thread, or by its `watchdog` if the code keeps the GIL.
    """

    ends_at_second = True

    def __init__(self, numbers: Sequence[int] = SIGNALS, *, is_quiet: bool = False) -> None:
        """`numbers` are of the signals that it handles."""
        self._numbers = numbers
        self.grace_seconds = 30.0
        self.number: int | None = None  # of the first signal
        self.has_begun = False  # from then on there may be something to save
        self._is_quiet = is_quiet
        self._since = 0.0
        self._handlers: dict[int, Any] = {}

    def open(self) -> None:
        """Outside the main thread, where Python takes no handlers, it does nothing."""
        global _current
        if threading.current_thread() is not threading.main_thread() or _current is not None:
            return
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and a shell's `&`
                self._handlers[number] = signal.signal(number, self._note)
        _current = self

    def close(self) -> None:
        global _current
        if _current is self:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            _current = None

    def begin(self) -> None:
        """From here on there may be something to save: a signal waits for the end of a step."""
        self.has_begun = True

    def remember(self, number: int) -> None:
        """The signal of another process."""
        if self.number is None:
            self.number, self._since = number, time.monotonic()

    @contextmanager
    def watched(self, hang_seconds: float | None) -> Iterator[None]:
        """Within, this process is ended where it hangs, and where it takes too long after a signal:
        by a thread, as C code may keep Python from calling handlers."""
        news, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        thread = threading.Thread(target=self._end_late, args=(news,), daemon=True)
        thread.start()
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)  # gets the number of each signal
        try:
            with watchdog.timer(hang_seconds):
                yield
        finally:
            signal.set_wakeup_fd(-1)
            os.write(wakeup, OVER)
            thread.join()
            os.close(news)
            os.close(wakeup)

    def unwatched(self) -> AbstractContextManager[None]:
        """Within `watched`, for what gives no sign of life and may take hours."""
        return watchdog.held()

    @contextmanager
    def left_to_launcher(self) -> Iterator[None]:
        """Within, a signal is left to who starts ranks, and ends them."""
        before, self.has_begun = self.has_begun, True
        try:
            yield
        finally:
            self.has_begun = before

    # ---- the handlers

    def _note(self, number: int, frame: Any) -> None:
        if self.number is None:
            self.remember(number)
            if not self.has_begun:
                self._end(number, "")
        elif self.ends_at_second and time.monotonic() - self._since > ECHO_SECONDS:
            self._end(self.number, ", twice; ended at once")

    def _end_late(self, news: int) -> None:
        number = 0
        while number not in SIGNALS:
            number = os.read(news, 1)[0]
            if number == OVER[0]:
                return
        deadline = time.monotonic() + self.grace_seconds
        while wait([news], max(0.0, deadline - time.monotonic())):
            if os.read(news, 1) == OVER:
                return
        self._end(number, describe_lateness(self.grace_seconds))

    def _end(self, number: int, how: str) -> None:
        if not self._is_quiet:
            with suppress(OSError):  # a full device
                os.write(2, f"dpframe: {Interrupted(number, how)}\n".encode())
        os._exit(128 + number)


# ---- children


def forget() -> None:
    """In a fork, first thing: what the parent watches and handles is not its child's."""
    global _current
    _current = None
    watchdog.disconnect()


def end_with_parent() -> None:
    """Called first thing in a child. Elsewhere than on Linux, a child ends when it notices."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        end_with(parent.sentinel)


def end_with(pipe: int) -> None:
    """On Linux the kernel kills this process when the other end of the pipe closes, even if the
    interpreter never runs again. It kills it at a write to the pipe, too: all that is sent has to
    be read before this."""
    if sys.platform != "linux":
        return
    import fcntl

    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags | os.O_ASYNC)
    other_end = select.poll()
    other_end.register(pipe, 0)  # no event but POLLHUP, which is always reported
    if other_end.poll(0):  # it closed before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def leave_to_parent() -> None:
    """In a data worker: it ends with its parent, not before, even if the whole group is signalled.

    A rank that saves or stops at the end of a step still waits for a batch.
    """
    end_with_parent()
    forget()
    for number in SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_when_the_parent_asks, daemon=True).start()


def _end_when_the_parent_asks() -> None:
    while True:  # torch's DataLoader ends a worker that hangs by SIGTERM
        if signal.sigwaitinfo([signal.SIGTERM]).si_pid == os.getppid():
            os._exit(0)


def end_children() -> None:
    """Ends data workers that torch has not ended: Python would wait for them at exit."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()  # SIGTERM does not end one that is stopped
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
