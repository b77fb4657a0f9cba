"""Starts the ranks of a job, waits at their pipes, and ends them all with the first that fails."""

import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dpframe import interruption, orphans
from dpframe.errors import Interrupted
from dpframe.heartbeat import Clock, main_thread_last
from dpframe.interruption import SIGNALS, Interruption
from dpframe.strategies import fault, member, ranks
from dpframe.strategies.fault import Fault

PEER_SECONDS = 1.0  # how long ranks get to end by themselves once one has failed
EXIT_SECONDS = 10.0  # and once their work is done
STACK_SECONDS = 1.0  # for a hung rank's to come
PAUSE_SECONDS = 5.0  # for the ranks to reach the end of a step, where a job is stopped
TICK_SECONDS = 1.0


def launch(
    run: Callable[..., Any], args: tuple, *, count: int, uses_cuda: bool, timeout_seconds: float
) -> Any:
    """Runs `run(*args)` in `count` processes on this machine; returns rank 0's value."""
    interruption.look()
    stop = interruption.installed()
    with stop.held() if stop is not None else nullcontext():
        job = _Job(count, stop, uses_cuda=uses_cuda, timeout_seconds=timeout_seconds)
        try:
            job.start(run, args)
            job.watch()
        finally:
            job.kill()
    return job.outcome()


class _Member:
    """A rank, as its parent sees it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.process: Any = None
        self.fault: Fault | None = None
        self.is_done = False
        self.is_interrupted = False
        self.is_over = False  # the process has ended
        self.is_heard = True  # its pipe is open
        self.is_paused = False  # between two steps
        self.hang_seconds: float | None = None  # None: it may take as long as it likes
        self.beaten_at = 0.0

    @property
    def is_silent(self) -> bool:
        return not (self.is_done or self.is_interrupted or self.is_over or self.fault)

    def start(self, context: Any, others: "list[_Member]", *job: Any) -> None:
        count, run, args = job
        self.pipe, theirs = context.Pipe()
        self.stacks, stacks = context.Pipe(duplex=False)
        inherited = [end for other in [*others, self] for end in (other.pipe, other.stacks)]
        closed = inherited if context.get_start_method() == "fork" else []
        self.process = context.Process(
            target=member.live, args=(self.rank, count, theirs, stacks, closed, run, args)
        )
        with _signals_blocked(), ranks.safe_path():
            self.process.start()
        theirs.close()
        stacks.close()

    def send(self, message: Any) -> None:
        with suppress(OSError):  # it has ended
            self.pipe.send(message)

    def stack(self) -> str:
        """Where its threads are, as its C handler says: a hung main thread says nothing."""
        own = self._dump(self.process.pid)
        if "dataloader.py" not in own:
            return own
        workers = [f"its child {pid}:\n{self._dump(pid)}\n" for pid in _children(self.process.pid)]
        return "\n".join([*workers, "itself:", own])

    def _dump(self, pid: int) -> str:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        text, seconds = b"", STACK_SECONDS
        while wait([self.stacks], seconds):
            part = os.read(self.stacks.fileno(), 65536)
            if not part:
                break
            text, seconds = text + part, 0.1
        return main_thread_last(text.decode(errors="replace"))

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None and not self.is_over:
            self.process.kill()
            self.process.join()
            self.is_over = True

    def close(self) -> None:
        if self.process is not None:
            self.pipe.close()
            self.stacks.close()
            self.process.close()


class _Job:
    def __init__(
        self, count: int, stop: Interruption | None, *, uses_cuda: bool, timeout_seconds: float
    ) -> None:
        self.members = [_Member(rank) for rank in range(count)]
        self.stop = stop
        self.uses_cuda = uses_cuda
        self.timeout_seconds = timeout_seconds
        self.number: int | None = None  # of the signal that ends the job
        self.store: Any = None  # where the ranks find each other
        self.said = ""  # when that was, in the main rank's words
        self.told: dict[str, Any] = {}
        self.value: Any = None
        self._clock = Clock()  # a job that was stopped has had no time
        self._deadline = float("inf")
        self._interrupted_at = float("inf")
        self._pausing_until: float | None = None

    @property
    def _grace_seconds(self) -> float:
        return 30.0 if self.stop is None else self.stop.grace_seconds

    @property
    def _patience_is_over(self) -> bool:
        return self._clock.seconds() >= self._interrupted_at + self._grace_seconds

    def start(self, run: Callable[..., Any], args: tuple) -> None:
        from torch.distributed import TCPStore

        orphans.share_sockets()
        method = ranks.start_method(uses_cuda=self.uses_cuda)
        context: Any = multiprocessing.get_context(method)
        for one in self.members:
            one.start(context, self.members[: one.rank], len(self.members), run, args)
        # Only now: it has a thread, and a fork with threads is none that we would make.
        # Of its own accord the store would listen on every network that the machine is in.
        listening = socket.create_server((ranks.HERE, 0))
        port = listening.getsockname()[1]
        self.store = TCPStore(
            ranks.HERE,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        for one in self.members:
            one.send((self.store.port, self._grace_seconds, self.stop is not None))

    def watch(self) -> None:
        """Until every rank has ended: by itself, or by us when its time is up."""
        while not all(one.is_over for one in self.members):
            left = self._deadline - self._clock.seconds()
            if left <= 0:
                self._give_up()
                return
            if self._hangs():
                return
            sources = dict(self._sources())
            for source in wait(list(sources), min(left, self._tick_seconds)):
                sources[source]()
            self._pause()

    def outcome(self) -> Any:
        faults = [one.fault for one in self.members if one.fault is not None]
        own = [one for one in faults if not one.is_echo]
        if self.number is not None and not any(one.was_noted for one in own):
            if not self.said and self._patience_is_over:
                self.said = (
                    f", not done in trainer.grace_seconds={self._grace_seconds:g}, so killed"
                )
            raise Interrupted(self.number, self.said)
        if own or faults:
            error = fault.report(faults)
            error.told = self.told
            raise error
        return self.value

    def kill(self) -> None:
        """All that is left, and lets go of everything."""
        for one in self.members:
            one.kill()
        for one in self.members:
            one.close()
        self.store = None  # which ends its thread

    # ---- what happens

    def _sources(self) -> Iterator[tuple[Any, Callable[[], None]]]:
        if self.stop is not None:
            yield self.stop.wakes, self._heed
        for one in self.members:
            if one.is_heard:
                yield one.pipe, partial(self._hear, one)
            if not one.is_over:
                yield one.process.sentinel, partial(self._see_end, one)

    def _hear(self, one: _Member) -> None:
        try:
            kind, value = pickle.loads(one.pipe.recv_bytes())
        except (EOFError, OSError):
            one.is_heard = False
            return
        getattr(self, f"_on_{kind}")(one, value)

    def _see_end(self, one: _Member) -> None:
        while one.is_heard and one.pipe.poll():
            self._hear(one)
        one.process.join()
        if one.is_silent:
            one.fault = fault.ended(one.rank, one.process.pid, one.process.exitcode)
            self._expect_end(PEER_SECONDS)
        one.is_over = True

    def _on_done(self, one: _Member, value: Any) -> None:
        one.is_done = True
        if one.rank == 0:
            self.value = value
            # The others have nothing to write. They may be in their last collective yet.
            self._expect_end(self.timeout_seconds)
        if all(other.is_done for other in self.members):
            self._expect_end(EXIT_SECONDS)

    def _on_failed(self, one: _Member, noted: Fault) -> None:
        one.fault = noted
        self._expect_end(PEER_SECONDS)

    def _on_interrupted(self, one: _Member, said: tuple[int, str]) -> None:
        one.is_interrupted = True
        self._interrupt(said[0])
        if one.rank == 0:
            self.said = said[1]

    def _on_signalled(self, one: _Member, number: int) -> None:
        self._interrupt(number)

    def _on_beat(self, one: _Member, hang_seconds: float | None) -> None:
        one.hang_seconds, one.beaten_at = hang_seconds, self._clock.seconds()

    def _on_paused(self, one: _Member, _: None) -> None:
        one.is_paused = True
        if self._pausing_until is None:  # too late: the job has been stopped, and goes on
            self._go_on(one)

    def _on_told(self, one: _Member, told: tuple[str, Any]) -> None:
        self.told[told[0]] = told[1]

    def _heed(self) -> None:
        assert self.stop is not None
        if self.stop.heed():  # a second one
            self.said = ", twice; ended at once"
            for one in self.members:
                one.kill()
        elif self.stop.number is not None:
            self._interrupt(self.stop.number)
        elif self.stop.is_to_pause and self._pausing_until is None:
            self._pausing_until = self._clock.seconds() + PAUSE_SECONDS
            for one in self.members:
                one.send(signal.SIGTSTP)

    def _interrupt(self, number: int) -> None:
        """By a message, not a signal: a terminal's Ctrl-C has reached the ranks already."""
        if self.number is None:
            self.number, self._interrupted_at = number, self._clock.seconds()
            if self.stop is not None:
                self.stop.remember(number)
            for one in self.members:
                one.send(number)
            self._expect_end(self._grace_seconds + 2)

    def _expect_end(self, seconds: float) -> None:
        self._deadline = min(self._deadline, self._clock.seconds() + seconds)

    def _pause(self) -> None:
        """Stops the job as Ctrl-Z asks: by preference where no rank waits for another.

        A collective has a timeout that goes on while the job is stopped.
        """
        if self._pausing_until is None or self.stop is None:
            return
        running = [one for one in self.members if not (one.is_paused or one.is_done or one.is_over)]
        if running and self.number is None and self._clock.seconds() < self._pausing_until:
            return
        self._pausing_until = None
        if self.number is None:
            for one in running:
                one.signal(signal.SIGSTOP)
            self.stop.stop_here()
            for one in running:
                one.signal(signal.SIGCONT)
        for one in self.members:
            self._go_on(one)

    def _go_on(self, one: _Member) -> None:
        one.is_paused = False
        one.beaten_at = self._clock.seconds()
        one.send(signal.SIGCONT)

    @property
    def _tick_seconds(self) -> float:
        limits = [one.hang_seconds for one in self.members if one.hang_seconds is not None]
        return min(TICK_SECONDS, min(limits, default=TICK_SECONDS) / 4)

    # ---- the end

    def _hangs(self) -> bool:
        """Whether a rank has made no progress for too long; the job is over then."""
        if self.number is not None or self._pausing_until is not None:
            return False
        silent = [one for one in self.members if one.is_silent and one.hang_seconds is not None]
        now = self._clock.seconds()
        if not any(now - one.beaten_at >= (one.hang_seconds or 0) for one in silent):
            return False
        for one in silent:
            if now - one.beaten_at >= (one.hang_seconds or 0) / 2:
                one.fault = fault.hung(one.rank, one.stack(), one.hang_seconds)
            else:
                one.fault = fault.left(one.rank)
        for one in self.members:
            one.kill()
        return True

    def _give_up(self) -> None:
        silent = [one for one in self.members if one.is_silent]
        for one in silent:
            is_hung = self._waited_in_vain() and self.number is None
            one.fault = fault.hung(one.rank, one.stack()) if is_hung else fault.left(one.rank)
        for one in self.members:
            one.kill()

    def _waited_in_vain(self) -> bool:
        """Whether a rank has ended for nothing but that others did not come."""
        known = [
            one.fault for one in self.members if one.fault is not None and not one.fault.is_hang
        ]
        if not known:
            return True  # the main rank was done, and nothing is wrong with the others
        aborted = f"killed by {signal.SIGABRT.name}"  # by NCCL's watchdog
        return min(known, key=lambda one: one.time).is_timeout or (
            self.uses_cuda and known[0].text.startswith(aborted)
        )


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """For a child, until it has handlers of its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _children(pid: int) -> list[int]:
    """A rank's data workers: they have its handler and its pipe."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found
