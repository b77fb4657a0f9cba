"""Which class the rows of the validation set are taken for."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpframe import seeding
from dpframe.callbacks.base import Callback
from dpframe.data import Batch, move
from dpframe.errors import UserError

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

CELL = 16  # pixels


class ConfusionMatrix(Callback):
    """Counts as the table `val/confusion`, and each label's shares as an image.

    For batches (inputs, labels) and a predict_step that returns a score for each class. It
    computes each batch a second time.
    """

    def on_validation_start(self, trainer: "Trainer") -> None:
        self.counts: Tensor | None = None

    def on_validation_batch_end(
        self, trainer: "Trainer", batch: Batch, outputs: list[dict[str, Any]]
    ) -> None:
        with trainer.strategy.whole_weights(trainer.task):
            self._count(trainer, batch)

    def _count(self, trainer: "Trainer", batch: Batch) -> None:
        for share in batch.shares:
            if not share.rows:
                continue
            inputs = move(share.batch, trainer.strategy.device)
            with seeding.seeded(trainer.seed):  # what it draws is not missing elsewhere
                scores = trainer.task.predict_step(inputs)
            labels = inputs[1] if isinstance(inputs, (list, tuple)) and len(inputs) > 1 else None
            counts = counted(scores, labels)
            self.counts = counts if self.counts is None else self.counts + counts

    def on_validation_end(self, trainer: "Trainer") -> None:
        here = self.counts
        parts = trainer.strategy.gather(None if here is None else here.tolist())
        tables = [torch.tensor(part) for part in parts if part is not None]
        if not tables:  # not the main process
            return
        counts = torch.stack(tables).sum(0)
        classes = [str(number) for number in range(len(counts))]
        rows = [[name, *row] for name, row in zip(classes, counts.tolist(), strict=True)]
        trainer.log_table("val/confusion", ["label \\ predicted", *classes], rows)
        shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
        cells = shares.repeat_interleave(CELL, 0).repeat_interleave(CELL, 1)
        trainer.log_image("val/confusion_shares", cells)


def counted(scores: Any, labels: Any) -> Tensor:
    """[labels, predictions]; a row without a label of a class, e.g. of -100, is left out."""
    classes = scores.shape[1] if isinstance(scores, Tensor) and scores.ndim == 2 else 0
    is_labelled = isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
    if classes < 2 or not is_labelled or len(labels) != len(scores):
        raise UserError(
            f"callbacks.confusion_matrix got labels {shown(labels)} and predictions "
            f"{shown(scores)}; it needs batches (inputs, labels) with a whole number a row, and a "
            "predict_step that returns [rows, classes]"
        )
    is_counted = (labels >= 0) & (labels < classes)
    pairs = labels[is_counted].long() * classes + scores.argmax(dim=1)[is_counted]
    return torch.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def shown(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"of {value.dtype} {tuple(value.shape)}" if is_tensor else f"as {type(value).__name__}"
