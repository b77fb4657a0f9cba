"""What is around a step in a trial: how far the run has come, kernels, and other generators."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch


class Moment:
    """How far a run has come, in a trial, and whether the step has asked for that."""

    def __init__(self, epoch: int, global_step: int) -> None:
        self._epoch, self._global_step = epoch, global_step
        self.is_asked = False

    @property
    def epoch(self) -> int:
        self.is_asked = True
        return self._epoch

    @property
    def global_step(self) -> int:
        self.is_asked = True
        return self._global_step


def moments(
    steps_per_epoch: int, total_steps: int, max_epochs: int | None
) -> list[tuple[int, int]]:
    """The second epoch, the middle and the end of a run: each as its epoch and its step."""
    of_epoch = steps_per_epoch or 1
    last = (total_steps or of_epoch * (max_epochs or 2)) - 1
    steps = {of_epoch, last // 2, last}
    return [(step // of_epoch, step) for step in sorted(steps) if 0 < step <= last]


@contextmanager
def nothing_tuned() -> Iterator[None]:
    """No kernel is chosen by its speed, and nothing is compiled, for a few rows."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    has_compiled = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if has_compiled else nullcontext():
            yield
    finally:
        torch.backends.cudnn.benchmark = before


def foreign_states() -> Any:
    of_numpy: Any = np.random.get_state()
    return random.getstate(), of_numpy[1].tobytes(), of_numpy[2]
