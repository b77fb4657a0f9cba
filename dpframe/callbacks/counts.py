"""What is predicted in a validation, once more, and counts of it over all rows and replicas."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, tensor

from dpframe import seeding
from dpframe.data import Batch, move
from dpframe.trainer.callback import Callback
from dpframe.trainer.compute.placement import default_dtype

if TYPE_CHECKING:
    from dpframe.trainer import Trainer


class ValidationCounts(Callback):
    """Adds up what `count` returns for each share of batches (inputs, labels), which it predicts a
    second time; `show` gets the sum at the end of the validation, on the main process."""

    def count(self, predictions: Any, labels: Any) -> Tensor:
        raise NotImplementedError

    def show(self, trainer: "Trainer", counts: Tensor) -> None:
        raise NotImplementedError

    def on_validation_start(self, trainer: "Trainer") -> None:
        self.here: Tensor | None = None  # this process's sum

    def on_validation_batch_end(
        self, trainer: "Trainer", batch: Batch, outputs: list[dict[str, Any]]
    ) -> None:
        for inputs, predictions in predict_shares(trainer, batch):
            is_pair = isinstance(inputs, (list, tuple)) and len(inputs) > 1
            counts = self.count(predictions, inputs[1] if is_pair else None)
            self.here = counts if self.here is None else self.here + counts

    def on_validation_end(self, trainer: "Trainer") -> None:
        parts = trainer.strategy.collectives.gather(
            None if self.here is None else self.here.tolist()
        )
        counts = [tensor(part) for part in parts if part is not None]
        if counts:
            self.show(trainer, sum(counts[1:], counts[0]))


def predict_shares(trainer: "Trainer", batch: Batch) -> Iterator[tuple[Any, Any]]:
    """The shares of this process that have rows, each with what `predict_step` returns."""
    with trainer.strategy.sharding.whole_weights(trainer.task):
        for share in batch.shares:
            if share.rows:
                inputs = move(share.batch, trainer.strategy.device)
                # Training draws the same numbers without this callback.
                with seeding.seeded(trainer.seed), default_dtype(trainer.precision.dtype):
                    predictions = trainer.task.predict_step(inputs)
                yield inputs, predictions


def describe(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"of {value.dtype} {tuple(value.shape)}" if is_tensor else f"as {type(value).__name__}"
