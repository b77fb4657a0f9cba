"""Signs of life: what is counted while a run makes progress, and the process that looks at it.

Run as a program, this file is that process: it needs nothing but Python, and starts in 20 ms.
"""

import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STACKS = getattr(signal, "SIGRTMIN", signal.SIGUSR1)  # asks for them; users have plans for USR1
STACK_SECONDS = 1.0  # for them to come
END_SECONDS = 1.0  # for a process to end by itself
BEAT, OVER, END = b".", b"q", b"x"  # to the watcher, and from it
HOUSE = str(Path(__file__).parent) + os.sep
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
FRAMES = 4
OURS = re.compile(r'interruption\.py", line \d+ in _watch\b')  # a thread of no interest
WORK = re.compile(r'(run\.py", line \d+ in _work|member\.py", line \d+ in live)\b')  # the main one
DEBUGGERS = ("pydevd", "debugpy")
PROMPTS = ("pdb", "bdb", "cmd", "code")  # the main thread is at a debugger's


class Beats:
    count = 0


beats = Beats()  # `beats.count += 1` is a step, a batch, or anything else that was got done


def beat() -> None:
    beats.count += 1


def is_debugged() -> bool:
    """Asked in the main thread. A breakpoint that is set later is seen by `is_at_prompt`."""
    return sys.gettrace() is not None or any(name in sys.modules for name in DEBUGGERS)


def is_at_prompt(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__") in PROMPTS:
            return True
        frame = frame.f_back
    return False


class Clock:
    """Seconds in which this process ran, if it is read every `tick` seconds or more often.

    A monotonic clock also counts what Ctrl-Z, SIGSTOP or a paused container takes.
    """

    def __init__(self, tick: float = 1.0) -> None:
        self._tick = tick
        self._seconds = 0.0
        self._read_at = time.monotonic()

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._read_at, self._tick)
        self._read_at = now
        return self._seconds


def is_stopped(pid: int) -> bool:
    """By a signal or a debugger, as far as the system says."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


def main_thread_last(dump: str) -> str:
    """faulthandler's threads without the one that waits for signals, and without what is above
    the work itself."""
    threads = [part for part in dump.strip().split("\n\n") if not OURS.search(part)]
    if not any(threads):
        return "it gave none: it is stopped, or in the kernel"
    text = "\n\n".join(sorted(threads, key=lambda part: bool(WORK.search(part))))
    text = re.sub(r'(run\.py", line \d+ in _work)\n.*', r"\1", text, flags=re.S)
    return re.sub(r'\n[^\n]*member\.py", line \d+ in live\n.*', "", text, flags=re.S)


def where(stack: str) -> str:
    """Its main thread's innermost frames, as `wait (a.py, line 3) in forward (a.py, line 9)`."""
    frames = FRAME.findall(stack.rpartition("\n\n")[2])
    own = list(takewhile(lambda frame: not frame[0].startswith(HOUSE), frames)) or frames[:1]
    return shown(own)


def shown(frames: list[tuple[str, str, str]]) -> str:
    told = [f"{name} ({os.path.basename(file)}, line {line})" for file, line, name in frames]
    return " in ".join(told[:FRAMES])


def told(stack: str, seconds: float, *, who: str = "it") -> str:
    """The last line of a run that hung."""
    at = where(stack)
    return (
        f"dpframe: no step, batch or checkpoint came for trainer.hang_seconds={seconds:g}; "
        f"{who} hangs{f' in {at}' if at else ''}; mend that, raise trainer.hang_seconds, or set it "
        "to null"
    )


class Watcher:
    """Another process that looks after this one, where no parent of ours does.

    A thread would not do: a C extension that keeps the GIL stops it. The signal handlers of
    Python and of faulthandler are C, so the watcher sees in the pipe `wakes` which signal came,
    and gets the stacks; it ends what can't end itself by SIGKILL.
    """

    def __init__(
        self, wakes: int, *, hang_seconds: float | None, grace_seconds: float, is_quiet: bool
    ) -> None:
        import faulthandler
        import subprocess

        self.link, theirs = _pair()
        read, self._stacks = os.pipe()
        faulthandler.register(STACKS, file=self._stacks, all_threads=True)
        numbers = [theirs, wakes, read, hang_seconds or 0, grace_seconds, int(is_quiet)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for ever, in the watcher
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs, wakes, read),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(theirs)
            os.close(read)

    def send(self, kind: str, value: Any) -> None:
        os.write(self.link, bytes([value]) if kind == "signalled" else BEAT)

    def close(self) -> None:
        import faulthandler

        with suppress(OSError):
            os.write(self.link, OVER)
        try:
            self._process.wait(END_SECONDS)
        except Exception:  # it is stopped, say
            self._process.kill()
            self._process.wait()
        faulthandler.unregister(STACKS)
        os.close(self.link)
        os.close(self._stacks)


def _pair() -> tuple[int, int]:
    import socket

    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


# ---- the watcher


class _Watch:
    def __init__(
        self, link: int, wakes: int, stacks: int, hang: float, grace: float, is_quiet: bool
    ) -> None:
        self.parent = os.getppid()
        self.link, self.wakes, self.stacks = link, wakes, stacks
        self.hang_seconds = hang or float("inf")
        self.grace_seconds, self.is_quiet = grace, is_quiet
        self.number: int | None = None
        self.now = self.beaten_at = self.signalled_at = 0.0
        self.unread_at: float | None = None

    def run(self) -> None:
        tick = max(0.02, min(1.0, self.hang_seconds / 4, self.grace_seconds / 4))
        clock, before = Clock(tick), 0.0
        while os.getppid() == self.parent:
            ready = select.select([self.link], [], [], tick)[0]
            seconds = clock.seconds()
            if not is_stopped(self.parent):
                self.now += seconds - before
            before = seconds
            if ready and not self._hear():
                return
            self._look_at_signals()
            grace = self.grace_seconds + END_SECONDS  # it would rather end by itself
            if self.number is not None and self.now - self.signalled_at >= grace:
                self._say_that_grace_is_over()
                os.kill(self.parent, signal.SIGKILL)
                return
            if self.now - self.beaten_at >= self.hang_seconds:
                self._say_that_it_hangs()
                self._end()
                return

    def _hear(self) -> bool:
        """Whether there is more to watch."""
        try:
            news = os.read(self.link, 4096)
        except OSError:  # it is gone
            return False
        if BEAT in news:
            self.beaten_at = self.now
        self._note([number for number in news if number in SIGNALS], self.now)
        return bool(news) and OVER not in news

    def _look_at_signals(self) -> None:
        """A signal that nobody has read in all that time: the interpreter does not run."""
        if not select.select([self.wakes], [], [], 0)[0]:
            self.unread_at = None
        elif self.unread_at is None:
            self.unread_at = self.now
        elif self.now - self.unread_at >= self.grace_seconds:
            with suppress(BlockingIOError):
                came = os.read(self.wakes, 4096)
                self._note([number for number in came if number in SIGNALS], self.unread_at)

    def _note(self, numbers: list[int], at: float) -> None:
        if numbers and self.number is None:
            self.number, self.signalled_at = numbers[0], at

    def _say_that_grace_is_over(self) -> None:
        assert self.number is not None
        name = signal.Signals(self.number).name
        if not self.is_quiet:
            _say(
                f"dpframe: interrupted by {name}, not done in trainer.grace_seconds="
                f"{self.grace_seconds:g}, so killed\n"
            )

    def _say_that_it_hangs(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.parent, STACKS)
        stack = main_thread_last(b"".join(_parts(self.stacks)).decode(errors="replace"))
        rank = os.environ.get("RANK")  # torchrun's
        who = f"rank {rank}" if rank else "it"
        _say(f"{stack}\n{told(stack, self.hang_seconds, who=who)}\n")

    def _end(self) -> None:
        """With exit code 1, unless the interpreter does not run."""
        with suppress(OSError):
            os.write(self.link, END)
        deadline = time.monotonic() + END_SECONDS
        while os.getppid() == self.parent and time.monotonic() < deadline:
            time.sleep(0.01)
        if os.getppid() == self.parent:
            os.kill(self.parent, signal.SIGKILL)


def _parts(stacks: int) -> Iterator[bytes]:
    seconds = STACK_SECONDS
    while select.select([stacks], [], [], seconds)[0]:
        yield os.read(stacks, 65536)
        seconds = 0.1


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode())


if __name__ == "__main__":
    _link, _wakes, _stacks = map(int, sys.argv[1:4])
    _hang, _grace, _is_quiet = map(float, sys.argv[4:7])
    _Watch(_link, _wakes, _stacks, _hang, _grace, bool(_is_quiet)).run()
    os._exit(0)
