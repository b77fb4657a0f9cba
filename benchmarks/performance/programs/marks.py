"""Notes when each epoch began, had trained and was over, for the runner: the same in all programs.

Without BENCHMARK_REPORT in the environment the notes go nowhere. The clock is the one of all
processes, so the runner can tell how long a program took to begin.
"""

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Marks:
    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.clock = clock or time.perf_counter
        self.begun: list[float] = []
        self.trained: list[float] = []
        self.ended: list[float] = []

    def begin(self) -> None:
        self.begun.append(self.clock())

    def train(self) -> None:
        """All steps of the epoch are done; called after each step where nothing comes between."""
        self.trained[len(self.begun) - 1 :] = [self.clock()]

    def end(self) -> None:
        self.ended.append(self.clock())

    def tell(self, **facts: Any) -> None:
        path = os.environ.get("BENCHMARK_REPORT")
        if path and os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
            # Of the runner, too, whose copy this process was at first: so that one stays small.
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            told = {"begun": self.begun, "trained": self.trained, "ended": self.ended}
            facts |= {"megabytes": peak}
            Path(path).write_text(json.dumps(told | facts))
