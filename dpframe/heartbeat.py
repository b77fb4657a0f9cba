"""Signs of life: what a run sends while it makes progress, and the process that waits for them.

Run as a program, this file is that process: it needs nothing but Python, and starts in 20 ms.
"""

import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STACK = getattr(signal, "SIGRTMIN", signal.SIGUSR1)  # asks for it; users have plans for USR1
EXIT = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 1
BEAT, OVER = b"\x80", b"\x81"  # no signal has such a number
BEAT_SECONDS = 0.2  # between two of them at least
STACK_SECONDS = 1.0  # for it to come
END_SECONDS = 1.0  # for a process to end by itself
HOUSE = str(Path(__file__).parent) + os.sep
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
FRAMES = 4
START = re.compile(r'((run\.py", line \d+ in _work|launch\.py", line \d+ in live)\b)\n.*', re.S)
DEBUGGERS = ("pydevd", "debugpy")
PROMPT = re.compile(r"\b(pdb|bdb|cmd|code)\.py$")

_fd = -1
_seconds = BEAT_SECONDS
_due = float("inf")


def beat() -> None:
    """A step, a batch, or anything else was done."""
    global _due
    now = time.monotonic()
    if now >= _due:
        _due = now + _seconds
        with suppress(OSError):  # the reader is gone, or has more than it can read
            os.write(_fd, BEAT)


def start(fd: int, hang_seconds: float | None) -> None:
    """Sends beats there from now on."""
    global _fd, _seconds, _due
    os.set_blocking(fd, False)
    _fd, _seconds, _due = fd, min(BEAT_SECONDS, (hang_seconds or 1.0) / 8), 0.0
    beat()


def stop() -> None:
    global _due
    _due = float("inf")


def is_debugged() -> bool:
    """A breakpoint that is set later is seen by `is_at_prompt`."""
    return sys.gettrace() is not None or any(name in sys.modules for name in DEBUGGERS)


class Clock:
    """Seconds in which this process ran, if it is read every `tick` seconds or more often.

    A monotonic clock also counts what Ctrl-Z, SIGSTOP or a paused container takes.
    """

    def __init__(self, tick: float = 1.0) -> None:
        self._tick = tick
        self._seconds = 0.0
        self._read_at = time.monotonic()

    def seconds(self, *, counts: bool = True) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._read_at, self._tick) if counts else 0.0
        self._read_at = now
        return self._seconds


def is_stopped(pid: int) -> bool:
    """By a signal or a debugger, as far as the system says."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


# ---- stacks, as faulthandler writes them: the innermost frame first


def stack_of(pid: int, *, asked_by: int, pipe: int) -> str:
    """Where the main thread of that process is, up to the function in which its work began."""
    with suppress(ProcessLookupError):
        os.kill(pid, asked_by)
    text, seconds = b"", STACK_SECONDS
    while select.select([pipe], [], [], seconds)[0] and (part := os.read(pipe, 65536)):
        text, seconds = text + part, 0.1
    if not text:
        return "it has none: it is stopped, or in the kernel"
    return START.sub(r"\1", text.decode(errors="replace").strip())


def is_at_prompt(stack: str) -> bool:
    """Whether a debugger waits for its user."""
    return any(PROMPT.search(file) for file, _, _ in FRAME.findall(stack))


def where(stack: str) -> str:
    """The innermost frames, e.g. `wait (a.py, line 3) in forward (a.py, line 9)`."""
    frames = FRAME.findall(stack)
    users = list(takewhile(lambda frame: not frame[0].startswith(HOUSE), frames))
    return shown(users or frames[:1])


def shown(frames: list[tuple[str, str, str]]) -> str:
    calls = [f"{name} ({os.path.basename(file)}, line {line})" for file, line, name in frames]
    return " in ".join(calls[:FRAMES])


def verdict(stack: str, seconds: float, *, who: str = "it") -> str:
    """The last line of a run that hung."""
    place = where(stack)
    return (
        f"dpframe: no step, batch or checkpoint came for trainer.hang_seconds={seconds:g}; "
        f"{who} hangs{f' in {place}' if place else ''}; fix that, raise trainer.hang_seconds, or "
        "set it to null"
    )


# ---- the watcher


class Watcher:
    """A process that watches this one where no parent of dpframe's does.

    A thread can't: a C extension that keeps the GIL stops it. Python's handlers of signals and
    those of faulthandler are C, so the watcher learns of every signal and gets the stack. It ends
    what can't end itself by SIGKILL.
    """

    def __init__(self, hang_seconds: float | None, *, grace_seconds: float, is_quiet: bool) -> None:
        self._hang_seconds = hang_seconds
        self._arguments = (hang_seconds or 0, grace_seconds, int(is_quiet))

    def __enter__(self) -> None:
        import faulthandler
        import subprocess

        read, self._pulse = os.pipe()
        stacks, self._stacks = os.pipe()
        faulthandler.register(STACK, file=self._stacks, all_threads=False)
        self._handler = signal.signal(EXIT, _exit)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the watcher inherits it
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *map(str, (read, stacks, *self._arguments))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(read, stacks),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(read)
            os.close(stacks)
        start(self._pulse, self._hang_seconds)
        self._wakeup = signal.set_wakeup_fd(self._pulse, warn_on_full_buffer=False)

    def __exit__(self, *_: Any) -> None:
        import faulthandler

        stop()
        signal.set_wakeup_fd(self._wakeup)
        with suppress(OSError):
            os.write(self._pulse, OVER)
        try:
            self._process.wait(END_SECONDS)
        except Exception:  # e.g. it is stopped
            self._process.kill()
            self._process.wait()
        faulthandler.unregister(STACK)
        signal.signal(EXIT, self._handler)
        os.close(self._pulse)
        os.close(self._stacks)


def _exit(number: int, frame: Any) -> None:
    os._exit(1)  # the watcher has said why


def _watch(
    pulse: int, stacks: int, hang_seconds: float, grace_seconds: float, is_quiet: bool
) -> None:
    """The watcher's work, until the process that started it is done or has ended."""
    parent = os.getppid()
    hang_seconds = hang_seconds or float("inf")
    tick = max(0.02, min(1.0, hang_seconds / 4, grace_seconds / 4))
    clock, beaten_at = Clock(tick), 0.0
    number, killed_at = 0, float("inf")
    while os.getppid() == parent:
        news = b""
        if select.select([pulse], [], [], tick)[0]:
            news = os.read(pulse, 4096) or OVER
        now = clock.seconds(counts=not is_stopped(parent))
        if OVER in news:
            return
        if BEAT in news:
            beaten_at = now
        signals = [byte for byte in news if byte in SIGNALS]
        if signals and not number:
            # It ends itself when the grace period is over, if it can.
            number, killed_at = signals[0], now + grace_seconds + END_SECONDS
        if now >= killed_at:
            name = signal.Signals(number).name
            late = f"not done in trainer.grace_seconds={grace_seconds:g}, so killed"
            _say("" if is_quiet else f"dpframe: interrupted by {name}, {late}\n")
            os.kill(parent, signal.SIGKILL)
            return
        if now - beaten_at >= hang_seconds:
            stack = stack_of(parent, asked_by=STACK, pipe=stacks)
            if not is_at_prompt(stack):
                rank = os.environ.get("RANK")  # torchrun's
                who = f"rank {rank}" if rank else "it"
                _say(f"{stack}\n{verdict(stack, hang_seconds, who=who)}\n")
                _end(parent)
                return
            beaten_at = now


def _end(parent: int) -> None:
    """With exit code 1, unless it never leaves C code."""
    os.kill(parent, EXIT)
    deadline = time.monotonic() + END_SECONDS
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.01)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode())


if __name__ == "__main__":
    _hang, _grace, _is_quiet = map(float, sys.argv[3:6])
    _watch(int(sys.argv[1]), int(sys.argv[2]), _hang, _grace, bool(_is_quiet))
    os._exit(0)
