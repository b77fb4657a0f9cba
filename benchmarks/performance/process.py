"""Runs programs as processes of their own, one after another in turns, and measures them."""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

PROGRAMS = Path(__file__).parent / "programs"
PEERS = Path(__file__).parent.parent / "peers.lock"
WARM_EPOCHS = 5  # of a run, left out of its time per step
LIMIT_SECONDS = 300
NOT_INHERITED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONPATH"),
    "PYTHONDONTWRITEBYTECODE",  # else each start compiles the sources again
)


class Program(NamedTuple):
    name: str
    command: list[str]
    code: int = 0  # the exit code that it should have
    python_path: str = ""


class Run(NamedTuple):
    """`step` and `epoch_step` are microseconds per step: of training alone, and of everything."""

    seconds: float
    megabytes: float = 0.0  # the peak of the process that trained
    begin: float = 0.0  # seconds until the first epoch
    step: float = 0.0
    epoch_step: float = 0.0
    first_step: float = 0.0  # `step` in the first quarter of the run, and in the last one
    last_step: float = 0.0
    loss: float = 0.0


def in_turns(programs: Sequence[Program], rounds: int) -> dict[str, list[Run]]:
    """Runs all programs `rounds` times, in a new random order each time.

    A first round warms the disk's cache and is thrown away. A machine may be slower after some
    programs than after others, hence the changing order.
    """
    order = Random(0)
    runs: dict[str, list[Run]] = {program.name: [] for program in programs}
    for _ in range(rounds + 1):
        for program in order.sample(programs, len(programs)):
            runs[program.name].append(run(program))
    return {name: kept for name, (_, *kept) in runs.items()}


def run(program: Program) -> Run:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        report = Path(folder, "report.json")
        environment = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        environment["BENCHMARK_REPORT"] = str(report)
        if program.python_path:
            environment["PYTHONPATH"] = program.python_path
        began = time.perf_counter()
        done = subprocess.run(
            program.command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        seconds = time.perf_counter() - began
        if done.returncode != program.code:
            command = " ".join(program.command)
            raise SystemExit(f"{command}\nended with {done.returncode}:\n{done.stdout[-3000:]}")
        marks = json.loads(report.read_text()) if report.is_file() else None
    return Run(seconds) if marks is None else Run(seconds, **_times(marks, began))


def _times(marks: dict, began: float) -> dict[str, float]:
    begun, trained, ended = marks["begun"], marks["trained"], marks["ended"]
    steps = marks["steps_per_epoch"]
    warm = WARM_EPOCHS if len(begun) > 2 * WARM_EPOCHS else 0
    each = [1e6 * (t - b) / steps for b, t in zip(begun, trained, strict=True)][warm:]
    quarter = max(1, len(each) // 4)
    since = ended[warm - 1] if warm else begun[0]
    return {
        "megabytes": marks["megabytes"],
        "begin": begun[0] - began,
        "step": statistics.median(each),
        "epoch_step": 1e6 * (ended[-1] - since) / len(each) / steps,
        "first_step": statistics.median(each[:quarter]),
        "last_step": statistics.median(each[-quarter:]),
        "loss": marks["loss"],
    }


# Programs


def noted(*words: str, name: str = "dpframe", python_path: str = "") -> Program:
    """The command with one more callback, which notes the times of its epochs."""
    command = [sys.executable, str(PROGRAMS / "dpframe_command.py"), *words]
    return Program(name, command, python_path=python_path)


def peer(name: str, *words: str) -> Program:
    """A program of PROGRAMS."""
    file, *others = words
    return Program(name, [peers_python(), str(PROGRAMS / f"{file}.py"), *others])


def peers_python() -> str:
    """The Python of a venv in the user's cache with what benchmarks/peers.lock pins; making it
    takes minutes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    content = PEERS.read_bytes() + sys.version.encode()
    folder = cache / "dpframe-benchmarks" / hashlib.sha256(content).hexdigest()[:12]
    python = folder / "bin" / "python"
    if not (folder / "complete").is_file():
        print(f"making {folder} from {PEERS.name}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", str(PEERS)], check=True)
        (folder / "complete").touch()
    return str(python)


def peers_versions() -> dict[str, str]:
    pins = dict(line.split("==") for line in PEERS.read_text().splitlines() if "==" in line)
    return {n: pins[n] for n in ("torch", "lightning", "accelerate", "tensorboard", "numpy")}
