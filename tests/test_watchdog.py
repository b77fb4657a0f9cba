"""Signs of life, as they are sent and read; test_ranks and test_signals have whole jobs."""

import faulthandler
import os
import time

import pytest

from dpframe.launch import watchdog
from dpframe.launch.watchdog import Clock


def test_beats_are_sent_a_few_times_a_second_and_only_while_someone_reads(monkeypatch):
    now = [time.monotonic()]  # a beat that another test has sent was before it
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    read, write = os.pipe()
    try:
        watchdog.connect(write)
        now[0] += watchdog.BEAT_SECONDS
        for _ in range(1000):
            watchdog.beat()
        assert os.read(read, 4096) == bytes([watchdog.BEAT])
        now[0] += watchdog.BEAT_SECONDS
        watchdog.beat()
        assert os.read(read, 4096) == bytes([watchdog.BEAT])
    finally:
        watchdog.disconnect()
        os.close(read)
        os.close(write)
    watchdog.beat()  # to nobody


def test_a_timer_starts_again_with_beats_is_held_and_ends(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 0.0)
    monkeypatch.setattr(watchdog, "_due", 0.0)
    begin, cancel = "dump_traceback_later", "cancel_dump_traceback_later"
    monkeypatch.setattr(faulthandler, begin, lambda seconds, **_: calls.append(f"{seconds} s"))
    monkeypatch.setattr(faulthandler, cancel, lambda: calls.append("cancel"))
    with watchdog.timer(9):
        watchdog.beat()
        with watchdog.held():
            calls.append("stopped")
        pid = os.fork()
        if pid == 0:  # its parent's timer has no thread here, which would be waited for
            watchdog.beat()
            os._exit(len(calls))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(calls)
    watchdog.beat()
    assert calls == ["9 s", "9 s", "cancel", "stopped", "9 s", "cancel"]
    with watchdog.timer(None):
        watchdog.beat()
    assert len(calls) == 6


def test_a_clock_counts_no_more_than_a_moment_of_the_time_that_a_process_is_stopped(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(tick=0.5)
    for seconds, counted in ((0.5, 0.5), (0.2, 0.7), (3600, 1.2)):
        now[0] += seconds
        assert clock.seconds() == pytest.approx(counted)


STACK = """Stack (most recent call first):
  File "/home/me/data.py", line 9 in wait
  File "/home/me/net.py", line 3 in training_step
  File "{house}task.py", line 7 in forward
  File "{house}modes/run.py", line 5 in _run_rank
  File "{house}cli/main.py", line 4 in main
"""


def test_a_stack_ends_with_the_work_and_its_place_is_that_of_the_users_frames(monkeypatch):
    read, write = os.pipe()
    os.write(write, STACK.format(house=watchdog.HOUSE).encode())
    monkeypatch.setattr(watchdog, "STACK", 0)  # nobody is asked
    stack = watchdog.read_stack(os.getpid(), read)
    os.close(write)
    os.close(read)
    assert stack.splitlines()[-1].endswith('run.py", line 5 in _run_rank')
    assert watchdog.locate(stack) == "wait (data.py, line 9) in training_step (net.py, line 3)"
    assert watchdog.locate("") == ""
