"""A run that ends well leaves out C++ destructors, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHORTENED = """
import atexit, ctypes, sys, torch
from dpframe.cli import ending

library = ctypes.CDLL(None)
library.on_exit(library.abort, None)  # in the place of a destructor
atexit.register(lambda: print("Python's own"))
library.fopen.restype = ctypes.c_void_p
library.fputs(b"held back", ctypes.c_void_p(library.fopen(b"a file of C's", b"w")))
ending.shorten()
sys.exit(int(sys.argv[1]))
"""
PROGRAM = """
import ctypes
library = ctypes.CDLL(None)
library.on_exit(library.abort, None)
from dpframe.cli import main
main()
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's on_exit")


def python(code: str, *words: str, at: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=at,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("code", [0, 1])
def test_what_is_held_back_is_written_and_the_exit_code_stands(tmp_path, code):
    done = python(SHORTENED, str(code), at=tmp_path)
    assert (done.returncode, done.stdout) == (code, "Python's own\n"), done.stderr
    assert (tmp_path / "a file of C's").read_text() == "held back"


@pytest.mark.parametrize("words, code", [([], 0), (["trainer.lean=false"], -6), (["a=b"], -6)])
def test_only_a_lean_run_that_ended_well_is_cut_short(tmp_path, words, code):
    done = python(PROGRAM, "recipe=shapes", "trainer.max_epochs=1", *words, at=tmp_path)
    assert done.returncode == code, done.stderr
