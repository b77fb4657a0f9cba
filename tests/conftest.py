"""What every test obeys: it leaves no process, thread, environment variable or process group."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WAIT_SECONDS = 10  # for what is on its way out: a DataLoader's worker looks for its parent every 5
PR_SET_CHILD_SUBREAPER = 36
# pytest's; torch's, when it is imported and when it finds CUDA
NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "CUDA_MODULE_LOADING"}
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform == "linux":
        # Orphans become ours, whatever session or group they moved to: so none can hide.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A script's `pytest &` ignores ctrl-c, and so would all that the tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.gpu` needs one CUDA device, `@pytest.mark.gpu(2)` two."""
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not marked:
        return
    import torch

    available = torch.cuda.device_count()
    for item, mark in marked:
        needed = mark.args[0] if mark.args else 1
        if available < needed:
            reason = f"needs {needed} CUDA device(s), this machine has {available}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    processes, threads = set(descendants()), set(threading.enumerate())
    environment, handlers = dict(os.environ), [signal.getsignal(s) for s in HANDLED]
    yield
    assert not remaining(lambda: set(descendants()) - processes, named=command), "leaked processes"
    assert not remaining(lambda: set(threading.enumerate()) - threads, named=str), "leaked threads"
    assert changes(environment, dict(os.environ)) == {}, "changed environment variables"
    assert [signal.getsignal(s) for s in HANDLED] == handlers, "changed signal handlers"
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available():
        assert not distributed.is_initialized(), "left a process group"


def remaining(find, *, named) -> list[str]:
    """What is still there once what was about to end has ended."""
    deadline = time.monotonic() + WAIT_SECONDS
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [named(one) for one in found]


def descendants() -> Iterator[int]:
    """The living processes below this one, but for multiprocessing's own lasting tracker."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended while we looked
        if state != "Z":
            parents[int(entry.name)] = int(parent)
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        is_below = above == os.getpid() and pid != os.getpid()
        if is_below and "resource_tracker" not in command(pid):
            yield pid


def command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return f"{pid}: {b' '.join(words).decode(errors='replace')}"


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    names = {name for name in before | after if before.get(name) != after.get(name)}
    return {name: after.get(name) for name in names - NOT_OURS}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The weights that tests/injector.py's recipe ends with where nothing happens to it."""
    from injector import run, weights

    known: dict[tuple[str, ...], Any] = {}

    def found(*overrides: str) -> Any:
        if overrides not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            done = run(folder, *overrides)
            assert done.returncode == 0, done.stderr
            known[overrides] = weights(folder)
        return known[overrides]

    return found
