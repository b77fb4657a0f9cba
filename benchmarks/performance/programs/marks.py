"""Notes when each epoch began, had trained and was over, for the runner: the same in all programs.

Without BENCHMARK_REPORT in the environment the notes go nowhere. The clock is the one of all
processes, so the runner can tell how long a program took to begin.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COUNTED_EPOCHS = range(10, 20)  # whose Python calls are counted where BENCHMARK_CALLS is set


class Marks:
    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        counts_work = os.environ.get("BENCHMARK_CLOCK") == "processor"
        self.clock = clock or (time.process_time if counts_work else time.perf_counter)
        self.begun: list[float] = []
        self.trained: list[float] = []
        self.ended: list[float] = []
        self.calls = 0
        self.counts = "BENCHMARK_CALLS" in os.environ

    def begin(self) -> None:
        if self.counts and len(self.begun) == COUNTED_EPOCHS.start:
            sys.setprofile(self._count)
        self.begun.append(self.clock())

    def train(self) -> None:
        """All steps of the epoch are done; called after each step where nothing comes between."""
        self.trained[len(self.begun) - 1 :] = [self.clock()]

    def end(self) -> None:
        self.ended.append(self.clock())
        if self.counts and len(self.ended) == COUNTED_EPOCHS.stop:
            sys.setprofile(None)

    def tell(self, **facts: Any) -> None:
        path = os.environ.get("BENCHMARK_REPORT")
        if path and os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
            told = {"begun": self.begun, "trained": self.trained, "ended": self.ended}
            told |= {"calls": self.calls / len(COUNTED_EPOCHS)} | facts
            Path(path).write_text(json.dumps(told))

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"
