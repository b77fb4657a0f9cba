"""Signs of life: a run gives them while it makes progress, and one that gives none is ended.

A rank writes them to the process that has started it, which asks for stacks and ends the job
(`local`). A process without such a parent has a timer of faulthandler's: it is a thread of C code,
which no other C code stops that keeps the GIL.
"""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from multiprocessing.connection import wait
from pathlib import Path

STACK = getattr(signal, "SIGRTMIN", signal.SIGUSR1)  # asks for it
STOP = signal.SIGTSTP  # Ctrl-Z
BEAT = 0x80  # no signal has this number, and no stack this byte
TEXT = {ord("\n"), *range(ord(" "), 127)}  # faulthandler's
BEAT_SECONDS = 0.1  # between two of them at least
TICK_SECONDS = 0.1  # between two looks at what has come
STACK_SECONDS = 1.0  # for it to come
# How long a fork gets to begin, and then each one that is started in its place: it takes
# milliseconds, and longer on a busy machine.
BEGIN_SECONDS = (3.0, 6.0, 12.0)
HOUSE = str(Path(__file__).parent.parent) + os.sep
FRAME = re.compile(
    r'File "([^"]+)", line (\d+),? in (\S+)'
)  # in a traceback or a stack of faulthandler
FRAMES = 4
# The frames below a run's own: `modes.run._run_rank`, or `rank.rank_main`.
START = re.compile(
    r'((run\.py", line \d+ in _run_rank|rank\.py", line \d+ in rank_main)\b)\n.*', re.S
)

_give: Callable[[], object] | None = None  # a sign of life
_due = 0.0


def beat() -> None:
    """A step, a batch, or anything else was done."""
    global _due
    if _give is not None and (now := time.monotonic()) >= _due:
        _due = now + BEAT_SECONDS
        _give()


@contextmanager
def timer(seconds: float | None) -> Iterator[None]:
    """Within, this process shows its stacks and ends with exit code 1 if it does not `beat` for
    that long; what Ctrl-Z takes does not count. A process has one such timer: a program's own is
    not kept."""
    if seconds is None:
        yield
        return
    start = partial(faulthandler.dump_traceback_later, seconds, exit=True, file=2)
    _give_by(start)
    start()
    is_free = signal.getsignal(STOP) is signal.SIG_DFL  # else the program has a handler
    if is_free:
        signal.signal(STOP, _stop)
    try:
        yield
    finally:
        if is_free:
            signal.signal(STOP, signal.SIG_DFL)
        _give_by(None)
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def held() -> Iterator[None]:
    """Within, the timer does not run."""
    if _give is None:  # what runs is the program's own
        yield
        return
    faulthandler.cancel_dump_traceback_later()
    try:
        yield
    finally:
        _give()


def _stop(number: int, frame: object) -> None:
    """Ctrl-Z stops the process, as by default, and holds its timer, which no stop holds."""
    with held():
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        signal.signal(number, _stop)


def connect(fd: int) -> None:
    """Sends beats there from now on, the number of each signal that Python handles, and on `STACK`
    the main thread's stack. All but the beats is done by C code, while no Python runs, too."""
    os.set_blocking(fd, False)
    faulthandler.register(STACK, file=fd, all_threads=False)
    signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    _give_by(partial(_write_beat, fd))


def disconnect() -> None:
    _give_by(None)
    signal.set_wakeup_fd(-1)
    faulthandler.unregister(STACK)
    if signal.getsignal(STOP) is _stop:
        signal.signal(STOP, signal.SIG_DFL)


def _give_by(give: Callable[[], object] | None) -> None:
    global _give
    _give = give


os.register_at_fork(after_in_child=partial(_give_by, None))  # which has no thread for the timer


def _write_beat(fd: int) -> None:
    with suppress(OSError):  # nobody reads, or not as fast
        os.write(fd, bytes([BEAT]))


# ---- in the process that watches another one


def receive(fd: int, seconds: float = 0.0) -> bytes:
    """What has come from a process that is connected."""
    return os.read(fd, 65536) if wait([fd], seconds) else b""


def read_stack(pid: int, fd: int) -> str:
    """Where the main thread of that process is, up to the function in which its work began: as
    faulthandler writes it, the innermost frame first."""
    with suppress(ProcessLookupError):
        os.kill(pid, STACK)
    text, seconds = b"", STACK_SECONDS
    while part := receive(fd, seconds):
        text += bytes(byte for byte in part if byte in TEXT)
        seconds = 0.1 if text else STACK_SECONDS
    if not text:
        return "it has none: it is stopped, or in the kernel"
    return START.sub(r"\1", text.decode().strip())


def is_in_collective(stack: str) -> bool:
    """Whether that is in a function of torch.distributed, e.g. a collective."""
    frames = FRAME.findall(stack)
    return bool(frames) and Path(frames[0][0]).parts[-3:-1] == ("torch", "distributed")


def locate(stack: str) -> str:
    """The innermost frames, e.g. `wait (a.py, line 3) in forward (a.py, line 9)`."""
    frames = FRAME.findall(stack)
    users = list(takewhile(lambda frame: not frame[0].startswith(HOUSE), frames))
    shown = (users or frames[:1])[:FRAMES]
    return " in ".join(
        f"{name} ({os.path.basename(file)}, line {line})" for file, line, name in shown
    )


class Clock:
    """Seconds in which this process ran, if it is read every `tick` seconds or more often.

    A monotonic clock also counts what Ctrl-Z, SIGSTOP or a paused container takes.
    """

    def __init__(self, tick: float = 0.5) -> None:
        self._tick = tick
        self._seconds = 0.0
        self._read_at = time.monotonic()

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._read_at, self._tick)
        self._read_at = now
        return self._seconds


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process, as far as the system says."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"
