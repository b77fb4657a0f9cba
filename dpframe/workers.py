"""Data workers that are killed, hang or stop: one line says which, and what to do about it."""

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

from dpframe import interruption, orphans
from dpframe.errors import Failure
from dpframe.heartbeat import FRAME, Clock, is_stopped, shown

STACK_SECONDS = 2.0  # for a hung worker's to come
WHOLE = re.compile(r"in _bootstrap\b|in <module>")
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
        self.timeout_seconds = timeout_seconds  # 0: for ever
        self.stacks = Stacks() if count else None
        if count:
            orphans.share_sockets()

    def start(self, number: int) -> None:
        """In a worker, first thing."""
        interruption.leave_to_parent()
        if self.stacks is not None:
            self.stacks.mind()

    @contextmanager
    def watched(self, batches: Any) -> Iterator[Iterator[Any]]:
        """The batches. A worker that is lost or hangs is one line; any other error goes on."""
        if not self.count:
            yield batches
            return
        _tell_of_the_killed()
        watch = _Watch(self, batches)
        try:
            yield watch.batches()
        except Exception as error:
            lost = watch.hung or _killed(str(error), batches)
            batches._shutdown_workers()  # else they live for as long as the traceback does
            if lost is None:
                raise
            raise lost from None
        finally:
            watch.close()


class _Watch:
    """A thread that ends the workers where a batch does not come in time.

    A timeout of the DataLoader's own would not do. It counts seconds in which the whole job is
    stopped, and it does not cover the wait for a tensor's memory, which a worker hands over by a
    thread of its own: a worker that is stopped, or keeps its GIL, never does. Ending the workers
    ends that wait.
    """

    def __init__(self, workers: Workers, batches: Any) -> None:
        self.hung: Failure | None = None
        self._workers = workers
        self._batches = batches
        self._asked = 0  # batches so far
        self._is_waiting = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None  # one not started would keep the workers
        if workers.timeout_seconds:
            self._thread = threading.Thread(target=self._look, name="data watch", daemon=True)
            self._thread.start()

    def batches(self) -> Iterator[Any]:
        while True:
            self._asked += 1
            self._is_waiting = True
            try:
                batch = next(self._batches)
            except StopIteration:
                return
            finally:
                self._is_waiting = False
            yield batch

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        patience = self._workers.timeout_seconds
        tick = min(1.0, patience / 4)
        clock, asked, since = Clock(tick), 0, 0.0
        while not self._over.wait(tick):
            now = clock.seconds()
            if not self._is_waiting or self._asked != asked:
                asked, since = self._asked, now
            elif now - since >= patience:
                self.hung = self._blamed()
                for worker in self._batches._workers:
                    _ENDED[worker.pid] = self.hung
                    worker.kill()  # SIGTERM does not reach one that is stopped or spins
                return

    def _blamed(self) -> Failure:
        """The worker whose batch is waited for, unless it is idle and another is not."""
        workers, stacks = self._batches._workers, self._workers.stacks
        awaited = self._batches._task_info.get(self._batches._rcvd_idx, (0,))[0]
        for number in sorted(range(len(workers)), key=lambda number: number != awaited):
            pid = workers[number].pid
            if is_stopped(pid):
                how, fix = ": it is stopped, by SIGSTOP or a debugger", "continue it"
            elif stacks is not None and (where := stacks.of(pid)):
                how, fix = f", in {where}", "mend that"
            else:
                continue
            return self._failure(number, how, fix)
        return self._failure(awaited, "", "mend that")

    def _failure(self, number: int, how: str, fix: str) -> Failure:
        return Failure(
            f"data worker {number} (pid {self._batches._workers[number].pid}) has given nothing "
            f"for {self._workers.timeout_seconds:g} s{how}; {fix}, or raise "
            "trainer.data_timeout_seconds"
        )


_ENDED: dict[int, Failure] = {}  # by us, and why


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
        """Where it reads, as `wait (data.py, line 3) in __getitem__ (data.py, line 9)`."""
        if self._file is None:
            return ""
        before = os.fstat(self._file).st_size
        os.kill(pid, signal.SIGUSR2)
        deadline = time.monotonic() + STACK_SECONDS
        text = ""
        while not WHOLE.search(text) and time.monotonic() < deadline:
            time.sleep(0.02)
            text = os.pread(self._file, 65536, before).decode(errors="replace")
        frames = FRAME.findall(text)
        if not any(OURS.search(file) for file, _, _ in frames):
            return ""  # it is idle
        return shown(list(takewhile(lambda frame: not OURS.search(frame[0]), frames)))


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
    for pid in re.findall(r"\d+", pids):
        if int(pid) in _ENDED:
            return _ENDED[int(pid)]
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
