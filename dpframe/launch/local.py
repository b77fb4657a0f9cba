"""Starts the ranks of a job on this machine, and ends them all with the first that fails.

A rank begins in `rank.rank_main`. It writes messages into a pipe, and beats into another one; the
job here reads both, until all ranks have ended or their time is up.
"""

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
from dpframe.launch.rank import SAFE_PATH, rank_main
from dpframe.launch.rank_errors import Fault, explain
from dpframe.launch.signals import SIGNALS, Interruption
from dpframe.launch.watchdog import BEAT, TICK_SECONDS, Clock

HERE = "127.0.0.1"  # where the ranks meet: other machines can't reach it
PEER_SECONDS = 1.0  # how long ranks get to end by themselves once one has failed
EXIT_SECONDS = 10.0  # and once their work is done
LOOK_SECONDS = 4.0  # between two looks at ranks that may wait for one that has ended
FILES, FILES_OF_A_RANK = 16, 8  # that are opened in the parent or a rank, with some to spare
DUMP_WAIT = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"

log = logging.getLogger("dpframe")

_idle_threads = 0  # native threads before anything was computed; 0: unknown


def launch(
    run: Callable[..., Any], args: tuple, *, count: int, uses_gpus: bool, timeout_seconds: float
) -> Any:
    """Runs `run(*args)` in `count` processes on this machine; returns rank 0's value."""
    signals.raise_if_signaled()
    _refuse_few_files(count)
    stop = signals.current() or Interruption()
    job = _Job(stop, uses_gpus=uses_gpus, timeout_seconds=timeout_seconds)
    with stop.left_to_launcher():
        try:
            job.start(run, args, count)
            job.watch()
        finally:
            job.kill()
    return job.result()


# ---- the ranks' processes


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


@contextmanager
def block_signals() -> Iterator[None]:
    """Blocks signals for a child, until it has handlers. A spawned one begins as `python -c`, with
    the current directory first: a ./pickle.py there would run before it has its parent's path."""
    was_set = SAFE_PATH in os.environ
    os.environ.setdefault(SAFE_PATH, "1")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not was_set:
            del os.environ[SAFE_PATH]


class _Rank:
    """A rank, as its parent sees it."""

    def __init__(self, context: Any, environment: dict[str, str], work: Any) -> None:
        self.number = int(environment["RANK"])
        self.environment = environment
        self.has_begun = False
        self.may_save = False  # it trains or evaluates
        self.ending = ""  # its last message: done, interrupted or failed
        self.fault: Fault | None = None
        self.hang_seconds = float("inf")
        self.beaten_at = 0.0
        self.messages, theirs = context.Pipe(duplex=False)
        self.pulse, beats = context.Pipe(duplex=False)
        self.process = context.Process(target=rank_main, args=(environment, theirs, beats, work))
        self.process.start()
        theirs.close()
        beats.close()

    @property
    def is_silent(self) -> bool:
        """Whether its end is still unknown."""
        return not (self.ending or self.fault)

    def receive(self) -> Iterator[tuple[str, Any]]:
        with suppress(EOFError, OSError):  # it has ended
            while self.messages.poll():
                yield pickle.loads(self.messages.recv_bytes())

    def read_stack(self) -> str:
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
    """The ranks, from their start to the end of the last one."""

    def __init__(self, stop: Interruption, *, uses_gpus: bool, timeout_seconds: float) -> None:
        self.ranks: list[_Rank] = []
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
        self._interrupted_at = float("inf")
        self._look_at = float("inf")
        self._stacks: list[str] = []  # at the last look

    def start(self, run: Callable[..., Any], args: tuple, count: int) -> None:
        import torch
        from torch.distributed import TCPStore

        signals.share_sockets()
        method, work = choose_start_method(uses_gpus=self.uses_gpus), (run, args)
        if method == "fork":
            # DDP's constructor imports torch._dynamo, for a second: here once for all ranks.
            torch.compiler.reset()
        # Left to itself, the store would listen on every network that the machine is in.
        listening = socket.create_server((HERE, 0))
        port = listening.getsockname()[1]
        context = multiprocessing.get_context(method)
        pickled = work if method == "fork" else pickle.dumps(work)
        start_rank = partial(_Rank, context, work=pickled)
        environments = [make_environment(number, count, port) for number in range(count)]
        with block_signals():
            for environment in environments:
                self.ranks.append(start_rank(environment))
        if method == "fork":
            self._wait_for_begin(start_rank)
        self.store = TCPStore(  # after the forks: it starts a thread
            HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def _wait_for_begin(self, start_rank: Callable[[dict[str, str]], _Rank]) -> None:
        """A fork may inherit a lock that nobody will release, e.g. the interpreter's own, and never
        run a line of Python: it is killed, and another one takes its place, a few times."""
        for seconds in watchdog.BEGIN_SECONDS:
            clock = Clock()
            while late := [r for r in self.ranks if not r.has_begun and r.process.is_alive()]:
                ends = [rank.process.sentinel for rank in late]
                wait([*ends, *(rank.messages for rank in late)], TICK_SECONDS)
                for rank in late:
                    self._read(rank)
                if self.stop.number is not None:
                    return
                if clock.seconds() >= seconds:
                    break
            for rank in late:
                who = f"rank {rank.number} (pid {rank.process.pid})"
                log.warning("%s has not begun in %g s; it is started again", who, seconds)
                rank.kill()
                with block_signals():
                    self.ranks[rank.number] = start_rank(rank.environment)

    def watch(self) -> None:
        """Until every rank has ended, by itself or because its time is up."""
        while alive := [rank for rank in self.ranks if rank.process.is_alive()]:
            silent = [rank.messages for rank in alive if rank.is_silent]
            wait([*silent, *(rank.process.sentinel for rank in alive)], TICK_SECONDS)
            self._forward_signals()
            for rank in self.ranks:
                self._read(rank)
            if self._hangs() or self._waits_in_vain() or self._is_late():
                return
        for rank in self.ranks:  # the last ones may have ended since
            self._read(rank)

    def result(self) -> Any:
        """What the main rank has returned, or the error of the job."""
        faults = self._faults()
        if self.number is not None and all(fault.is_consequence for fault in faults):
            raise Interrupted(self.number, self.said)
        if faults:
            silent = [rank.number for rank in self.ranks if rank.is_silent]
            faults += [Fault(number, "it was ended", is_consequence=True) for number in silent]
            error = explain(faults)
            error.told = self.told
            raise error
        return self.value

    def kill(self) -> None:
        """Ends what is left, and lets go of everything."""
        for rank in self.ranks:
            rank.kill()
        self.store = None  # which ends its thread

    def _faults(self) -> list[Fault]:
        return [rank.fault for rank in self.ranks if rank.fault is not None]

    def _expect_end(self, seconds: float) -> None:
        self._deadline = min(self._deadline, self._clock.seconds() + seconds)

    # ---- what ranks say

    def _read(self, rank: _Rank) -> None:
        has_ended = not rank.process.is_alive()  # asked first: then these are its last words
        for kind, value in rank.receive():
            self._handle(rank, kind, value)
        if not rank.is_silent:
            return
        news = watchdog.receive(rank.pulse.fileno())
        if BEAT in news:
            rank.beaten_at = self._clock.seconds()
        for number in SIGNALS:
            if number in news:
                self._interrupt(number)
        if has_ended and self.number is None:
            rank.fault = self._end_of(rank)
            self._expect_end(PEER_SECONDS)

    def _handle(self, rank: _Rank, kind: str, value: Any) -> None:
        if kind in ("done", "interrupted", "failed"):
            rank.ending = kind
        match kind:
            case "begun":
                rank.has_begun = True
            case "may save":
                rank.may_save = True
            case "told":
                self.told[value[0]] = value[1]
            case "watch":
                rank.hang_seconds = value or float("inf")
                rank.beaten_at = self._clock.seconds()
            case "done" if rank.number == 0:
                self.value = value
                # The others have nothing to write, but may be in their last collective.
                self._expect_end(self.timeout_seconds)
            case "interrupted":
                self._interrupt(value[0])
                if rank.number == 0:
                    self.said = value[1]
            case "failed":
                rank.fault = value
                self._expect_end(PEER_SECONDS)
        if all(other.ending == "done" for other in self.ranks):
            self._expect_end(EXIT_SECONDS)

    def _end_of(self, rank: _Rank) -> Fault:
        """Of one that has ended without a word."""
        code = rank.process.exitcode
        how = f"left with exit code {code} before its work was done"
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        # NCCL's watchdog aborts a rank whose peers did not come.
        is_consequence = self.uses_gpus and code == -signal.SIGABRT
        text = f"{how} (pid {rank.process.pid})"
        return Fault(rank.number, text, is_consequence=is_consequence)

    # ---- signals

    def _forward_signals(self) -> None:
        if self.stop.number is not None:
            self._interrupt(self.stop.number)

    def _interrupt(self, number: int) -> None:
        if self.number is None:
            self.number = number
            self.stop.remember(number)
            self._interrupted_at = self._clock.seconds()
            for rank in self.ranks:
                rank.signal(number)  # a terminal's Ctrl-C has reached it: it counts once

    # ---- hangs

    def _hangs(self) -> bool:
        """Whether a rank has made no progress for too long; the job is over then."""
        if self.number is not None:
            return False
        now = self._clock.seconds()
        silent = [rank for rank in self.ranks if rank.is_silent]
        if not any(now - rank.beaten_at >= rank.hang_seconds for rank in silent):
            return False
        for rank in silent:
            # Ranks that wait for it have beaten a little later.
            if now - rank.beaten_at >= rank.hang_seconds / 2:
                advice = (
                    "dpframe: no step, batch or checkpoint came for trainer.hang_seconds="
                    f"{rank.hang_seconds:g}; fix that, raise it, or set it to null"
                )
                rank.fault = Fault(rank.number, rank.read_stack(), is_hang=True, advice=advice)
        return True

    def _waits_in_vain(self) -> bool:
        """Whether some ranks are done, and all others wait for them, at the same places at two
        looks. A connection of gloo's breaks then, but nothing else tells who waits in the store."""
        left = [rank for rank in self.ranks if rank.is_silent]
        ended = [rank for rank in self.ranks if not rank.is_silent]
        has_begun = all(rank.has_begun for rank in left)  # else it can't be asked
        if self.number is not None or not (ended and left and has_begun):
            return False
        now = self._clock.seconds()
        self._look_at = min(self._look_at, now + LOOK_SECONDS)
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_SECONDS
        before, self._stacks = self._stacks, [rank.read_stack() for rank in left]
        if self._stacks != before or not all(map(watchdog.is_in_collective, before)):
            return False
        for rank, stack in zip(left, before, strict=True):
            advice = (
                f"dpframe: rank {ended[0].number} has ended, and rank {rank.number} waits for it "
                "in a collective; every rank has to come to the same ones"
            )
            rank.fault = Fault(rank.number, stack, is_hang=True, advice=advice)
        return True

    def _is_late(self) -> bool:
        """Whether the time of a job that is to end is over: ranks that are still silent then hang,
        if all others only waited for them."""
        may_save = any(rank.may_save for rank in self.ranks)
        grace_seconds = self.stop.grace_seconds if may_save else PEER_SECONDS
        if self._clock.seconds() < min(self._deadline, self._interrupted_at + grace_seconds):
            return False
        silent = [rank for rank in self.ranks if rank.is_silent]
        faults = self._faults()
        if self.number is None and all(fault.is_consequence for fault in faults):
            for rank in silent:
                rank.fault = Fault(rank.number, rank.read_stack(), is_hang=True)
        elif silent and not faults and may_save:
            self.said = signals.describe_lateness(self.stop.grace_seconds)
        return True
