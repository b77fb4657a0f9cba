"""How far a run has come: the counters that a checkpoint keeps."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from dpframe.data import Batch

LEAST = {"validated_step": -1}


@dataclass
class Progress:
    """The counters of a run."""

    global_step: int = 0  # steps: of several optimizers, whatever turns they took
    epoch: int = 0  # whole epochs done
    batches_done: int = 0  # of the current epoch
    rows_seen: int = 0
    skipped_steps: int = 0  # left out by trainer.on_nonfinite=skip
    validated_step: int = -1  # the step of the newest val/ numbers
    ended_step: int = 0  # the newest step after which an epoch, or training, has ended
    seconds: float = 0.0
    data_seconds: float = 0.0  # of these, waiting for training data

    @property
    def current_epoch(self) -> int:
        """The one of the newest step, as people count them: from 1."""
        return max(1, self.epoch + (self.batches_done > 0))

    @property
    def is_left_out(self) -> bool:
        """Whether the newest step has changed no weights: trainer.on_nonfinite=skip."""
        return self.left_out_step == self.global_step > 0

    # Not fields, as no checkpoint keeps them.
    left_out_step = 0  # the newest one
    _read_at = _rated_at = 0.0
    _rated_rows = 0

    def start_clock(self) -> None:
        self._read_at = self._rated_at = time.perf_counter()
        self._rated_rows = self.rows_seen

    def read_clock(self) -> None:
        """Brings `seconds` up to date."""
        now = time.perf_counter()
        self.seconds += now - self._read_at
        self._read_at = now

    def rows_per_second(self) -> float:
        """Since it was asked last."""
        now, rows = time.perf_counter(), self.rows_seen
        rate = (rows - self._rated_rows) / (now - self._rated_at)
        self._rated_at, self._rated_rows = now, rows
        return rate

    def count(self, batches: Sequence[Batch]) -> None:
        """After an update by them."""
        self.global_step += 1
        self.batches_done += len(batches)
        for batch in batches:
            self.rows_seen += batch.rows

    def state_dict(self) -> dict[str, int | float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises for what this class would not have saved: a file may hold anything."""
        for field in fields(self):
            value = state[field.name]
            kinds = (int, float) if field.type is float else (int,)
            if type(value) not in kinds or not value >= LEAST.get(field.name, 0):
                raise ValueError(f"{field.name} is {str(value)[:200]}")
            setattr(self, field.name, value)
