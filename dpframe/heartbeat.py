"""Signs of life: what is counted while a run makes progress, and a clock that stops with it."""

import time
from pathlib import Path

LONGEST_TICK = 2.0


class Clock:
    """Seconds in which this process ran, if it is read at least once a second.

    A monotonic clock also counts what Ctrl-Z, SIGSTOP or a paused container takes.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._read_at = time.monotonic()

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._read_at, LONGEST_TICK)
        self._read_at = now
        return self._seconds


def is_stopped(pid: int) -> bool:
    """By a signal or a debugger, as far as the system says."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"
