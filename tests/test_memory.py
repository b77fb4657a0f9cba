"""What a step frees stays with the process: the next one faults no pages in again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpframe.trainer import memory

FAULTS = """
import resource
import torch
from small import trainer
trainer()
torch.set_num_threads(1)


def step():
    rows = [torch.zeros(4 << 20) for _ in range(4)]  # 16 MB each


for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


def faults(**given: str) -> float:
    environment = {k: v for k, v in os.environ.items() if k not in memory.CHOICES} | given
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_step_faults_in_what_the_one_before_it_freed_only_where_that_was_asked_for():
    pages = 4 * (16 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults() < pages / 20
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") > pages / 2


def test_a_library_without_such_a_call_is_left_alone(monkeypatch):
    for name in memory.CHOICES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert memory.keep_freed() is False
