"""What is counted over all rows of a validation, and all replicas."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, tensor

from dpframe import seeding
from dpframe.data import Batch, move

if TYPE_CHECKING:
    from dpframe.trainer import Trainer


class Tally:
    """Adds up what `count(predictions, labels)` returns for each share of batches (inputs, labels),
    which are predicted once more."""

    def __init__(self, count: Callable[[Any, Any], Tensor]) -> None:
        self.count = count
        self.here: Tensor | None = None

    def add(self, trainer: "Trainer", batch: Batch) -> None:
        with trainer.strategy.whole_weights(trainer.task):
            for share in batch.shares:
                if share.rows:
                    self._add(trainer, move(share.batch, trainer.strategy.device))

    def total(self, trainer: "Trainer") -> Tensor | None:
        """None on processes but the main one. All have to call it."""
        parts = trainer.strategy.gather(None if self.here is None else self.here.tolist())
        tables = [tensor(part) for part in parts if part is not None]
        return sum(tables[1:], tables[0]) if tables else None

    def _add(self, trainer: "Trainer", batch: Any) -> None:
        with seeding.seeded(trainer.seed):  # what it draws is not missing elsewhere
            predicted = trainer.task.predict_step(batch)
        is_pair = isinstance(batch, (list, tuple)) and len(batch) > 1
        counts = self.count(predicted, batch[1] if is_pair else None)
        self.here = counts if self.here is None else self.here + counts


def described(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"of {value.dtype} {tuple(value.shape)}" if is_tensor else f"as {type(value).__name__}"
