"""Starts the ranks of a job through torch's elastic agent, and reports the one that failed."""

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from dpframe.errors import UserError

SHUTDOWN_SECONDS = 5  # how long ranks get to end by themselves once one has failed


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


def this_rank() -> Rank:
    """What torchrun and our own agent put into the environment, checked."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {name: os.environ.get(name, "") for name in names}
    given["LOCAL_RANK"] = given["LOCAL_RANK"] or given["RANK"]
    given["LOCAL_WORLD_SIZE"] = given["LOCAL_WORLD_SIZE"] or given["WORLD_SIZE"]
    shown = " ".join(f"{name}={value or '(unset)'}" for name, value in given.items())
    if not all(value.isdigit() for value in given.values()):
        raise UserError(f"strategy=ddp was not launched and finds {shown}; start it by torchrun")
    here = Rank(*(int(given[name]) for name in names))
    if not (here.rank < here.world_size and here.local_rank < here.local_world_size):
        raise UserError(f"the environment contradicts itself: {shown}; unset it or use torchrun")
    return here


def launch(run: Callable[..., Any], args: tuple, *, count: int, uses_cuda: bool) -> Any:
    """Runs `run(*args)` in `count` processes on this machine; returns rank 0's value."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="dpframe_", ignore_cleanup_errors=True) as errors:
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
            logs_specs=DefaultLogsSpecs(log_dir=errors),
        )
        try:
            return elastic_launch(config, _run_rank)(os.getpid(), run, args)[0]
        except ChildFailedError as error:
            failures = error.failures
        except SignalException as error:
            sys.exit(128 + error.sigval)
        raise _first_failure(failures)


def _run_rank(parent: int, run: Callable[..., Any], args: tuple) -> Any:
    """The first function of a rank: it dies with its parent, and leaves its traceback behind."""
    _die_with(parent)
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        return run(*args)
    except UserError as error:
        handler.record_exception(error)
        sys.exit(2)
    except Exception as error:
        handler.record_exception(error)
        sys.exit(1)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before we could ask
            os.kill(os.getpid(), signal.SIGKILL)


def _fork_is_safe() -> bool:
    """A child of a process with other threads inherits locks that nobody will ever release."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    return _native_threads() <= min(NATIVE_THREADS, os.cpu_count() or 1)


def _first_failure(failures: dict[int, Any]) -> Exception:
    """The error of the rank that failed first; the others' are mostly echoes of it."""
    ordered = sorted(failures.items(), key=lambda item: item[1].timestamp)
    rank, failure = ordered[0]
    lines = [f"rank {other} ended after it: {_brief(echo)}" for other, echo in ordered[1:]]
    recorded = _recorded(failure)
    if failure.exitcode == 2 and recorded:
        return UserError(recorded["message"].removeprefix("UserError: "))
    text = recorded["extraInfo"]["py_callstack"].rstrip() if recorded else _brief(failure)
    return RankFailed("\n".join([*lines, f"rank {rank} failed:", text]))


def _recorded(failure: Any) -> dict[str, Any] | None:
    try:
        with open(failure.error_file) as file:
            return json.load(file)["message"]
    except (OSError, ValueError, KeyError):
        return None


def _brief(failure: Any) -> str:
    if failure.exitcode < 0:
        return f"killed by {signal.Signals(-failure.exitcode).name} (pid {failure.pid})"
    recorded = _recorded(failure)
    if recorded:
        return recorded["message"].splitlines()[0]
    return f"left with exit code {failure.exitcode} (pid {failure.pid})"
