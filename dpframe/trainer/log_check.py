"""What hooks add to the metrics by `trainer.log`: the same in all processes."""

import math
import zlib

from dpframe.errors import UserError, listed
from dpframe.strategies.collectives import Collectives

TOLERANCE = 1e-6  # other devices may round otherwise
SHOWN = 3


class LogCheck:
    """Runs after the hooks that may log and before early stopping and checkpoints, which would
    decide differently in processes with other numbers."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._names = 0  # a checksum of all that were logged, in their order
        self._sum = self._size = 0.0
        self._newest: dict[str, float] = {}  # since all processes agreed

    def add(self, numbers: dict[str, float]) -> None:
        self._names = zlib.crc32(repr(list(numbers)).encode(), self._names)
        for value in filter(math.isfinite, numbers.values()):
            self._sum += value
            self._size += abs(value)
        self._newest.update(numbers)

    def on_validation_end(self, *_: object) -> None:
        collectives, processes = self._collectives, self._collectives.world_size
        names, total = collectives.sum_numbers([float(self._names), self._sum])
        differs = abs(total - processes * self._sum) > TOLERANCE * processes * self._size
        if names != processes * self._names or differs:
            pairs = [f"{name}={value:.6g}" for name, value in self._newest.items()]
            raise UserError(
                f"trainer.log got {listed(pairs, SHOWN) or 'nothing'} on rank {collectives.rank}, "
                "and something else on another one; call it on all ranks with the same numbers, "
                "e.g. those of one rank by trainer.strategy.collectives.broadcast"
            )
        self._sum = self._size = 0.0
        self._newest.clear()

    on_test_end = on_epoch_end = on_validation_end
