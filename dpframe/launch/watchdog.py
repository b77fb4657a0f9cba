"""Signs of life: what a run sends while it makes progress, and the process that waits for them.

Run as a program, this file is that process: it needs nothing but Python, and starts in 20 ms.
"""

import faulthandler
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

STACK = getattr(signal, "SIGRTMIN", signal.SIGUSR1)  # asks for it
USR1 = () if STACK == signal.SIGUSR1 else (signal.SIGUSR1,)  # Slurm's, before a time limit
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *USR1)
EXIT = STACK + 1
BEAT = 0x80  # no signal has this number, and no stack this byte
TEXT = {ord("\n"), *range(ord(" "), 127)}  # faulthandler's
BEAT_SECONDS = 0.1  # between two of them at least
TICK_SECONDS = 0.1  # between two looks at what has come
STACK_SECONDS = 1.0  # for it to come
END_SECONDS = 1.0  # for a process to end by itself
# How long a fork gets to begin, and then each one that is started in its place: it takes
# milliseconds, and longer on a busy machine.
BEGIN_SECONDS = (3.0, 6.0, 12.0)
HOUSE = str(Path(__file__).parent.parent) + os.sep
FRAME = re.compile(
    r'File "([^"]+)", line (\d+),? in (\S+)'
)  # in a traceback or a stack of faulthandler
FRAMES = 4
START = re.compile(r'((run\.py", line \d+ in _work|rank\.py", line \d+ in rank_main)\b)\n.*', re.S)
DEBUGGERS = ("pydevd", "debugpy")
PROMPT = re.compile(r"\b(pdb|bdb|cmd|code)\.py$")

_fd = -1
_due = 0.0


def beat() -> None:
    """A step, a batch, or anything else was done."""
    global _due
    now = time.monotonic()
    if now >= _due:
        _due = now + BEAT_SECONDS
        with suppress(OSError):  # nobody reads, or not as fast
            os.write(_fd, bytes([BEAT]))


def connect(fd: int) -> None:
    """Sends beats there from now on, the number of each signal that Python handles, and on `STACK`
    the main thread's stack. All but the beats is done by C code, while no Python runs, too."""
    global _fd
    os.set_blocking(fd, False)
    faulthandler.register(STACK, file=fd, all_threads=False)
    signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    _fd = fd


def disconnect() -> None:
    global _fd
    _fd = -1
    signal.set_wakeup_fd(-1)
    faulthandler.unregister(STACK)


def receive(fd: int, seconds: float = 0.0) -> bytes:
    """What has come from a process that is connected."""
    return os.read(fd, 65536) if select.select([fd], [], [], seconds)[0] else b""


def is_debugged() -> bool:
    """A breakpoint that is set later is seen by `is_at_prompt`."""
    return sys.gettrace() is not None or any(name in sys.modules for name in DEBUGGERS)


class Clock:
    """Seconds in which this process ran, if it is read every `tick` seconds or more often.

    A monotonic clock also counts what Ctrl-Z, SIGSTOP or a paused container takes.
    """

    def __init__(self, tick: float = 0.5) -> None:
        self._tick = tick
        self._seconds = 0.0
        self._read_at = time.monotonic()

    def seconds(self, *, counts: bool = True) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._read_at, self._tick) if counts else 0.0
        self._read_at = now
        return self._seconds


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process, as far as the system says."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


# ---- stacks, as faulthandler writes them: the innermost frame first


def read_stack(pid: int, fd: int) -> str:
    """Where the main thread of that process is, up to the function in which its work began."""
    with suppress(ProcessLookupError):
        os.kill(pid, STACK)
    text, seconds = b"", STACK_SECONDS
    while part := receive(fd, seconds):
        text += bytes(byte for byte in part if byte in TEXT)
        seconds = 0.1 if text else STACK_SECONDS
    if not text:
        return "it has none: it is stopped, or in the kernel"
    return START.sub(r"\1", text.decode().strip())


def is_at_prompt(stack: str) -> bool:
    """Whether a debugger waits for its user."""
    return any(PROMPT.search(file) for file, _, _ in FRAME.findall(stack))


def locate(stack: str) -> str:
    """The innermost frames, e.g. `wait (a.py, line 3) in forward (a.py, line 9)`."""
    frames = FRAME.findall(stack)
    users = list(takewhile(lambda frame: not frame[0].startswith(HOUSE), frames))
    shown = (users or frames[:1])[:FRAMES]
    return " in ".join(
        f"{name} ({os.path.basename(file)}, line {line})" for file, line, name in shown
    )


def verdict(stack: str, seconds: float, *, who: str = "it") -> str:
    """The last line of a run that hung."""
    place = locate(stack)
    return (
        f"dpframe: no step, batch or checkpoint came for trainer.hang_seconds={seconds:g}; "
        f"{who} hangs{f' in {place}' if place else ''}; fix that, raise trainer.hang_seconds, or "
        "set it to null"
    )


def late(grace_seconds: float) -> str:
    """What a run that was interrupted adds if it had to be killed."""
    return f", not done in trainer.grace_seconds={grace_seconds:g}, so killed"


# ---- the watcher


@contextmanager
def watcher(
    hang_seconds: float | None, *, grace_seconds: float, is_quiet: bool, leave: Callable[..., None]
) -> Iterator[None]:
    """Within, a process watches this one, where no parent of dpframe's does.

    A thread can't: a C extension that keeps the GIL stops it. When a signal has been waiting for
    `grace_seconds`, or nothing has come for `hang_seconds`, the watcher says so, has this process
    call `leave`, and kills it where it does not.
    """
    if hang_seconds is None or is_debugged():
        hang_seconds = float("inf")
    read, write = os.pipe()
    handler = signal.signal(EXIT, leave)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the watcher inherits it
    try:
        args = read, os.getpid(), hang_seconds, grace_seconds, int(is_quiet)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, args)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[read],
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read)
    connect(write)
    try:
        yield
    finally:
        disconnect()
        process.kill()
        process.wait()
        signal.signal(EXIT, handler)
        os.close(write)


def _watch(fd: int, parent: int, hang_seconds: float, grace_seconds: float, is_quiet: bool) -> None:
    """The watcher's work, until it is killed, or the process that started it has ended."""
    clock = Clock()
    beaten_at, kill_at, number = 0.0, float("inf"), 0
    while os.getppid() == parent:
        news = receive(fd, TICK_SECONDS)
        now = clock.seconds(counts=not is_stopped(parent))
        if BEAT in news:
            beaten_at = now
        numbers = [byte for byte in news if byte in SIGNALS]
        if numbers and not number:
            number, kill_at = numbers[0], now + grace_seconds
        if now >= kill_at:
            words = f"dpframe: interrupted by {signal.Signals(number).name}{late(grace_seconds)}\n"
            _end(parent, "" if is_quiet else words)
        if now - beaten_at >= hang_seconds:
            stack = read_stack(parent, fd)
            if not is_at_prompt(stack):
                _end(parent, f"{stack}\n{verdict(stack, hang_seconds, who=_who())}\n")
            beaten_at = now


def _who() -> str:
    """Which of a launcher's ranks, and on which of several machines."""
    rank, ranks, here = map(os.environ.get, ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    place = f" on {socket.gethostname()}" if ranks != (here or ranks) else ""
    return f"rank {rank}{place}" if rank is not None else "it"


def _end(pid: int, words: str) -> None:
    with suppress(OSError):
        os.write(2, words.encode())
    os.kill(pid, EXIT)
    deadline = time.monotonic() + END_SECONDS
    while os.getppid() == pid:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    _pipe, _parent, _hang, _grace, _is_quiet = sys.argv[1:]
    _watch(int(_pipe), int(_parent), float(_hang), float(_grace), _is_quiet == "1")
    os._exit(0)
