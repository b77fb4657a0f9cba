"""Data workers that are killed or hang: one line says which, and what may be done about it."""

import faulthandler
import os
import re
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

from dpframe import interruption
from dpframe.errors import Failure

STACK_SECONDS = 2.0  # for a hung worker's to come
FRAMES = 4
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
OURS = re.compile(r"dpframe/(reading|data)\.py$")
MEANING = {
    "SIGKILL": "perhaps for memory: try a smaller data.workers or data.batch_size",
    "SIGBUS": "there was no shared memory left: raise the limit of /dev/shm, or set data.workers=0",
    "SIGSEGV": "a library that it calls is broken: data.workers=0 may show where",
}


class Chosen(NamedTuple):
    """How many read, why, and whether the rows draw their random numbers in them."""

    processes: int
    why: str
    draws_apart: bool


def chosen(given: int | Chosen, *, is_tensors: bool) -> Chosen:
    if isinstance(given, Chosen):
        return given
    return Chosen(given, "", draws_apart=given > 0 and not is_tensors)


class Workers:
    """How many a DataLoader has, and how long one of them is waited for."""

    def __init__(self, count: int, timeout_seconds: float = 0.0) -> None:
        self.count = count
        self.timeout_seconds = timeout_seconds if count else 0.0  # 0: for ever
        self.stacks = Stacks() if count else None

    def start(self, number: int) -> None:
        """In a worker, first thing."""
        interruption.leave_to_parent()
        if self.stacks is not None:
            self.stacks.mind()

    @contextmanager
    def watched(self, batches: Any) -> Iterator[None]:
        """What torch raises of a worker that is lost is one line; any other error goes on."""
        if self.count:
            _tell_of_the_killed()
        try:
            yield
        except Exception as error:
            lost = self._lost(error, batches) if isinstance(error, RuntimeError) else None
            if self.count:
                batches._shutdown_workers()  # else they live for as long as the traceback does
            if lost is None:
                raise
            raise lost from None

    def _lost(self, error: RuntimeError, batches: Any) -> Failure | None:
        text = str(error)
        if text.startswith("DataLoader timed out"):
            return self._hung(batches)
        return _killed(text, batches)

    def _hung(self, batches: Any) -> Failure:
        """Of the workers, the one whose batch is waited for."""
        number = batches._task_info[batches._rcvd_idx][0]
        pid = batches._workers[number].pid
        where = self.stacks.of(pid) if self.stacks is not None else ""
        return Failure(
            f"data worker {number} (pid {pid}) has given nothing for {self.timeout_seconds:g} s"
            f"{f', in {where}' if where else ''}; mend that, or raise trainer.data_timeout_seconds"
        )


class Stacks:
    """A file without a name that forked workers write their stacks to when they are asked."""

    def __init__(self) -> None:
        self._file, path = tempfile.mkstemp()
        os.unlink(path)
        weakref.finalize(self, os.close, self._file)

    def __getstate__(self) -> dict[str, Any]:
        return {"_file": None}  # a worker that is not forked does not have it

    def mind(self) -> None:
        """In a worker. A C handler: it works wherever the worker may hang. USR1 is its rank's."""
        if self._file is not None:
            faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=False)

    def of(self, pid: int) -> str:
        """Its innermost frames, as `wait (data.py, line 3) in __getitem__ (data.py, line 9)`."""
        os.kill(pid, signal.SIGUSR2)
        deadline = time.monotonic() + STACK_SECONDS
        text = ""
        while not FRAME.search(text) and time.monotonic() < deadline:
            time.sleep(0.02)
            text = os.pread(self._file, 65536, 0).decode(errors="replace")
        own = takewhile(lambda frame: not OURS.search(frame[0]), FRAME.findall(text))
        told = [f"{name} ({os.path.basename(file)}, line {line})" for file, line, name in own]
        return " in ".join(told[:FRAMES])


def _tell_of_the_killed() -> None:
    """Torch's handler of SIGCHLD raises wherever the main thread is: there, too, in our words."""
    before = signal.getsignal(signal.SIGCHLD)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before) or isinstance(before, _Handler):
        return
    signal.signal(signal.SIGCHLD, _Handler(before))


class _Handler:
    def __init__(self, before: Callable[[int, Any], Any]) -> None:
        self.before = before

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self.before(number, frame)
        except RuntimeError as error:
            raise _killed(str(error), None) or error from None


def _killed(text: str, batches: Any) -> Failure | None:
    found = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", text)
    if found is None:
        return None
    pids = found[1]
    by = re.search(r"by signal: ([^.]+)\.", text)
    names = {signal.strsignal(number): number.name for number in signal.Signals}
    name = names.get(by[1].strip(), by[1].strip()) if by else _signal_of(pids, batches)
    if name:
        meaning = MEANING.get(name, "look for who sent it")
        return Failure(f"data worker (pid {pids}) was killed by {name}; {meaning}")
    return Failure(f"data worker (pid {pids}) left by itself; data.workers=0 may show why")


def _signal_of(pids: str, batches: Any) -> str:
    for worker in getattr(batches, "_workers", ()):
        if str(worker.pid) in pids and worker.exitcode is not None and worker.exitcode < 0:
            return signal.Signals(-worker.exitcode).name
    return ""
