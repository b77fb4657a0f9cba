"""The runs of a sweep: one after the other in this process, or several at a time in their own."""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpframe.cli.exit import collect_garbage, leave_after, say, show_failure
from dpframe.cli.outcome import Outcome, outcome_of
from dpframe.config.compose import Composed
from dpframe.devices.accelerator import cores
from dpframe.errors import DeviceLost, Interrupted, UserError, first_line
from dpframe.launch import local, signals
from dpframe.launch.rank import SAFE_PATH
from dpframe.launch.rank_errors import RankFailed
from dpframe.launch.signals import SIGNALS, Interruption
from dpframe.launch.watchdog import TICK_SECONDS
from dpframe.modes.run import run
from dpframe.strategies.devices import HIDES, present, use_threads

BLOCK = 1 << 16


def run_here(job: Composed) -> tuple[Outcome, bool]:
    """In this process, which has torch imported; and whether it can still use its device."""
    collect_garbage()
    try:
        return outcome_of(run(job), job.objective.metric), True
    except UserError as error:
        say(error)
        is_own = isinstance(error, DeviceLost) and error.__cause__ is not None  # not a rank's
        return Outcome("failed", reason=first_line(error)), not is_own
    except Exception as error:
        show_failure(error)
        reason = f"{type(error).__name__}: {first_line(error)}"
        reason = error.reason if isinstance(error, RankFailed) else reason
        return Outcome("failed", reason=reason), True


# ---- several at a time


class Lane(NamedTuple):
    """What one of the processes that run at a time may use."""

    cores: list[int]
    environment: dict[str, str]  # which limits the GPUs that it sees
    has_gpus: bool


def lanes(jobs: Sequence[Composed], count: int) -> list[Lane]:
    """Equal shares; where there are fewer cores or GPUs than lanes, lanes share them."""
    if count == 1:
        return [Lane([], {}, has_gpus=True)]  # all of the machine
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    settings = [job.settings.trainer for job in jobs]
    there = present("auto") if any(each.accelerator != "cpu" for each in settings) else []
    variable = HIDES[there[0].type][0] if there and there[0].type in HIDES else ""
    visible = os.environ.get(variable, "") if variable else ""
    names = visible.split(",") if visible else map(str, range(len(there) if variable else 0))
    devices = list(names)[: len(there)]
    shares = [_share(devices, at, count) for at in range(count)]
    least = min(map(len, shares))
    for gpus in (each.gpus for each in settings):
        if devices and isinstance(gpus, int) and gpus > least:
            raise UserError(
                f"trainer.gpus={gpus} but sweep.jobs={count} leaves each run {least} of "
                f"{len(devices)} devices; use sweep.jobs={max(1, len(devices) // gpus)}"
            )
    return [
        Lane(_share(own, at, count), {variable: ",".join(share)} if share else {}, bool(there))
        for at, share in enumerate(shares)
    ]


def _share(things: Sequence[Any], at: int, count: int) -> list[Any]:
    if len(things) < count:
        return [things[at % len(things)]] if things else []
    return list(things[at * len(things) // count : (at + 1) * len(things) // count])


def run_apart(
    jobs: Iterator[Composed],
    lanes: Sequence[Lane],
    *,
    begun: Callable[[Composed], None],
    ended: Callable[[Composed, Outcome], None],
) -> None:
    """Each in a process; their lines come out with their numbers in front.

    The processes that run get a signal, too, and no other one is started after it.
    """
    stop = signals.current() or Interruption()
    local.allow_fork()
    following, free = next(jobs, None), list(reversed(lanes))
    running: list[_Process] = []
    number = None
    try:
        while running or (following and number is None):
            while following and free and number is None:
                begun(following)
                running.append(_Process(following, free.pop()))
                following = next(jobs, None)
            wait([part for process in running for part in process.parts], TICK_SECONDS)
            if stop.number is not None and number is None:
                number = stop.number
                for process in running:
                    process.signal(number)
            for process in list(running):
                has_ended = not process.is_alive()  # asked first: then these are its last lines
                process.read()
                if has_ended:
                    running.remove(process)
                    free.append(process.lane)
                    ended(process.job, process.outcome())
    finally:
        for process in running:
            process.kill()
    if number is not None:
        raise Interrupted(number)


class _Process:
    def __init__(self, job: Composed, lane: Lane) -> None:
        self.job = job
        self.lane = lane
        # A process that has seen a GPU can't be forked.
        method = local.choose_start_method(uses_gpus=lane.has_gpus)
        context: Any = multiprocessing.get_context(method)
        pairs = [context.Pipe(duplex=False) for _ in range(2)]
        label = f"[{(job.number or 0) + 1}] "
        self.streams = [
            _Labelled(reader, out, label)
            for (reader, _), out in zip(pairs, (sys.stdout, sys.stderr), strict=True)
        ]
        writers = [writer for _, writer in pairs]
        environment = {name: os.environ[name] for name in [SAFE_PATH] if name in os.environ}
        if not isinstance(job.settings.trainer.gpus, list):  # it names no GPUs
            environment |= lane.environment
        args = (job, lane.cores, environment, *writers)
        self.process = context.Process(target=_live, args=args)
        with local.block_signals():
            self.process.start()
        for writer in writers:
            writer.close()

    @property
    def parts(self) -> list[Any]:
        """What there is to wait for."""
        return [*(s.source for s in self.streams if not s.has_ended), self.process.sentinel]

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def signal(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    def read(self) -> None:
        for stream in self.streams:
            stream.read()

    def outcome(self) -> Outcome:
        code, last = self.process.exitcode, self.streams[1].last.removeprefix("dpframe: ")
        self.close()
        path = Path(self.job.run_dir) / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if code == 0:
            if summary:
                return outcome_of(summary, self.job.objective.metric)
            return Outcome("failed", reason=last or "it has left no summary.json")
        if code - 128 in SIGNALS:
            return Outcome("interrupted", reason=last)
        if code < 0:
            return Outcome("failed", reason=f"killed by {signal.Signals(-code).name}")
        if summary.get("status") == "failed":  # a note may be the last line
            last = summary["reason"].partition("\n")[0]
        return Outcome("failed", reason=last or f"exit code {code}")

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        self.process.join()
        self.process.close()
        for stream in self.streams:
            stream.close()


@dataclass
class _Labelled:
    """What a process prints, by whole lines."""

    source: Connection
    out: Any
    label: str
    last: str = ""  # line that came
    has_ended: bool = False
    rest: bytes = b""  # of a line that has not ended

    def read(self) -> None:
        while not self.has_ended and self.source.poll():
            block = os.read(self.source.fileno(), BLOCK)
            self.has_ended = not block
            *lines, self.rest = (self.rest + block).split(b"\n")
            self._print(lines)

    def close(self) -> None:
        self.read()
        self._print([self.rest] if self.rest else [])
        self.source.close()

    def _print(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            self.last = text or self.last
            self.out.write(f"{self.label}{text}".rstrip() + "\n")
        if lines:
            self.out.flush()


# ---- in the process


def _live(
    job: Composed,
    own_cores: list[int],
    environment: dict[str, str],
    out: Connection,
    err: Connection,
) -> None:
    signals.end_with_parent()
    signals.forget()
    os.environ.pop(SAFE_PATH, None)  # unless it is in the user's environment
    os.environ.update(environment)
    for number, pipe in ((1, out), (2, err)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    if own_cores:
        os.sched_setaffinity(0, own_cores)
    use_threads(min(torch.get_num_threads(), cores()))
    leave_after(lambda: _work(job))


def _work(job: Composed) -> int:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    collect_garbage()
    run(job)
    return 0
