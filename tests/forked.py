"""Commands that begin in a fork of a process with all imports made: a start takes no 3 s.

Run as a program, it is that process: it takes jobs as lines of JSON, and tells their exit codes.
"""

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


class Server:
    """One a test session; `forked_commands` in conftest opens it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        )
        self.codes: dict[int, int] = {}

    def start(self, words: list[str], folder: Path, out: Path, err: Path, **more: str) -> "Forked":
        job = [words, str(folder), str(out), str(err), {**os.environ, **more}]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        while (pid := self.read()) is None:
            pass
        return Forked(self, pid)

    def read(self) -> int | None:
        """The next line: the pid of a job that starts, or the exit code of one that ended."""
        assert self._process.stdout is not None
        pid, code = json.loads(self._process.stdout.readline())
        if code is None:
            return pid
        self.codes[pid] = code
        return None

    def has_news(self, seconds: float) -> bool:
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def close(self) -> None:
        self._process.kill()  # its jobs have ended; it may still import
        self._process.communicate()


class Forked:
    """As a Popen."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        while self.pid not in self._server.codes and self._server.has_news(0):
            self._server.read()
        return self._server.codes.get(self.pid)

    returncode = property(poll)

    def wait(self, timeout: float = 100.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self._server.has_news(seconds)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_server: Server | None = None


@contextmanager
def server() -> Iterator[None]:
    global _server
    _server = Server()
    try:
        yield
    finally:
        _server.close()
        _server = None


def start(words: list[str], folder: Path, *, out: Path, err: Path, **variables: str) -> Forked:
    """`python -m dpframe WORDS` in a group of its own."""
    assert _server is not None, "use the fixture forked_commands"
    return _server.start(words, folder, out, err, **variables)


def run(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess:
    out, err = folder / "printed", folder / "said"
    job = start(words, folder, out=out, err=err, **variables)
    try:
        code = job.wait()
    finally:
        job.kill()
    return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


# ---- the process that forks


def serve() -> None:

    import pytest  # noqa: F401
    import torch._dynamo  # noqa: F401  which DistributedDataParallel imports, in every rank

    import dpframe.cli.run  # noqa: F401
    import dpframe.strategies.ddp  # noqa: F401
    from dpframe.trainer import Trainer  # noqa: F401

    gc.freeze()  # the memory of what is imported stays shared
    jobs = os.dup(1)
    os.dup2(2, 1)
    lines = os.fdopen(os.dup(0), "rb", buffering=0)
    running = 0
    while True:
        if select.select([lines], [], [], 0.005 if running else None)[0]:
            line = lines.readline()
            if not line:
                return
            if (pid := os.fork()) == 0:
                lines.close()
                os.close(jobs)
                become(*json.loads(line))
            running += 1
            tell(jobs, pid, None)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            running -= 1
            tell(jobs, pid, os.waitstatus_to_exitcode(status))


def tell(jobs: int, pid: int, code: int | None) -> None:
    os.write(jobs, json.dumps([pid, code]).encode() + b"\n")


def become(words: list[str], folder: str, out: str, err: str, environment: dict[str, Any]) -> None:
    from dpframe.cli import main

    os.setpgid(0, 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND),
    ):
        file = os.open(name, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["dpframe", *words]
    try:
        main()
    except SystemExit as left:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(left.code or 0))
    finally:
        os._exit(1)


if __name__ == "__main__":
    serve()
