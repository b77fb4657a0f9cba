"""Data workers: how many pay off, and one line for a worker that dies or hangs."""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import connection
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dpframe import interruption, seeding
from dpframe.data.rows import Rows
from dpframe.errors import Failure, UserError, exited
from dpframe.heartbeat import Clock, is_stopped
from dpframe.heartbeat import where as place_in

SLOW_SECONDS = 0.005  # to read a batch; a worker takes about 0.002 to hand one over
MAX_WORKERS = 8
STACK_SECONDS = 2.0  # to wait for the stack of a worker that hangs
IDLE = -1
MEANING = {
    "SIGKILL": "perhaps for memory: try a smaller data.workers or data.batch_size",
    "SIGBUS": "there was no shared memory left: raise the limit of /dev/shm, or set data.workers=0",
    "SIGSEGV": "a library that it calls is broken: data.workers=0 may show where",
}


class Workers(NamedTuple):
    """How many processes read, why, and whether rows draw their random numbers there."""

    processes: int = 0
    why: str = ""
    draws_apart: bool = False

    def described(self) -> str:
        """For the banner, e.g. `2 workers: a batch takes 31 ms to read`."""
        many = f"{self.processes} worker{'s' if self.processes > 1 else ''}"
        where = many if self.processes else "in this process"
        return f"{where}: {self.why}" if self.why else where


def measured(rows: Rows, *, share: int, cores: int, seed: int) -> Workers:
    """`data.workers=auto`: reads two batches of `share` rows, and puts the random state back."""
    if rows.is_stream or rows.are_tensors:
        return Workers()
    with seeding.seeded(seed):
        before = seeding.random_state()
        seconds = _seconds_of_a_batch(rows, share)
        draws = not _is_same(before, seeding.random_state())
    return chosen(seconds, cores, draws=draws)


def chosen(seconds: float, cores: int, *, draws: bool) -> Workers:
    """Rows that draw random numbers get a worker on every machine. There they draw by the share,
    whatever the number of workers, so this choice never decides what they draw."""
    why = f"a batch takes {1e3 * seconds:.2g} ms to read"
    count = min(cores, MAX_WORKERS) if seconds > SLOW_SECONDS else 0
    if draws:
        return Workers(max(1, count), f"{why}, and draws random numbers", draws_apart=True)
    return Workers(count if count > 1 else 0, why)


def cores_per_rank(world_size: int) -> int:
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        count = os.cpu_count() or 1
    # torchrun and our launch set it; where it is unknown, all ranks count as being here.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size) if world_size > 1 else 1
    return count // ranks


def _seconds_of_a_batch(rows: Rows, share: int) -> float:
    """Of the second batch: the first one opens files and imports what it needs."""
    seconds = 0.0
    for start in (0, share if len(rows.dataset) >= 2 * share else 0):
        numbers = list(range(start, min(start + share, len(rows.dataset))))
        began = time.perf_counter()
        try:
            rows.read(numbers)
        except Exception:  # training meets it too, and reports it as any other
            return 0.0
        seconds = time.perf_counter() - began
    return seconds


def _is_same(a: Any, b: Any) -> bool:
    """Of random states; a generator that was imported in between has not drawn yet."""
    if isinstance(a, dict):
        return all(_is_same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


class Refusal(NamedTuple):
    """The line of a UserError in a worker. Torch would turn a raised one into a traceback."""

    line: str
    kind: type[UserError]


class Status:
    """What each worker is reading, in shared memory, and the file that its stack goes to."""

    def __init__(self, count: int) -> None:
        self.items = torch.full((count,), IDLE).share_memory_()
        self.pids = torch.zeros(count, dtype=torch.int64).share_memory_()
        self._stacks: Any = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._stacks.close)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stacks": None}  # only a forked worker has the file

    def start(self, number: int) -> None:
        """In a worker, first. faulthandler's handler is C: it works wherever the worker hangs."""
        interruption.leave_to_parent()
        self.pids[number] = os.getpid()
        if self._stacks is not None:
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=False)

    def answer(self, item: int, call: Callable[..., Any], *args: Any) -> Any:
        """In a worker, which is known to read this item meanwhile: what the call returns."""
        info = get_worker_info()
        assert info is not None
        self.items[info.id] = item
        try:
            return call(*args)
        except UserError as error:
            return Refusal(str(error), type(error))
        except SystemExit as error:
            return Refusal(str(exited(error, who=f"data worker {info.id}: ")), Failure)
        finally:
            self.items[info.id] = IDLE

    def oldest_first(self) -> list[int]:
        """The workers, those that read the oldest items first, and the idle ones last."""
        items = self.items.tolist()
        return sorted(range(len(items)), key=lambda number: (items[number] == IDLE, items[number]))

    def place_of(self, number: int) -> str:
        """Where a worker reads, e.g. `wait (data.py, line 3) in __getitem__ (data.py, line 9)`."""
        start = os.fstat(self._stacks.fileno()).st_size
        os.kill(int(self.pids[number]), signal.SIGUSR2)
        deadline, stack, before = time.monotonic() + STACK_SECONDS, "", None
        while stack != before or (not stack and time.monotonic() < deadline):
            time.sleep(0.05)
            before = stack
            stack = os.pread(self._stacks.fileno(), 2**16, start).decode(errors="replace")
        return place_in(stack)


class Processes:
    """The workers of a DataLoader. A worker that dies or hangs is one line; other errors pass."""

    def __init__(
        self,
        dataset: Dataset,
        status: Status,
        *,
        sampler: Iterable | None = None,
        timeout_seconds: float = 0.0,
        pin_memory: bool = False,
    ) -> None:
        """Without a sampler, for a stream, the workers start afresh each epoch."""
        interruption.share_sockets()
        self._status = status
        self._timeout_seconds = timeout_seconds  # 0: none
        self._generator = torch.Generator()
        self._processes: dict[int | None, Any] = {}  # by pid
        self._loader: DataLoader | None = None  # its workers begin with the first epoch
        self._new_loader = partial(
            DataLoader,
            dataset,
            sampler=sampler,
            batch_size=None,
            num_workers=len(status.pids),
            persistent_workers=sampler is not None,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            generator=self._generator,
            worker_init_fn=status.start,
        )

    def read(self, seed: int) -> Iterator[Any]:
        """An epoch's items; `seed` is what the workers' own generators start from."""
        self._generator.manual_seed(seed)
        watch = _Watch(self._timeout_seconds, self._hang)
        try:
            for item in watch.watched(self._started()):
                if type(item) is Refusal:
                    raise item.kind(item.line)
                yield item
        except Exception as error:
            watch.close()
            raise self._ended(watch.failure, error) from None
        finally:
            watch.close()

    def _ended(self, hang: Failure | None, error: Exception) -> Exception:
        """Ends the workers; what to raise. Torch's frames would keep them, and nobody needs those:
        the message of an error from a worker has that worker's traceback."""
        reason = hang
        if reason is None and not isinstance(error, UserError):
            # A worker that dies closes its sockets first, so its end may have to be waited for.
            reason = self._death(1.0 if isinstance(error, EOFError | OSError) else 0.0)
        self._kill()
        self._loader = None
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return reason or error

    def _started(self) -> Iterator[Any]:
        """Puts torch's handler of SIGCHLD away: it raises wherever the main thread is, e.g. in a
        step. The wait for an item ends without it, too, when a worker has died."""
        handler, before = signal.getsignal(signal.SIGCHLD), multiprocessing.active_children()
        if self._loader is None:
            self._loader = self._new_loader()
        items = iter(self._loader)
        if handler is not None and signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)
        started = [child for child in multiprocessing.active_children() if child not in before]
        if started:  # else those of the epoch before go on
            self._processes = {child.pid: child for child in started}
        return items

    def _hang(self) -> Failure:
        """Ends the workers, and says which one hangs and where."""
        silence = f"returned nothing for {self._timeout_seconds:g} s"
        advice = "raise trainer.data_timeout_seconds"
        failure = Failure(
            f"the data workers have {silence}, while none of them was reading; {advice}"
        )
        for number in self._status.oldest_first():
            pid = int(self._status.pids[number])
            if is_stopped(pid):
                how, fix = ": it is stopped, by SIGSTOP or a debugger", "continue it"
            elif self._status.items[number] != IDLE:
                place = self._status.place_of(number)
                how, fix = f", in {place}" if place else "", "fix that"
            else:
                continue
            worker = f"data worker {number} (pid {pid})"
            failure = Failure(f"{worker} has {silence}{how}; {fix}, or {advice}")
            break
        self._kill()
        return failure

    def _death(self, wait_seconds: float) -> Failure | None:
        sentinels = {process.sentinel: process for process in self._processes.values()}
        for sentinel in connection.wait(sentinels, wait_seconds):
            sentinels[sentinel].join()
        for number, pid in enumerate(self._status.pids.tolist()):
            code = self._processes[pid].exitcode if pid in self._processes else None
            if code is None:
                continue
            if code >= 0:
                how, fix = f"exited with code {code}", "data.workers=0 may show why"
            else:
                name = signal.Signals(-code).name
                how, fix = f"was killed by {name}", MEANING.get(name, "look for who sent it")
            return Failure(f"data worker {number} (pid {pid}) {how}; {fix}")
        return None

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()  # SIGTERM does not reach one that is stopped, or that keeps its GIL
        for process in self._processes.values():
            process.join()
        self._processes.clear()


def _unchanged(batch: Any) -> Any:
    return batch


class _Watch:
    """A thread that calls `hang`, which has to end the workers, when an item does not come in time.

    The DataLoader's `timeout` counts seconds in which the whole job is stopped. It does not cover
    the transfer of a tensor's memory either, which waits for a thread of the worker: one that is
    stopped, or keeps its GIL, never serves it. The end of the workers ends that wait.
    """

    def __init__(self, timeout_seconds: float, hang: Callable[[], Failure]) -> None:
        self.failure: Failure | None = None
        self._timeout_seconds = timeout_seconds
        self._hang = hang
        self._asked = 0  # items so far
        self._is_waiting = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def watched(self, items: Iterator[Any]) -> Iterator[Any]:
        if self._timeout_seconds:
            self._thread = threading.Thread(target=self._look, name="data watch", daemon=True)
            self._thread.start()
        while True:
            self._asked += 1
            self._is_waiting = True
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._is_waiting = False
            yield item

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        tick = min(1.0, self._timeout_seconds / 4)
        clock, asked, since = Clock(tick), 0, 0.0
        while not self._over.wait(tick):
            now = clock.seconds()
            if not self._is_waiting or self._asked != asked:
                asked, since = self._asked, now
            elif now - since >= self._timeout_seconds:
                self.failure = self._hang()
                return
