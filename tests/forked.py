"""Processes that begin in milliseconds: forks of a server that has torch and dpframe imported.

`fresh(call, *args)` calls a function in one and returns its value; `on(strategy, call)` does so in
the ranks of a strategy, and `in_turn` calls several functions there. `run(words, folder)` is
`python -m dpframe WORDS`, and `started` does not wait for it. A new interpreter takes seconds: it
is for tests of the start (tests/command.py).
"""

import ctypes
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from conftest import descendants

from dpframe import Strategy
from dpframe.launch import local, signals

TESTS = Path(__file__).resolve().parent
HANG_SECONDS = 200.0  # before pytest's timeout, which does not show where a rank hangs
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "dpframe.modes.run",
        "dpframe.loggers.tensorboard",
        "dpframe.recipes.boston",
        "dpframe.strategies.ddp",
        "dpframe.strategies.fsdp",
        "dpframe.trainer.loop",
        "pytest",
        "torch._dynamo",  # which DistributedDataParallel imports, in every rank
        "warmed",
    ]
)


def fresh(
    call: Callable[..., Any],
    *args: Any,
    folder: Path | str = ".",
    environment: dict[str, str] | None = None,
) -> Any:
    """`call(*args)` in a process that has computed nothing, so that its ranks are forks."""
    given = dict(os.environ if environment is None else environment)
    with ProcessPoolExecutor(1, server()) as pool:
        # As bytes: the pool's own way would share each tensor by a file that is open here.
        return pickle.loads(pool.submit(_call, call, args, folder, given).result())


def on(
    strategy: Strategy, call: Callable[..., Any], *args: Any, enter: Callable[[], object] = bool
) -> Any:
    """`call(strategy, *args)` where the strategy is set up: in its ranks, if it has some, after
    `enter()` in the process that starts them."""
    if strategy.launches_ranks:
        return fresh(_entered, enter, strategy, call, args)
    return _opened(strategy, call, args)


def in_turn(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What `on` returns for each of these arguments, one after another in the same ranks: to start
    them takes longer than most calls. All of the strategies have as many."""
    first: Strategy = cases[0][0]
    return fresh(first.launch, _opened_in_turn, cases)


def launched(strategy: Strategy, call: Callable[..., Any], *args: Any) -> Any:
    """`call(strategy, *args)` in the ranks of this process."""
    return strategy.launch(_opened, strategy, call, args)


def _entered(
    enter: Callable[[], object], strategy: Strategy, call: Callable[..., Any], args: tuple
) -> Any:
    enter()
    return launched(strategy, call, *args)


def run(words: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m dpframe WORDS` in `folder`, with these variables more."""
    with started(words, folder, **variables) as job:
        code = job.wait()
        return subprocess.CompletedProcess(words, code, job.printed(), job.said())


def dpframe() -> None:
    from dpframe.cli import main

    main()


@contextmanager
def started(
    words: Sequence[str],
    folder: Path,
    *,
    enter: Callable[[], None] = bool,
    program: Callable[[], None] = dpframe,
    **variables: str,
) -> Iterator["Job"]:
    """The same, in a process group of its own, killed at the end if it still runs; `enter` is
    called there first. `program` is another one than the command, that reads `sys.argv`."""
    with TemporaryDirectory() as output:
        for name in ("printed", "said"):
            Path(output, name).touch()
        args = (list(words), folder, Path(output), os.environ | variables, enter, program)
        process = server().Process(target=_become, args=args)
        process.start()
        try:
            yield Job(process, folder, Path(output))
        finally:
            process.kill()
            process.join()


def server() -> Any:
    """Started with the first process, with the dpframe under test."""
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        forkserver.ensure_running()
    return SERVER


class Job:
    """A command that runs, and what it has printed so far."""

    def __init__(self, process: Any, folder: Path, output: Path) -> None:
        self._process = process
        self._output = output
        self.folder = folder
        self.pid: int = process.pid

    @property
    def code(self) -> int | None:
        """As a Popen's returncode: None while it runs, -n after signal n."""
        return self._process.exitcode

    def wait(self, seconds: float = 200.0) -> int:
        self._process.join(seconds)
        assert self.code is not None, f"runs after {seconds} s: {self.said()}"
        return self.code

    def ended(self) -> tuple[int, list[str]]:
        return self.wait(), self.said().splitlines()

    def wait_for(self, *markers: str) -> None:
        """Until these files are in its folder."""
        is_over = False
        while not all((self.folder / marker).exists() for marker in markers):
            assert not is_over, self.said()
            is_over = self.code is not None  # it may have made them last
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """Their processes, by number."""
        found = {}
        for pid in descendants():
            with suppress(FileNotFoundError):  # one that has just ended
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == self.pid:
                    found[pid] = int(stat[19])  # when it started
        return sorted(found, key=lambda pid: (found[pid], pid))

    def printed(self) -> str:
        return (self._output / "printed").read_text()

    def said(self) -> str:
        """On stderr."""
        return (self._output / "said").read_text()


def _opened(strategy: Strategy, call: Callable[..., Any], args: tuple) -> Any:
    strategy.setup()
    try:
        with signals.watched(HANG_SECONDS):
            return call(strategy, *args)
    finally:
        strategy.close()


def _opened_in_turn(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [_opened(strategy, call, tuple(args)) for strategy, call, *args in cases]


# ---- in the fork


def stop_forks(*numbers: int) -> None:
    """This process's next forks of these numbers, from 0, stop before they run anything, as in a
    lock that a thread held during the fork. So do its children's, by numbers of their own."""
    numbered = count()
    number = -1

    def before() -> None:
        nonlocal number
        number = next(numbered)

    def after_in_child() -> None:
        nonlocal numbered
        while number in numbers:
            signal.pause()
        numbered = count()

    os.register_at_fork(before=before, after_in_child=after_in_child)


def limited(megabytes: int) -> None:
    """This process gets so many MiB more than it has."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what torch frees goes back at once
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + megabytes * 2**20, resource.RLIM_INFINITY))


def _call(
    call: Callable[..., Any], args: tuple, folder: Path | str, environment: dict[str, str]
) -> bytes:
    _begin(folder, environment)
    local.allow_fork()  # nothing was computed here
    return pickle.dumps(call(*args))


def _become(
    words: list[str],
    folder: Path,
    output: Path,
    environment: dict[str, str],
    enter: Callable[[], None],
    program: Callable[[], None],
) -> None:
    enter()
    os.setpgid(0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    _begin(folder, environment)
    for number, name in ((1, "printed"), (2, "said")):
        file = os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.argv = [program.__name__, *words]
    program()


def _begin(folder: Path | str, environment: dict[str, str]) -> None:
    multiprocessing.set_start_method("fork", force=True)  # as in a new interpreter
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
