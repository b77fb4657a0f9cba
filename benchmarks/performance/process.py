"""Runs programs as processes of their own, one after another in turns, and measures them."""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

PROGRAMS = Path(__file__).parent / "programs"
WARM_EPOCHS = 5  # of a run, left out of its time a step
LIMIT_SECONDS = 300
WORK = {"BENCHMARK_CLOCK": "processor"}
CALM = 0.15  # processors that others may keep busy
NOT_INHERITED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONPATH"),
    "PYTHONDONTWRITEBYTECODE",  # else a start-up is one of sources that are compiled each time
)


class Program(NamedTuple):
    name: str
    command: list[str]
    code: int = 0  # what it exits with


class Run(NamedTuple):
    """`step` and `epoch_step` are microseconds a step: of training alone, and of all there is."""

    seconds: float
    megabytes: float  # of the process that was started, at its peak
    beside: float = 0.0  # processors that others kept busy meanwhile
    begin: float = 0.0  # seconds until the first epoch
    step: float = 0.0
    epoch_step: float = 0.0
    first_step: float = 0.0  # `step` in the run's first quarter, and in its last
    last_step: float = 0.0
    calls: float = 0.0  # Python calls a step
    loss: float = 0.0


def count_work() -> None:
    """From now on seconds are those of processors, with one thread of arithmetic to a program.

    That is not how long anything takes: writing and waiting are left out. But it hardly depends on
    what else runs, where times are worth nothing.
    """
    os.environ.update(WORK, OMP_NUM_THREADS="1")


def in_turns(programs: Sequence[Program], rounds: int) -> dict[str, list[Run]]:
    """A B C B C A …, after a turn that warms the disk's cache and is thrown away.

    The order changes from turn to turn: a machine may be slower after some programs than after
    others. A turn beside which others kept the machine busy is made again, at most twice as often
    as asked; the calmest are kept, which is not to look at what was measured.
    """
    order = Random(0)

    def turn() -> dict[str, Run]:
        shuffled = order.sample(programs, len(programs))
        return {program.name: run(program) for program in shuffled}

    turns = [turn()][1:]
    while sum(disturbance(its) < CALM for its in turns) < rounds and len(turns) < 3 * rounds:
        turns.append(turn())
    kept = sorted(turns, key=disturbance)[:rounds]
    return {program.name: [its[program.name] for its in kept] for program in programs}


def disturbance(turn: dict[str, Run]) -> float:
    return statistics.fmean(measured.beside for measured in turn.values())


def run(program: Program, *, counts: bool = False) -> Run:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        report = Path(folder, "report.json")
        environment = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        environment["BENCHMARK_REPORT"] = str(report)
        if counts:
            environment["BENCHMARK_CALLS"] = "1"
        with Path(folder, "output").open("w+") as output:
            busy, began = busy_seconds(), time.perf_counter()
            process = subprocess.Popen(
                program.command, cwd=folder, env=environment, stdout=output, stderr=output
            )
            code, usage = _ended(process)
            seconds = time.perf_counter() - began
            others = busy_seconds() - busy - usage.ru_utime - usage.ru_stime
            if code != program.code:
                output.seek(0)
                command = " ".join(program.command)
                raise SystemExit(f"{command}\nended with {code}:\n{output.read()[-3000:]}")
        told = json.loads(report.read_text()) if report.is_file() else None
    used = usage.ru_utime + usage.ru_stime
    if WORK.items() <= environment.items():
        plain, began = Run(used, usage.ru_maxrss / 1024), 0.0
    else:
        plain = Run(seconds, usage.ru_maxrss / 1024, max(0.0, others / seconds))
    return plain if told is None else plain._replace(**_times(told, began))


def _ended(process: subprocess.Popen) -> tuple[int, resource.struct_rusage]:
    """The exit code and what it used, which only wait4 tells of one process.

    Its peak memory counts what it was before it became the program, a copy of this one: so the
    runner must stay small, and imports no torch.
    """
    limit = threading.Timer(LIMIT_SECONDS, process.kill)
    limit.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    finally:
        limit.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage


def busy_seconds() -> float:
    """Of all processors, since the machine began; 0 where the system doesn't tell."""
    try:
        fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _, _, interrupts, soft, steal = map(int, fields[:8])
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


def _times(told: dict, began: float) -> dict[str, float]:
    begun, trained, ended = told["begun"], told["trained"], told["ended"]
    steps = told["steps_per_epoch"]
    each = [1e6 * (t - b) / steps for b, t in zip(begun, trained, strict=True)]
    found = {"begin": begun[0] - began, "loss": told["loss"], "calls": told["calls"] / steps}
    warm = WARM_EPOCHS if len(each) > 2 * WARM_EPOCHS else 0
    first = ended[warm - 1] if warm else begun[0]
    found["epoch_step"] = 1e6 * (ended[-1] - first) / (len(ended) - warm) / steps
    kept = each[warm:]
    quarter = max(1, len(kept) // 4)
    found["step"] = statistics.median(kept)
    found["first_step"] = statistics.median(kept[:quarter])
    found["last_step"] = statistics.median(kept[-quarter:])
    return found


def dpframe(*words: str, name: str = "dpframe", code: int = 0) -> Program:
    """The command itself."""
    return Program(name, [sys.executable, "-m", "dpframe", *words], code)


def noted(*words: str, name: str = "dpframe") -> Program:
    """The command with a callback that notes the times of its epochs."""
    return Program(name, [sys.executable, str(PROGRAMS / "dpframe_command.py"), *words])


def script(python: str, file: str, *words: str, name: str) -> Program:
    return Program(name, [python, str(PROGRAMS / f"{file}.py"), *words])


def pairs(runs: Sequence[float], others: Sequence[float]) -> Iterator[float]:
    """One over the other, turn by turn: what slowed the machine for a while slowed both."""
    return (one / other for one, other in zip(runs, others, strict=True))
