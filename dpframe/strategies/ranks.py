"""Starts the ranks of a job through torch's elastic agent, and reports the one that failed."""

import faulthandler
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from dpframe import orphans
from dpframe.errors import UserError

SHUTDOWN_SECONDS = 5  # how long ranks get to end by themselves once one has failed
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
NOISY = ("torch.distributed", "torch.multiprocessing", "torch.distributed.elastic.agent.server.api")
CUT = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


# What importing torch and NumPy started: idle, and made to survive a fork. More than these are
# the pools of a process that has computed something, and those do not survive one.
NATIVE_THREADS = _native_threads()


class Rank(NamedTuple):
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


class RankFailed(Exception):
    """A rank ended the job; its own traceback is in the message."""


def is_rank() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def are_several() -> bool:
    """Whether torchrun, say, started this process as one of several."""
    return is_rank() and os.environ["WORLD_SIZE"] not in ("", "0", "1")


def this_rank() -> Rank:
    """What torchrun and our own agent put into the environment, checked."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {name: os.environ.get(name, "") for name in names}
    given["LOCAL_RANK"] = given["LOCAL_RANK"] or given["RANK"]
    given["LOCAL_WORLD_SIZE"] = given["LOCAL_WORLD_SIZE"] or given["WORLD_SIZE"]
    shown = " ".join(f"{name}={value or '(unset)'}" for name, value in given.items())
    if not all(value.isdigit() for value in given.values()):
        raise UserError(f"strategy=ddp was not launched and finds {shown}; start it by torchrun")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(f"the environment has {shown} but no {name}; use torchrun, or unset it")
    here = Rank(*(int(given[name]) for name in names))
    if not (here.rank < here.world_size and here.local_rank < here.local_world_size):
        raise UserError(f"the environment contradicts itself: {shown}; unset it or use torchrun")
    return here


def launch(run: Callable[..., Any], args: tuple, *, count: int, uses_cuda: bool) -> Any:
    """Runs `run(*args)` in `count` processes on this machine; returns rank 0's value."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    folder = tempfile.TemporaryDirectory(prefix="dpframe_", ignore_cleanup_errors=True)
    with folder as notes, _signals_as_found():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # any free port
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="fork" if _fork_is_safe() and not uses_cuda else "spawn",
            shutdown_timeout=SHUTDOWN_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=notes),
        )
        try:
            return elastic_launch(config, _run_rank)(run, args)[0]
        except ChildFailedError as error:
            ((rank, failure),) = error.failures.items()  # the first end that the agent saw
            raise _cause(rank, failure, _notes(Path(notes))) from None
        except SignalException as error:
            sys.exit(128 + error.sigval)


@contextmanager
def _signals_as_found() -> Iterator[None]:
    """The agent takes over four signals, and by way of a variable; it gives neither back."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _run_rank(run: Callable[..., Any], args: tuple) -> Any:
    """The first function of a rank: it dies with its parent, and leaves a note of its error."""
    orphans.die_with_parent()
    # A fork brings the agent's handler along, which Python can't run inside a collective.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    try:
        return run(*args)
    except Exception as error:
        note = _noted(error)
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(note))
        if note["is_echo"]:
            # The agent ends this rank once it sees the one that cut the connection; it would
            # not look for that one if this one ended first.
            time.sleep(SHUTDOWN_SECONDS)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _fork_is_safe() -> bool:
    """A child of a process with other threads inherits locks that nobody will ever release."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    return _native_threads() <= min(NATIVE_THREADS, os.cpu_count() or 1)


def _noted(error: Exception) -> dict[str, Any]:
    message = f"{type(error).__name__}: {error}"
    return {
        "rank": int(os.environ["RANK"]),
        "time": time.time_ns(),
        "message": message,
        "user_error": str(error) if isinstance(error, UserError) else None,
        "traceback": "".join(traceback.format_exception(error)).rstrip(),
        "is_echo": _is_about_peers(error) and any(words in message for words in CUT),
    }


def _is_about_peers(error: Exception) -> bool:
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo/transport" in str(error)


def _notes(folder: Path) -> list[dict[str, Any]]:
    """What the ranks of the last attempt noted: first their own errors by time, then echoes."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.split("_")[1]))
    notes = []
    for path in attempts[-1].glob("*/error.json") if attempts else ():
        with suppress(ValueError):  # it was killed while it wrote
            notes.append(json.loads(path.read_text()))
    return sorted(notes, key=lambda note: (note["is_echo"], note["time"]))


def _cause(rank: int, failure: Any, notes: list[dict[str, Any]]) -> Exception:
    """The error of the rank that failed first; the others' are mostly echoes of it."""
    if any(note["rank"] == rank for note in notes):
        first, *rest = notes
        if first["user_error"] is not None:
            return UserError(first["user_error"])
        rank, text = first["rank"], first["traceback"]
    else:  # it had no time to note anything
        rest, text = notes, _ended(failure)
    lines = [f"rank {note['rank']} ended after it: {_brief(note)}" for note in rest]
    return RankFailed("\n".join([*lines, f"rank {rank} failed:", text]))


def _brief(note: dict[str, Any]) -> str:
    return "its connection was cut" if note["is_echo"] else note["message"].splitlines()[0]


def _ended(failure: Any) -> str:
    if failure.exitcode < 0:
        return f"killed by {signal.Signals(-failure.exitcode).name} (pid {failure.pid})"
    return f"left with exit code {failure.exitcode} (pid {failure.pid})"
