"""Starts the ranks of a job on this machine, and ends them all with the first that fails."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from dpframe import heartbeat, interruption
from dpframe.errors import Interrupted
from dpframe.heartbeat import BEAT, Clock
from dpframe.interruption import SIGNALS, STOP, Interruption
from dpframe.strategies import fault, ranks
from dpframe.strategies.fault import Fault

PEER_SECONDS = 1.0  # how long ranks get to end by themselves once one has failed
EXIT_SECONDS = 10.0  # and once their work is done
PAUSE_SECONDS = 5.0  # for the ranks to reach the end of a step on Ctrl-Z
TICK_SECONDS = 1.0
SAFE_PATH = "PYTHONSAFEPATH"

_idle_threads: int | None = None  # of a process that has not computed; None: nobody knows
_parent: "_Parent | None" = None  # in a rank


def allow_fork() -> None:
    """Lets ranks be forked, which takes milliseconds, unless more threads are started after this.

    To be called before anything is computed: a pool of threads that computes survives no fork.
    """
    global _idle_threads
    if _idle_threads is None:
        _idle_threads = _native_threads()


def launch(
    run: Callable[..., Any], args: tuple, *, count: int, uses_cuda: bool, timeout_seconds: float
) -> Any:
    """Runs `run(*args)` in `count` processes on this machine; returns rank 0's value."""
    interruption.look()
    stop = interruption.installed()
    with stop.heeded_by_ranks() if stop is not None else nullcontext() as wakes:
        job = _Job(count, stop, wakes, uses_cuda=uses_cuda, timeout_seconds=timeout_seconds)
        try:
            job.start(run, args)
            job.watch()
        finally:
            job.kill()
    return job.outcome()


def has_parent() -> bool:
    """Whether another process waits for this rank, and tells how the job has ended."""
    return _parent is not None


def tell(name: str, value: Any) -> None:
    """Sends the parent what it wants to know if the job ends badly."""
    if _parent is not None:
        _parent.send("told", (name, value))


# ---- the parent


class _Member:
    """A rank, as its parent sees it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.process: Any = None
        self.pipes: list[Any] = []
        self.open_pipes: list[Any] = []
        self.fault: Fault | None = None
        self.is_done = False
        self.is_interrupted = False
        self.is_over = False  # the process has ended
        self.is_paused = False  # between two steps
        self.hang_seconds: float | None = None  # None: it may take as long as it likes
        self.beaten_at = 0.0

    @property
    def is_silent(self) -> bool:
        return not (self.is_done or self.is_interrupted or self.is_over or self.fault)

    def start(self, context: Any, inherited: list[Any], birth: "_Birth", *work: Any) -> None:
        messages, theirs = context.Pipe()
        pulse, beats = context.Pipe(duplex=False)
        stacks, dumps = context.Pipe(duplex=False)
        self.messages, self.pulse, self.stacks = messages, pulse, stacks
        self.pipes = [messages, pulse, stacks]
        self.open_pipes = [messages, pulse]
        ends = (theirs, beats, dumps)
        closed = [*inherited, *self.pipes] if context.get_start_method() == "fork" else []
        self.process = context.Process(target=live, args=(birth, ends, closed, *work))
        with _signals_blocked(), _safe_path():
            self.process.start()
        for end in ends:
            end.close()

    def send(self, message: Any = None) -> None:
        with suppress(OSError):  # it has ended
            self.messages.send(message)

    def stack(self) -> str:
        """Written by its C handler: a hung main thread runs no Python."""
        pid, pipe = self.process.pid, self.stacks.fileno()
        return heartbeat.stack_of(pid, asked_by=signal.SIGUSR1, pipe=pipe)

    def signal(self, number: int) -> None:
        if not self.is_over:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None and not self.is_over:
            self.process.kill()
            self.process.join()
            self.is_over = True

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        if self.process is not None:
            self.process.close()


class _Job:
    def __init__(
        self,
        count: int,
        stop: Interruption | None,
        wakes: Any,
        *,
        uses_cuda: bool,
        timeout_seconds: float,
    ) -> None:
        self.members = [_Member(rank) for rank in range(count)]
        self.stop = stop
        self.wakes = wakes
        self.grace_seconds = 30.0 if stop is None else stop.grace_seconds
        self.uses_cuda = uses_cuda
        self.timeout_seconds = timeout_seconds
        self.number: int | None = None  # of the signal that ends the job
        self.has_begun = False
        self.said: str | None = None  # when the signal came, in the main rank's words
        self.told: dict[str, Any] = {}
        self.value: Any = None
        self.store: Any = None  # where the ranks find each other
        self._clock = Clock()  # a job that was stopped has had no time
        self._deadline = float("inf")
        self._pausing_until: float | None = None

    def start(self, run: Callable[..., Any], args: tuple) -> None:
        import torch
        from torch.distributed import TCPStore

        interruption.share_sockets()
        is_forked = _fork_is_safe() and not self.uses_cuda
        if is_forked:
            # DDP's constructor imports torch._dynamo, for a second: here once for all ranks.
            torch.compiler.reset()
        context: Any = multiprocessing.get_context("fork" if is_forked else "spawn")
        # Left to itself, the store would listen on every network that the machine is in.
        listening = socket.create_server((ranks.HERE, 0))
        port = listening.getsockname()[1]
        inherited: list[Any] = [listening, *([self.wakes] if self.wakes else [])]
        for member in self.members:
            environment = ranks.environment_of(member.rank, len(self.members), port)
            birth = _Birth(
                environment, self.grace_seconds, self.stop is not None, SAFE_PATH in os.environ
            )
            member.start(context, inherited, birth, run, args)
            inherited += member.pipes
        self.store = TCPStore(  # after the forks: it starts a thread
            ranks.HERE,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def watch(self) -> None:
        """Until every rank has ended, by itself or because its time is up."""
        while not all(member.is_over for member in self.members):
            seconds_left = self._deadline - self._clock.seconds()
            if seconds_left <= 0:
                self._give_up()
                return
            if self._hangs():
                return
            wait([*self._sources()], min(seconds_left, self._tick_seconds))
            self._heed_signals()
            for member in self.members:
                self._hear(member)
                if not member.is_over and wait([member.process.sentinel], 0):
                    self._see_end(member)
            self._pause()

    def outcome(self) -> Any:
        faults = [member.fault for member in self.members if member.fault is not None]
        has_cause = any(noted.was_noted and not noted.is_echo for noted in faults)
        if self.number is not None and not has_cause:
            if self.said is None and self.has_begun:
                late = f", not done in trainer.grace_seconds={self.grace_seconds:g}, so killed"
                raise Interrupted(self.number, late)
            raise Interrupted(self.number, self.said or "")
        if faults:
            error = fault.report(faults)
            error.told = self.told
            raise error
        return self.value

    def kill(self) -> None:
        """Ends what is left, and lets go of everything."""
        for member in self.members:
            member.kill()
        for member in self.members:
            member.close()
        self.store = None  # which ends its thread

    # ---- what happens

    def _sources(self) -> Iterator[Any]:
        if self.wakes is not None:
            yield self.wakes
        for member in self.members:
            yield from member.open_pipes
            if not member.is_over:
                yield member.process.sentinel

    def _hear(self, member: _Member) -> None:
        for pipe in [pipe for pipe in member.open_pipes if wait([pipe], 0)]:
            try:
                if pipe is member.pulse:
                    self._feel(member, os.read(member.pulse.fileno(), 4096))
                else:
                    self._read(member, *pickle.loads(member.messages.recv_bytes()))
            except (EOFError, OSError):
                member.open_pipes.remove(pipe)

    def _feel(self, member: _Member, news: bytes) -> None:
        if not news:
            raise EOFError
        if BEAT in news:
            member.beaten_at = self._clock.seconds()
        for number in SIGNALS:
            if number in news:
                self._interrupt(number)

    def _read(self, member: _Member, kind: str, value: Any) -> None:
        match kind:
            case "told":
                self.told[value[0]] = value[1]
            case "watch":
                member.hang_seconds, member.beaten_at = value, self._clock.seconds()
            case "begun":
                self.has_begun = True
            case "paused":
                member.is_paused = True
                if self._pausing_until is None:  # too late: the job was stopped, and goes on
                    self._go_on(member)
            case "done":
                member.is_done = True
                if member.rank == 0:
                    self.value = value
                    # The others have nothing to write, but may be in their last collective.
                    self._expect_end(self.timeout_seconds)
                if all(other.is_done for other in self.members):
                    self._expect_end(EXIT_SECONDS)
            case "interrupted":
                member.is_interrupted = True
                self._interrupt(value[0])
                if member.rank == 0:
                    self.said = value[1]
            case "failed":
                member.fault = value
                self._expect_end(PEER_SECONDS)

    def _see_end(self, member: _Member) -> None:
        while wait(member.open_pipes, 0):
            self._hear(member)
        member.process.join()
        if member.is_silent:
            code = member.process.exitcode
            member.fault = fault.ended(member.rank, member.process.pid, code)
            # NCCL's watchdog aborts a rank whose peers did not come.
            member.fault.is_echo = self.uses_cuda and code == -signal.SIGABRT
            self._expect_end(PEER_SECONDS)
        member.is_over = True

    def _expect_end(self, seconds: float) -> None:
        self._deadline = min(self._deadline, self._clock.seconds() + seconds)

    # ---- signals

    def _heed_signals(self) -> None:
        if self.stop is None:
            return
        while self.wakes.poll():
            os.read(self.wakes.fileno(), 4096)
        if self.stop.number is not None:
            self._interrupt(self.stop.number)
        elif self.stop.is_to_pause and self._pausing_until is None:
            self._pausing_until = self._clock.seconds() + PAUSE_SECONDS
            for member in self.members:
                member.signal(STOP)

    def _interrupt(self, number: int) -> None:
        if self.number is None:
            self.number = number
            if self.stop is not None:
                self.stop.remember(number)
            for member in self.members:
                member.signal(number)  # a terminal's Ctrl-C has reached it: it counts once
                self._go_on(member)
            self._expect_end(self.grace_seconds + 2)

    def _pause(self) -> None:
        """Stops the job as Ctrl-Z asks: by preference where no rank waits for another.

        A collective has a timeout that goes on while the job is stopped.
        """
        if self._pausing_until is None or self.stop is None:
            return
        running = [m for m in self.members if not (m.is_paused or m.is_done or m.is_over)]
        if running and self.number is None and self._clock.seconds() < self._pausing_until:
            return
        self._pausing_until = None
        if self.number is None:
            for member in running:
                member.signal(signal.SIGSTOP)
            self.stop.stop_here()
            for member in running:
                member.signal(signal.SIGCONT)
        for member in self.members:
            self._go_on(member)

    def _go_on(self, member: _Member) -> None:
        member.beaten_at = self._clock.seconds()
        if member.is_paused:
            member.is_paused = False
            member.send()

    # ---- hangs

    @property
    def _tick_seconds(self) -> float:
        limits = [m.hang_seconds for m in self.members if m.hang_seconds is not None]
        return min(TICK_SECONDS, min(limits, default=TICK_SECONDS) / 4)

    def _hangs(self) -> bool:
        """Whether a rank has made no progress for too long; the job is over then."""
        if self.number is not None or self._pausing_until is not None:
            return False
        now = self._clock.seconds()
        silent = [m for m in self.members if m.is_silent and m.hang_seconds is not None]
        late = [m for m in silent if now - m.beaten_at >= (m.hang_seconds or 0) / 2]
        if not any(now - member.beaten_at >= (member.hang_seconds or 0) for member in late):
            return False
        stacks = {member.rank: member.stack() for member in late}
        if any(heartbeat.is_at_prompt(stack) for stack in stacks.values()):
            for member in silent:
                member.beaten_at = now
            return False
        for member in silent:
            if member in late:
                stack = stacks[member.rank]
                member.fault = fault.hung(member.rank, stack, member.hang_seconds)
            else:
                member.fault = fault.left(member.rank)
        return True

    def _give_up(self) -> None:
        """The ranks that are still silent hang if all others only waited for them."""
        faults = [member.fault for member in self.members if member.fault is not None]
        are_awaited = self.number is None and all(noted.is_echo for noted in faults)
        for member in self.members:
            if member.is_silent and are_awaited:
                member.fault = fault.hung(member.rank, member.stack())
            elif member.is_silent:
                member.fault = fault.left(member.rank)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """For a child, until it has handlers of its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, STOP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _safe_path() -> Iterator[None]:
    """A spawned process begins as `python -c`, with the current directory first: a ./pickle.py
    there would run before it has its parent's path."""
    if SAFE_PATH in os.environ:
        yield
        return
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        del os.environ[SAFE_PATH]


def _fork_is_safe() -> bool:
    """A child of a process with other threads inherits locks that nobody will ever release."""
    if sys.platform != "linux" or _idle_threads is None or threading.active_count() > 1:
        return False
    return _native_threads() <= _idle_threads


def _native_threads() -> int:
    """Those that Python did not start, e.g. torch's; after its import they are idle."""
    if sys.platform != "linux":
        return 0
    return len(os.listdir("/proc/self/task")) - (threading.active_count() - 1)


# ---- the rank


class _Birth(NamedTuple):
    environment: dict[str, str]
    grace_seconds: float
    can_pause: bool
    is_path_safe: bool  # by the user's own wish


class _Parent:
    """The parent, as a rank sees it."""

    def __init__(self, messages: Connection, pulse: int) -> None:
        self.messages = messages
        self.pulse = pulse

    def send(self, kind: str, value: Any = None) -> None:
        # Pickled here, by value: multiprocessing would share a tensor's memory, which ends with us.
        self.messages.send_bytes(pickle.dumps((kind, value)))

    def receive(self) -> Any:
        return self.messages.recv()


def live(
    birth: _Birth,
    ends: tuple[Connection, Connection, Connection],
    inherited: Sequence[Any],
    run: Callable[..., Any],
    args: tuple,
) -> None:
    """The first function of a rank; `inherited` are the parent's, which a fork has too."""
    global _parent
    interruption.end_with_parent()
    interruption.forget()
    for end in inherited:
        end.close()
    if not birth.is_path_safe:
        os.environ.pop(SAFE_PATH, None)
    os.environ.update(birth.environment)
    messages, pulse, stacks = ends
    os.set_blocking(pulse.fileno(), False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=False)
    _parent = _Parent(messages, pulse.fileno())
    stop = Interruption(
        grace_seconds=birth.grace_seconds,
        is_quiet=True,
        parent=_parent,
        can_pause=birth.can_pause,
    )
    stop.open()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, STOP))
    sys.exit(_outcome(_parent, run, args))


def _outcome(parent: _Parent, run: Callable[..., Any], args: tuple) -> int:
    try:
        value = run(*args)
        parent.send("done", value if os.environ["RANK"] == "0" else None)
    except Interrupted as error:
        parent.send("interrupted", (error.number, error.said))
    except BaseException as error:
        noted = fault.noted(error)
        parent.send("failed", noted)
        return noted.exit_code
    return 0
