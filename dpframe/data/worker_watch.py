"""The processes of a DataLoader: whether they have begun, and in a line how one died or hangs."""

import copy
import faulthandler
import multiprocessing
import signal
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import connection
from typing import Any

import torch
from torch import Tensor

from dpframe.errors import Failure
from dpframe.launch import signals, watchdog

LOOK_SECONDS = 0.001  # between two looks at whether all workers have begun
MEANING = {
    "SIGKILL": "perhaps for memory: try a smaller data.workers or data.batch_size",
    "SIGBUS": "there was no shared memory left: raise the limit of /dev/shm, or set data.workers=0",
    "SIGSEGV": "a library that it calls is broken: data.workers=0 may show where",
}


class NotBegun(Exception):
    """A worker is a process that does nothing yet."""


class WorkerWatch:
    """The workers that are started, in their order, and what they tell of themselves."""

    def __init__(self, count: int) -> None:
        self.is_reading = torch.zeros(count, dtype=torch.bool).share_memory_()  # they set both
        self._has_begun = torch.zeros(count, dtype=torch.bool).share_memory_()
        self._stacks, stacks = multiprocessing.Pipe(duplex=False)
        self.begin = partial(_begin, self._has_begun, stacks)  # in each, first
        self._made: list[Any] = []  # with those that can't be started

    def context(self) -> Any:
        """As multiprocessing has it, with events that a killed worker can't keep locked: the
        DataLoader sets one when it ends its workers, and would wait for ever. The processes that it
        makes are kept: those that have died are no active children of multiprocessing's."""
        method = multiprocessing.get_start_method(allow_none=True)
        if sys.platform == "linux" and method in (None, multiprocessing.get_all_start_methods()[0]):
            method = "fork"  # not Python 3.14's default, whose workers begin in seconds
        context: Any = copy.copy(multiprocessing.get_context(method))
        context.Event = _Event
        context.Process = partial(_process, context.Process, self._made)
        return context

    def wait_for_begin(self, seconds: float) -> None:
        """When all workers were started, and none was asked for anything yet."""
        sentinels = [process.sentinel for process in self._processes]
        clock = watchdog.Clock()
        # A worker that has died is told by the wait for its answer.
        while not self._has_begun.all() and not connection.wait(sentinels, LOOK_SECONDS):
            late = [(number, pid) for number, pid, has_begun in self._numbered() if not has_begun]
            if late and clock.seconds() >= seconds:
                who = "data worker {} (pid {})".format(*late[0])
                raise NotBegun(f"{who} has not begun in {seconds:g} s")

    def forget(self) -> None:
        """Before others are started."""
        self._made.clear()
        self._has_begun.zero_()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()  # SIGTERM does not reach one that is stopped, or that keeps its GIL
        for process in self._processes:
            process.join()
        self.forget()

    def hang(self, seconds: float) -> Failure:
        """Which worker hangs, and where."""
        silence = f"returned nothing for {seconds:g} s"
        advice = "raise trainer.data_timeout_seconds"
        for number, pid, has_begun in self._numbered():
            if watchdog.is_stopped(pid):
                how, fix = ": it is stopped, by SIGSTOP or a debugger", "continue it"
            elif self.is_reading[number]:
                place = watchdog.locate(watchdog.read_stack(pid, self._stacks.fileno()))
                how, fix = f", in {place}" if place else "", "fix that"
            elif not has_begun:
                how, fix = ": it has not begun", "see what mode=doctor finds"
            else:
                continue
            return Failure(
                f"data worker {number} (pid {pid}) has {silence}{how}; {fix}, or {advice}"
            )
        return Failure(f"the data workers have {silence}, while none of them was reading; {advice}")

    def death(self, wait_seconds: float) -> Failure | None:
        """Which worker has died, and how."""
        sentinels = {process.sentinel: process for process in self._processes}
        for sentinel in connection.wait(sentinels, wait_seconds):
            sentinels[sentinel].join()
        for number, process in enumerate(self._processes):
            code = process.exitcode
            if code is None:
                continue
            if code >= 0:
                how, fix = f"exited with code {code}", "data.workers=0 may show why"
            else:
                name = signal.Signals(-code).name
                how, fix = f"was killed by {name}", MEANING.get(name, "look for who sent it")
            return Failure(f"data worker {number} (pid {process.pid}) {how}; {fix}")
        return None

    @property
    def _processes(self) -> list[Any]:
        return [process for process in self._made if process.pid is not None]

    def _numbered(self) -> list[tuple[int, int, bool]]:
        """The number and pid of each worker, and whether it has begun."""
        pairs = zip(self._processes, self._has_begun.tolist(), strict=False)
        return [(number, process.pid, begun) for number, (process, begun) in enumerate(pairs)]


def _process(kind: Callable[..., Any], made: list[Any], **options: Any) -> Any:
    made.append(kind(**options))
    return made[-1]


class _Event:
    def __init__(self) -> None:
        self._is_set = torch.zeros(1, dtype=torch.bool).share_memory_()

    def set(self) -> None:
        self._is_set[0] = True

    def is_set(self) -> bool:
        return bool(self._is_set)


def _begin(has_begun: Tensor, stacks: connection.Connection, number: int) -> None:
    """In a worker, first. faulthandler's handler is C: it works wherever the worker hangs."""
    signals.leave_to_parent()
    has_begun[number] = True
    faulthandler.register(watchdog.STACK, file=stacks, all_threads=False)  # type: ignore[arg-type]
