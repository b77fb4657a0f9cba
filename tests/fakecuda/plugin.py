"""A test fails if it, or a process that it started, broke the rules of CUDA's streams."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakecuda import gpus, report

REPORT = "FAKECUDA_REPORT"  # the file to which every process adds a line for a violation


def pytest_configure(config: pytest.Config) -> None:
    handle, path = tempfile.mkstemp(prefix="fakecuda-")
    os.close(handle)
    os.environ[REPORT] = path
    config.add_cleanup(lambda: Path(path).unlink(missing_ok=True))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    forget()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    result = yield
    complain(item)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        result = yield
        complain(item)
        return result
    finally:
        forget()
        restore()


def complain(item: pytest.Item) -> None:
    path = Path(os.environ[REPORT])
    lines = report.violations(path.read_text())
    if item.get_closest_marker("frees_by_waits"):  # which are not followed past a free
        lines = [line for line in lines if " is freed while " not in line]
    lines += streams_left()
    if lines:
        forget()
        pytest.fail("\n".join([f"{len(lines)} violation(s):", *lines[:10]]), pytrace=False)


def forget() -> None:
    Path(os.environ[REPORT]).write_text("")
    if gpus.library is not None:
        gpus.library.violations(True)
        gpus.library.forget_contexts()


def streams_left() -> list[str]:
    count = gpus.library.device_count() if gpus.library is not None else 0
    left = {gpu: gpus.library.get_stream(gpu) for gpu in range(count)}
    return [f"cuda:{gpu} is left on its stream {one}" for gpu, one in left.items() if one]


def restore() -> None:
    """The state of a process that others would meet."""
    if gpus.library is None:
        return
    gpus.library.set_sync_debug_mode(0)
    for gpu in reversed(range(gpus.library.device_count())):
        gpus.library.set_memory_fraction(1.0, gpu)
        gpus.library.set_stream(0, gpu)
