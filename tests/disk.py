"""A disk that fails: a small library that is preloaded, as tests/disk.c says."""

import subprocess
from pathlib import Path

import pytest


def library(folder: Path) -> str:
    """Compiled into `folder`; its path is for LD_PRELOAD."""
    source, built = Path(__file__).with_suffix(".c"), folder / "disk.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(built), str(source), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs gcc to compile tests/disk.c")
    assert done.returncode == 0, done.stderr
    return str(built)
