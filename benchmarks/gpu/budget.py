"""Sections one after the other, each a process with its part of the time; none can cost another."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.records import Records

# In the order that tells most, with each section's part of the time. What one leaves is the next
# ones'.
PARTS = {
    "machine": 4,
    "tests": 21,
    "small": 11,
    "gpt": 30,
    "resnet": 12,
    "running": 13,
    "ddp": 9,
}
LEAST_SECONDS = 1.0  # less is not worth a start
SHOWN_LINES = 12
Commands = Callable[[str, float, Path], list[str]]
"""A section's name, seconds, and file of records: the command that measures it."""


@dataclass
class Outcome:
    name: str
    state: str = "left out"  # or done, failed, stopped
    seconds: float = 0.0
    limit: float = 0.0
    error: str = ""  # the last lines that it wrote
    records: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_all(names: list[str], seconds: float, command_of: Commands, folder: Path) -> list[Outcome]:
    """All are over after `seconds`; those for which nothing is left are left out."""
    end = time.monotonic() + seconds
    outcomes = []
    for index, name in enumerate(names):
        left = end - time.monotonic()
        limit = left * PARTS[name] / sum(PARTS[other] for other in names[index:])
        outcome = Outcome(name, limit=limit)
        if limit >= LEAST_SECONDS:
            print(f"{name}: at most {limit:.0f} s", flush=True)
            run(outcome, command_of, folder)
            print(f"{name}: {outcome.state} after {outcome.seconds:.0f} s", flush=True)
        outcomes.append(outcome)
    return outcomes


def run(outcome: Outcome, command_of: Commands, folder: Path) -> None:
    records, log = folder / f"{outcome.name}.jsonl", folder / f"{outcome.name}.log"
    command = command_of(outcome.name, outcome.limit, records)
    began = time.monotonic()
    with log.open("wb") as file:
        # A session of its own: its ranks and workers can be ended with it.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=outcome.limit)
            outcome.state = "failed" if code else "done"
        except subprocess.TimeoutExpired:
            outcome.state = "stopped"
        finally:
            end_all(process)
    outcome.seconds = time.monotonic() - began
    outcome.records = Records(records).read()
    if outcome.state != "done":
        lines = log.read_text(errors="replace").splitlines()
        outcome.error = "\n".join(lines[-SHOWN_LINES:])


def end_all(process: subprocess.Popen) -> None:
    """What is left of its session, e.g. of one that failed and has left a rank behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
