"""Rules for every test: it leaves nothing behind, and only those of GPUs see one."""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fakecuda import build
from long import is_long
from quick import is_quick

WAIT_SECONDS = 60  # for what is about to end: a DataLoader's worker looks for its parent every 5
PR_SET_CHILD_SUBREAPER = 36
# Set by pytest; by torch, when it is imported and when it finds CUDA; by lightning's import.
SET_BY_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "CUDA_MODULE_LOADING"}
SET_BY_OTHERS |= {"PYTORCH_NVML_BASED_CUDA_CHECK"}
HAS_GPUS = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
# Of torch's compiler on a machine of many cores, of tqdm, and what C++ calls Python from.
LASTING_THREADS = ("InductorSubproc", "subproc_worker_timer", "tqdm_monitor", "Dummy-")
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform == "linux":
        # Orphans become children of pytest, whatever their session or group: none can hide.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A script's `pytest &` ignores ctrl-c, and so would all that the tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """A file or a test that is named runs in this process, those of a marker on all cores; the
    whole suite has a worker more: there is always a test that waits for its processes."""
    if any(".py" in argument for argument in config.args):
        return 0
    return None if config.option.markexpr else len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Only those that are marked `gpu` see a GPU: the others are of the CPU, on every machine."""
    has_gpus = item.get_closest_marker("gpu") is not None
    with nullcontext() if has_gpus else gpus_hidden():
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Torch has computed nothing yet, and starts no pool of threads: ranks may be forked. What
    tests/fakecuda has to compile first is no part of a test, and of its time limit."""
    runs = () if session.config.option.collectonly else session.items
    if any(item.path.stem == "test_fakecuda" for item in runs):
        with suppress(build.CanNotBuild):  # its tests say why
            build.built()
    if HAS_GPUS:
        skip_gpu_tests_among_others(session.items)
    if "torch" in sys.modules:
        import torch

        from dpframe.launch import local

        torch.set_num_threads(1)
        local.allow_fork()


def skip_gpu_tests_among_others(items: list[pytest.Item]) -> None:
    """A process that has looked for GPUs while they were hidden from it finds none later."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    for item in marked if len(marked) < len(items) else ():
        item.add_marker(pytest.mark.skip(reason="python -m pytest -m gpu runs it"))


@contextmanager
def gpus_hidden() -> Iterator[None]:
    """From this process, and from those that it starts, if this machine has some."""
    if not (HAS_GPUS or "FAKECUDA" in os.environ):
        yield
        return
    with pytest.MonkeyPatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        if "torch" in sys.modules:
            import torch

            for module in (torch.cuda, torch.accelerator):
                hidden.setattr(module, "device_count", lambda: 0)
                hidden.setattr(module, "is_available", lambda: False)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`quick` is for those of quick.py, `long` for those of long.py; `whole` needs dpframe's
    plugins, too; `gpu` takes all CUDA devices there are, `gpu(2)` needs two; `one_gpu` is for those
    of `gpu(1)`, which more devices are no other case of."""
    has_plugins = (Path(__file__).parents[1] / "dpframe/plugins").is_dir()
    for item in items:
        if item.get_closest_marker("whole") and not has_plugins:
            item.add_marker(pytest.mark.skip(reason="dpframe/plugins is missing"))
        if is_quick(item.path.stem, item.originalname):
            item.add_marker(pytest.mark.quick)
        if is_long(item.path.stem, item.name):
            item.add_marker(pytest.mark.long)
    leave_out_long(config, items)
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not marked:
        return
    import torch

    available = torch.cuda.device_count()
    for item, mark in marked:
        if mark.args == (1,):
            item.add_marker(pytest.mark.one_gpu)
        needed = mark.args[0] if mark.args else 1
        if available < needed:
            reason = (
                f"needs {needed} CUDA device(s), this machine has {available}; "
                f"python tests/fakecuda {needed} -m pytest -m gpu runs it on fake ones"
            )
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file that wait for what is made once, e.g. a group of ranks, run in one
    process, which makes it, and not in each; the largest such files come first."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if shares(config.rootpath / file) else nodeid

    return Scheduling(config, log)


@cache
def shares(path: Path) -> bool:
    return bool(re.search(r'^@once$|scope="module"', path.read_text(), re.M))


def leave_out_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """From the whole suite, not from a file, a marker or a name that is asked for."""
    option = config.option
    if option.markexpr or option.keyword or any(".py" in argument for argument in config.args):
        return
    left = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    processes, threads = set(descendants()), set(threads_that_end())
    environment, handlers = dict(os.environ), [signal.getsignal(s) for s in HANDLED]
    yield
    assert not remaining(lambda: set(descendants()) - processes, named=command), "leaked processes"
    assert not remaining(lambda: set(threads_that_end()) - threads, named=str), "leaked threads"
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


def threads_that_end() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if not each.name.startswith(LASTING_THREADS)]


def descendants() -> Iterator[int]:
    """The living processes below this one, but for those of multiprocessing and torch that last."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # in the quickest way: each test does it
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # it ended while we looked
        if state != b"Z":
            parents[int(name)] = int(parent)
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above != os.getpid() or pid == os.getpid():
            continue
        is_child = parents[pid] == os.getpid()
        # torch's compiler keeps its own, too, on a machine of many cores.
        lasts = "resource_tracker|forkserver|_inductor/compile_worker"
        if not (is_child and re.search(lasts, command(pid))):
            yield pid


def command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return f"{pid}: {b' '.join(words).decode(errors='replace')}"


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    names = {name for name in before | after if before.get(name) != after.get(name)}
    return {name: after.get(name) for name in names - SET_BY_OTHERS}


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
