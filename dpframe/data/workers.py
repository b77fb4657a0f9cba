"""Data workers: how many pay off, and one line for a worker that dies or hangs."""

import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from dpframe import seeding
from dpframe.data.answers import Answers
from dpframe.data.contents import Contents, changed
from dpframe.data.reading import Rows
from dpframe.data.worker_watch import NotBegun, WorkerWatch
from dpframe.devices.accelerator import cores
from dpframe.errors import UserError
from dpframe.launch import signals, watchdog

SLOW_SECONDS = 0.005  # to read a batch; a worker takes about 0.002 to hand one over
MAX_WORKERS = 8
END = object()  # of an epoch
BEGIN_AGAIN = (
    "data workers begin again before each epoch where the data set has changed, as %s has; "
    "data.persistent_workers=true keeps them as they are"
)
HAVE_IT_LATER = (
    "%s has changed within an epoch: data workers have it from the next one on; "
    "data.workers=0 has it at once"
)

log = logging.getLogger("dpframe")


class WorkerCount(NamedTuple):
    """How many processes read, and why."""

    processes: int = 0
    why: str = ""

    def described(self) -> str:
        """For the banner, e.g. `2 workers: a batch takes 31 ms to read`."""
        many = f"{self.processes} worker{'s' if self.processes > 1 else ''}"
        where = many if self.processes else "in this process"
        return f"{where}: {self.why}" if self.why else where


def measured(rows: Rows, *, share: int, cores: int, seed: int) -> WorkerCount:
    """`data.workers=auto`: reads two batches of `share` rows, and puts the random state back."""
    if rows.is_stream or rows.are_tensors:
        return WorkerCount()
    with seeding.seeded(seed):
        return chosen(_seconds_of_a_batch(rows, share), cores)


def chosen(seconds: float, cores: int) -> WorkerCount:
    count = min(cores, MAX_WORKERS) if seconds > SLOW_SECONDS else 0
    return WorkerCount(count if count > 1 else 0, f"a batch takes {1e3 * seconds:.2g} ms to read")


def cores_per_rank(world_size: int) -> int:
    # torchrun and dpframe's launch set it; where it is unknown, all ranks count as being here.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size) if world_size > 1 else 1
    return cores() // ranks


def _seconds_of_a_batch(rows: Rows, share: int) -> float:
    """Times the second batch: the first one opens files and imports what it needs."""
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


class DataWorkers:
    """The workers of a DataLoader, which answer requests in their order. Call `read`: the rest is
    private to it.

    A worker that dies or hangs is one line, of `WorkerWatch`; other errors pass. A thread waits for
    the answers: the DataLoader's `timeout` counts seconds in which the whole job is stopped, and
    does not cover the transfer of a tensor's memory, which waits for ever for a worker that is
    stopped or keeps its GIL. The end of the workers ends that wait.

    Forked workers that have not begun in time are killed and started again before they are asked
    for anything: a fork may inherit a lock that nobody will release, e.g. the interpreter's own.
    """

    def __init__(
        self,
        answer: Callable[..., Any],
        count: int,
        *,
        rows: Rows,
        timeout_seconds: float = 0.0,
        worker_init_fn: Callable[[int], Any] | None = None,
        persistent_workers: bool | str = "auto",
        **options: Any,
    ) -> None:
        """`answer` reads `rows`. No timeout is 0; `options` are those of a DataLoader. "auto" are
        persistent workers that end where the rows that they have are not those of this process."""
        signals.share_sockets()
        self.count = count
        self._timeout_seconds = timeout_seconds
        self._watched = WorkerWatch(count)
        self._requests = _Requests()
        self._generator = torch.Generator()
        self._loader: DataLoader | None = None  # its workers begin with the first epoch
        self._rows = rows
        self._had: Contents | None = None  # what the rows had when the workers began
        self._looks = persistent_workers == "auto"
        self._said: set[str] = set()
        self._new_loader = partial(
            DataLoader,
            Answers(answer, rows.dataset, self._watched.is_reading, worker_init_fn),
            sampler=self._requests,
            batch_size=None,
            num_workers=count,
            collate_fn=unchanged,
            generator=self._generator,
            worker_init_fn=self._watched.begin,
            persistent_workers=bool(persistent_workers),
            **options,
        )

    def end_if_changed(self) -> None:
        """Before the data set is told of the next epoch, of which workers are told as well."""
        if self._has_changed(BEGIN_AGAIN):
            self._loader = None
            self._watched.forget()

    def warn_if_changed(self) -> None:
        """At the end of an epoch, before hooks set what the next one has."""
        self._has_changed(HAVE_IT_LATER)

    def _has_changed(self, line: str) -> bool:
        """Whether this process has other rows than its workers, which is said once."""
        if self._loader is None or self._had is None:
            return False
        name = changed(self._had, self._rows.contents())
        if name and line not in self._said:
            self._said.add(line)
            log.warning(line, name)
        return bool(name)

    def read(self, requests: Iterable[tuple], seed: int) -> Iterator[Any]:
        """The answers; `seed` is what the generators of workers that start now start from."""
        self._requests.items = requests
        with ThreadPoolExecutor(1, thread_name_prefix="data") as thread:
            try:
                yield from self._received(thread, seed)
            except GeneratorExit:
                raise
            except BaseException as error:
                raise self._ended(error) from None

    def _received(self, thread: ThreadPoolExecutor, seed: int) -> Iterator[Any]:
        answers = self._started(seed)
        tick = min(1.0, self._timeout_seconds / 4)
        while True:
            answer, clock = thread.submit(next, answers, END), watchdog.Clock(tick)
            while not wait([answer], tick or None).done:
                if clock.seconds() >= self._timeout_seconds:
                    raise self._watched.hang(self._timeout_seconds)
            result = answer.result()
            if result is END:
                return
            if isinstance(result, UserError):
                raise result
            yield result

    def _started(self, seed: int) -> Iterator[Any]:
        """Each try has the same seeds, and no request was taken from the epoch before it."""
        for seconds in (*watchdog.BEGIN_SECONDS, None):  # None: as long as an answer may take
            self._generator.manual_seed(seed)
            try:
                answers = self._opened(seconds)
                self._had = self._rows.contents() if self._looks else None
                return answers
            except NotBegun as error:
                self._watched.kill()  # first: torch waits for workers that it ends itself
                # By its words: the error itself would keep what is left of the DataLoader.
                log.warning("%s; all data workers are started again", str(error))
        raise AssertionError

    def _opened(self, begin_seconds: float | None) -> Iterator[Any]:
        """Starts the workers, unless they are there, and waits until all have begun.

        Puts torch's handler of SIGCHLD away: it raises wherever the main thread is, e.g. in a step.
        The wait for an answer ends without it, too, when a worker has died."""
        handler = signal.getsignal(signal.SIGCHLD)
        if self._loader is None:
            self._loader = self._new_loader(multiprocessing_context=self._watched.context())
        if not self._loader.persistent_workers:
            self._watched.forget()
        if begin_seconds is not None and self._starts_by_fork():  # a new interpreter takes seconds
            # Not for longer: a cycle would keep the workers until Python looks for cycles.
            self._requests.wait_for_begin = partial(self._watched.wait_for_begin, begin_seconds)
        try:
            return iter(self._loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            if self._starts_by_fork():
                raise
            raise UserError(
                f"data workers can't get the data set {type(self._rows.dataset).__name__}: "
                f"{type(error).__name__}: {error}; make it one that can be pickled, or set "
                "data.workers=0"
            ) from error
        finally:
            self._requests.wait_for_begin = None
            if handler is not None and signal.getsignal(signal.SIGCHLD) is not handler:
                signal.signal(signal.SIGCHLD, handler)

    def _starts_by_fork(self) -> bool:
        assert self._loader is not None
        return bool(self._loader.multiprocessing_context.get_start_method() == "fork")

    def _ended(self, error: BaseException) -> BaseException:
        """Ends the workers; what to raise. Torch's frames would keep the workers' queues, and
        nobody needs those: the message of an error from a worker has that worker's traceback."""
        death = None
        if not isinstance(error, UserError):
            # A worker that dies closes its sockets first, so its end may have to be waited for.
            death = self._watched.death(1.0 if isinstance(error, EOFError | OSError) else 0.0)
        self._watched.kill()
        self._loader = None
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return death or error


class _Requests:
    """The sampler of a DataLoader: what its workers are asked for in the epoch that begins."""

    items: Iterable[tuple] = ()
    wait_for_begin: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[tuple]:
        if self.wait_for_begin is not None:  # with the first request: all workers are started
            self.wait_for_begin()
        yield from self.items


def unchanged(value: Any) -> Any:
    return value
