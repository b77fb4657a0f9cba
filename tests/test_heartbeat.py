"""Signs of life, as they are counted and looked at; test_ranks and test_signals have whole jobs."""

import io
import pdb
import sys
import threading
import time

import pytest

from dpframe import heartbeat
from dpframe.heartbeat import Clock, main_thread_last, where


class Typing(io.StringIO):
    """What a debugger reads from; it asks meanwhile whether one is open."""

    def readline(self, *_) -> str:
        self.is_at_prompt = heartbeat.is_at_prompt(threading.get_ident())
        return "continue\n"


def test_a_run_at_the_prompt_of_a_breakpoint_does_not_hang():
    assert not heartbeat.is_at_prompt(threading.get_ident())
    typing = Typing()
    before = sys.gettrace()
    try:
        pdb.Pdb(stdin=typing, stdout=io.StringIO(), nosigint=True, readrc=False).set_trace()
        time.sleep(0)
    finally:
        sys.settrace(before)
    assert typing.is_at_prompt


def test_a_clock_counts_no_more_than_a_moment_of_the_time_that_a_process_is_stopped(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(tick=0.5)
    for seconds, counted in ((0.5, 0.5), (0.2, 0.7), (3600, 1.2)):
        now[0] += seconds
        assert clock.seconds() == pytest.approx(counted)


DUMP = """Thread 0x1 (most recent call first):
  File "/x/dpframe/interruption.py", line 1 in _watch

Current thread 0x2 (most recent call first):
  File "/home/me/data.py", line 9 in wait
  File "/home/me/net.py", line 3 in training_step
  File "{house}task.py", line 7 in forward
  File "{house}cli/run.py", line 5 in _work
  File "{house}cli/main.py", line 4 in main

Thread 0x3 (most recent call first):
  File "/home/me/data.py", line 20 in prefetch
"""


def test_the_main_thread_of_a_stack_is_last_and_begins_with_the_work():
    stack = main_thread_last(DUMP.format(house=heartbeat.HOUSE))
    *_, last = stack.split("\n\n")
    assert "interruption.py" not in stack and "main.py" not in stack and "prefetch" in stack
    assert last.splitlines()[-1].endswith('run.py", line 5 in _work')
    assert where(stack) == "wait (data.py, line 9) in training_step (net.py, line 3)"
    assert where(main_thread_last("")) == ""
