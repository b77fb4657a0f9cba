"""Starts the ranks of a job on this machine, and ends them all with the first that fails."""

import logging
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from dpframe.errors import Interrupted, UserError
from dpframe.launch import signals, watchdog
from dpframe.launch.rank import SAFE_PATH, SIGNALED, Fault, rank_main
from dpframe.launch.signals import STOP, Interruption
from dpframe.launch.watchdog import BEAT, SIGNALS, TICK_SECONDS, Clock

HERE = "127.0.0.1"  # where the ranks meet: other machines can't reach it
PEER_SECONDS = 1.0  # how long ranks get to end by themselves once one has failed
EXIT_SECONDS = 10.0  # and once their work is done
PAUSE_SECONDS = 5.0  # for the ranks to reach the end of a step on Ctrl-Z
FILES, FILES_OF_A_RANK = 16, 8  # that are opened in the parent or a rank, with some to spare
TORCH = f"{os.sep}torch{os.sep}"
DUMP_WAIT = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"

log = logging.getLogger("dpframe")

_idle_threads = 0  # native threads before anything was computed; 0: unknown


class RankFailed(Exception):
    """A rank ended the job; its own traceback is in the message."""

    has_traceback = True  # in its message
    told: dict[str, Any] = {}  # what the ranks have told their parent
    details = ""  # the message has the traceback


def allow_fork() -> None:
    """Lets ranks be forked, which takes milliseconds, unless more threads are started after this.

    To be called before anything is computed: a pool of threads that computes survives no fork.
    """
    global _idle_threads
    if sys.platform == "linux":
        _idle_threads = _idle_threads or _native_threads()


def choose_start_method(*, uses_gpus: bool) -> str:
    """A child of a process with other threads inherits locks that nobody will ever release."""
    is_alone = not uses_gpus and _idle_threads and threading.active_count() == 1
    return "fork" if is_alone and _native_threads() <= _idle_threads else "spawn"


def _native_threads() -> int:
    """The threads that Python did not start, e.g. torch's, which are idle after its import."""
    return len(os.listdir("/proc/self/task")) - (threading.active_count() - 1)


def launch(
    run: Callable[..., Any],
    args: tuple,
    *,
    count: int,
    uses_gpus: bool,
    timeout_seconds: float,
) -> Any:
    """Runs `run(*args)` in `count` processes on this machine; returns rank 0's value."""
    signals.raise_if_signaled()
    _refuse_few_files(count)
    stop = signals.current() or Interruption()
    job = _Job(stop, uses_gpus=uses_gpus, timeout_seconds=timeout_seconds)
    with stop.waits():
        try:
            job.start(run, args, count)
            job.watch()
        finally:
            job.kill()
    return job.outcome()


def _refuse_few_files(count: int) -> None:
    """A store that may open no file for a rank that comes leaves it waiting."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = len(os.listdir("/dev/fd")) + FILES + FILES_OF_A_RANK * count
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UserError(
            f"{count} ranks need up to {needed} open files in a process, and it may open {limit}; "
            "ulimit -n 1024"
        )


def make_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun would give a rank; the store is its parent's, at any free port."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_PORT": port,
    }
    words = {"MASTER_ADDR": HERE, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    words |= {name: os.environ[name] for name in [SAFE_PATH] if name in os.environ}
    if sys.platform == "linux":  # else both would listen on every network
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            words[name] = os.environ.get(name, "lo")
    # Four times as long, a minute by default, NCCL's watchdog keeps a rank after its timeout.
    words[DUMP_WAIT] = os.environ.get(DUMP_WAIT, "500")  # milliseconds
    return {name: str(number) for name, number in numbers.items()} | words


class _Member:
    """A rank, as its parent sees it."""

    def __init__(self, context: Any, environment: dict[str, str], work: Any) -> None:
        self.rank = int(environment["RANK"])
        self.environment = environment
        self.has_begun = False
        self.ending = ""  # its last message: done, interrupted or failed
        self.fault: Fault | None = None
        self.is_paused = False  # between two steps
        self.hang_seconds = float("inf")
        self.beaten_at = 0.0
        self.messages, theirs = context.Pipe()
        self.pulse, beats = context.Pipe(duplex=False)
        self.process = context.Process(target=rank_main, args=(environment, theirs, beats, work))
        self.process.start()
        theirs.close()
        beats.close()

    @property
    def is_silent(self) -> bool:
        return not (self.ending or self.fault)

    def receive(self) -> Iterator[tuple[str, Any]]:
        with suppress(EOFError, OSError):  # it has ended
            while self.messages.poll():
                yield pickle.loads(self.messages.recv_bytes())

    def go_on(self) -> None:
        if self.is_paused:
            self.is_paused = False
            with suppress(OSError):
                self.messages.send_bytes(b"")

    def stack(self) -> str:
        return watchdog.read_stack(self.process.pid, self.pulse.fileno())

    def signal(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.messages.close()
        self.pulse.close()


class _Job:
    def __init__(
        self,
        stop: Interruption,
        *,
        uses_gpus: bool,
        timeout_seconds: float,
    ) -> None:
        self.members: list[_Member] = []
        self.stop = stop
        self.uses_gpus = uses_gpus
        self.timeout_seconds = timeout_seconds
        self.number: int | None = None  # of the signal that ends the job
        self.said = ""  # when the signal came, in the main rank's words
        self.told: dict[str, Any] = {}
        self.value: Any = None
        self.store: Any = None  # where the ranks find each other
        self._clock = Clock()  # a job that was stopped has had no time
        self._deadline = float("inf")
        self._pause_until: float | None = None

    def start(self, run: Callable[..., Any], args: tuple, count: int) -> None:
        import torch
        from torch.distributed import TCPStore

        signals.share_sockets()
        method, work = (
            choose_start_method(uses_gpus=self.uses_gpus),
            (run, args),
        )
        if method == "fork":
            # DDP's constructor imports torch._dynamo, for a second: here once for all ranks.
            torch.compiler.reset()
        # Left to itself, the store would listen on every network that the machine is in.
        listening = socket.create_server((HERE, 0))
        port = listening.getsockname()[1]
        environments = [make_environment(rank, count, port) for rank in range(count)]
        context = multiprocessing.get_context(method)
        pickled = work if method == "fork" else pickle.dumps(work)
        born = partial(_Member, context, work=pickled)
        with block_signals():
            for environment in environments:
                self.members.append(born(environment))
        if method == "fork":
            self._wait_for_begin(born)
        self.store = TCPStore(  # after the forks: it starts a thread
            HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def _wait_for_begin(self, born: Callable[[dict[str, str]], _Member]) -> None:
        """A fork may inherit a lock that nobody will release, e.g. the interpreter's own, and never
        run a line of Python: it is killed, and another one takes its place, a few times."""
        for seconds in watchdog.BEGIN_SECONDS:
            clock = Clock()
            while late := [m for m in self.members if not m.has_begun and m.process.is_alive()]:
                wait(
                    [part for m in late for part in (m.messages, m.process.sentinel)], TICK_SECONDS
                )
                for member in late:
                    self._hear(member)
                if self.stop.number is not None:
                    return
                if clock.seconds() >= seconds:
                    break
            for member in late:
                who = f"rank {member.rank} (pid {member.process.pid})"
                log.warning("%s has not begun in %g s; it is started again", who, seconds)
                member.kill()
                with block_signals():
                    self.members[self.members.index(member)] = born(member.environment)

    def watch(self) -> None:
        """Until every rank has ended, by itself or because its time is up."""
        while alive := [member for member in self.members if member.process.is_alive()]:
            silent = [member.messages for member in alive if member.is_silent]
            wait([*silent, *(member.process.sentinel for member in alive)], TICK_SECONDS)
            self._heed_signals()
            for member in self.members:
                self._hear(member)
            self._pause()
            if self._hangs() or self._is_late():
                return

    def outcome(self) -> Any:
        faults = self._faults()
        if self.number is not None and all(fault.is_consequence for fault in faults):
            raise Interrupted(self.number, self.said)
        if faults:
            silent = [member.rank for member in self.members if member.is_silent]
            faults += [Fault(rank, "it was ended", is_consequence=True) for rank in silent]
            error = explain(faults)
            error.told = self.told
            raise error
        return self.value

    def kill(self) -> None:
        """Ends what is left, and lets go of everything."""
        for member in self.members:
            member.kill()
        self.store = None  # which ends its thread

    # ---- what happens

    def _faults(self) -> list[Fault]:
        return [member.fault for member in self.members if member.fault is not None]

    def _hear(self, member: _Member) -> None:
        has_ended = not member.process.is_alive()  # asked first: then these are its last words
        for kind, value in member.receive():
            self._read(member, kind, value)
        if not member.is_silent:
            return
        news = watchdog.receive(member.pulse.fileno())
        if BEAT in news:
            member.beaten_at = self._clock.seconds()
        for number in SIGNALS:
            if number in news:
                self._interrupt(number)
        if has_ended and self.number is None:
            code = member.process.exitcode
            how = (
                f"killed by {signal.Signals(-code).name}"
                if code < 0
                else f"left with exit code {code} before its work was done"
            )
            # NCCL's watchdog aborts a rank whose peers did not come.
            is_consequence = self.uses_gpus and code == -signal.SIGABRT
            member.fault = Fault(
                member.rank, f"{how} (pid {member.process.pid})", is_consequence=is_consequence
            )
            self._expect_end(PEER_SECONDS)

    def _read(self, member: _Member, kind: str, value: Any) -> None:
        if kind in ("done", "interrupted", "failed"):
            member.ending = kind
        match kind:
            case "begun":
                member.has_begun = True
            case "told":
                self.told[value[0]] = value[1]
            case "watch":
                member.hang_seconds = value or float("inf")
                member.beaten_at = self._clock.seconds()
            case "paused":
                member.is_paused = True
            case "done" if member.rank == 0:
                self.value = value
                # The others have nothing to write, but may be in their last collective.
                self._expect_end(self.timeout_seconds)
            case "interrupted":
                self._interrupt(value[0])
                if member.rank == 0:
                    self.said = value[1]
            case "failed":
                member.fault = value
                self._expect_end(PEER_SECONDS)
        if all(other.ending == "done" for other in self.members):
            self._expect_end(EXIT_SECONDS)

    def _expect_end(self, seconds: float) -> None:
        self._deadline = min(self._deadline, self._clock.seconds() + seconds)

    # ---- signals

    def _heed_signals(self) -> None:
        if self.stop.number is not None:
            self._interrupt(self.stop.number)
        elif self.stop.is_to_pause and self._pause_until is None:
            self._pause_until = self._clock.seconds() + PAUSE_SECONDS
            for member in self.members:
                member.signal(STOP)

    def _interrupt(self, number: int) -> None:
        if self.number is None:
            self.number = number
            self.stop.remember(number)
            self._expect_end(self.stop.grace_seconds)
            for member in self.members:
                member.signal(number)  # a terminal's Ctrl-C has reached it: it counts once

    def _pause(self) -> None:
        """Stops the job as Ctrl-Z asks: by preference where no rank waits for another.

        A collective has a timeout that goes on while the job is stopped.
        """
        if self._pause_until is not None and self.number is None:
            running = [m for m in self.members if not (m.is_paused or m.ending)]
            if running and self._clock.seconds() < self._pause_until:
                return
            for member in running:
                member.signal(signal.SIGSTOP)
            self.stop.stop_here()
            for member in self.members:
                member.signal(signal.SIGCONT)
                member.beaten_at = self._clock.seconds()
        self._pause_until = None
        for member in self.members:
            member.go_on()

    # ---- hangs

    def _hangs(self) -> bool:
        """Whether a rank has made no progress for too long; the job is over then."""
        if self.number is not None or self._pause_until is not None:
            return False
        now = self._clock.seconds()
        silent = [member for member in self.members if member.is_silent]
        if not any(now - member.beaten_at >= member.hang_seconds for member in silent):
            return False
        # Ranks that wait for it have beaten a little later.
        late = [m for m in silent if now - m.beaten_at >= m.hang_seconds / 2]
        stacks = [member.stack() for member in late]
        if any(map(watchdog.is_at_prompt, stacks)):
            for member in silent:
                member.beaten_at = now
            return False
        for member, stack in zip(late, stacks, strict=True):
            member.fault = Fault(member.rank, stack, is_hang=True)
            who = f"rank {member.rank}"
            member.fault.verdict = watchdog.verdict(stack, member.hang_seconds, who=who)
        return True

    def _is_late(self) -> bool:
        """Whether the time of a job that is to end is over: ranks that are still silent then hang,
        if all others only waited for them."""
        if self._clock.seconds() < self._deadline:
            return False
        silent = [member for member in self.members if member.is_silent]
        faults = self._faults()
        if self.number is None and all(fault.is_consequence for fault in faults):
            for member in silent:
                member.fault = Fault(member.rank, member.stack(), is_hang=True)
        elif silent and not faults:
            self.said = watchdog.late(self.stop.grace_seconds)
        return True


@contextmanager
def block_signals() -> Iterator[None]:
    """Blocks signals for a child, until it has handlers. A spawned one begins as `python -c`, with
    the current directory first: a ./pickle.py there would run before it has its parent's path."""
    was_set = SAFE_PATH in os.environ
    os.environ.setdefault(SAFE_PATH, "1")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not was_set:
            del os.environ[SAFE_PATH]


# ---- faults


def explain(faults: list[Fault]) -> RankFailed | UserError:
    """Hangs come first, then the ranks' own errors by time; the rest are mostly echoes of them."""

    def order(fault: Fault) -> tuple[bool, bool, bool, int]:
        # Of ranks that waited for each other in vain, one that did so by itself is the odd one.
        return not fault.is_hang, fault.is_consequence, not _is_in_users_code(fault), fault.time

    if line := _gathered_alone(faults):
        return line
    first, *rest = sorted(faults, key=order)
    if first.line is not None:
        line = first.kind(first.line)
        line.details = first.details
        return line
    lines = [f"rank {fault.rank} {_of_peer(fault)}" for fault in rest]
    if first.is_consequence:
        lines.append("the ranks waited for each other in different collectives")
    heading = "hung; its stack:" if first.is_hang else "failed:"
    lines += [f"rank {first.rank} {heading}", first.text, first.verdict]
    return RankFailed("\n".join(filter(None, lines)))


def _gathered_alone(faults: list[Fault]) -> UserError | None:
    """The line for ranks of which some waited in `self.all_gather`, and others elsewhere."""
    calls = {fault.rank: place for fault in faults if (place := _place_of_gather(fault))}
    others = [fault for fault in faults if fault.rank not in calls]
    if not (calls and others and all(fault.is_consequence for fault in faults)):
        return None
    rank, place = min(calls.items())
    error = UserError(
        f"rank {rank} called self.all_gather in {place}, and rank {others[0].rank} did not; every "
        "rank that has rows has to call it as often in each step"
    )
    error.details = "\n".join(fault.text for fault in faults)
    return error


def _place_of_gather(fault: Fault) -> str:
    """The caller of `Task.all_gather` in a traceback that ends there, else ''."""
    frames = [f for f in watchdog.FRAME.findall(fault.text) if TORCH not in f[0]]
    names = [name for _, _, name in frames]
    if names[-3:-1] != ["all_gather", "gather_rows"]:
        return ""
    file, line, name = frames[-4]
    return f"{name} ({os.path.basename(file)}, line {line})"


def _of_peer(fault: Fault) -> str:
    if fault.is_hang:
        return f"hung as well; its stack:\n{fault.text}"
    return f"ended after it: {fault.text.splitlines()[-1]}"


def _is_in_users_code(fault: Fault) -> bool:
    """And not in a collective of dpframe's, by its innermost frame that is not torch's."""
    files = [file for file, _, _ in watchdog.FRAME.findall(fault.text) if TORCH not in file]
    innermost = files[:1] if fault.is_hang else files[-1:]  # a traceback ends with it
    return bool(innermost) and not innermost[0].startswith(watchdog.HOUSE)
