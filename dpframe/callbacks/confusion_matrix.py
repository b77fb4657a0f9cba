"""Which class the rows of the validation set are taken for."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpframe.callbacks.base import Callback
from dpframe.callbacks.tally import Tally, described
from dpframe.data import Batch
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
        self.tally = Tally(counted)

    def on_validation_batch_end(
        self, trainer: "Trainer", batch: Batch, outputs: list[dict[str, Any]]
    ) -> None:
        self.tally.add(trainer, batch)

    def on_validation_end(self, trainer: "Trainer") -> None:
        counts = self.tally.total(trainer)
        if counts is None:
            return
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
            f"callbacks.confusion_matrix got labels {described(labels)} and predictions "
            f"{described(scores)}; it needs batches (inputs, labels) with a whole number a row, "
            "and a predict_step that returns [rows, classes]"
        )
    is_counted = (labels >= 0) & (labels < classes)
    pairs = labels[is_counted].long() * classes + scores.argmax(dim=1)[is_counted]
    return torch.bincount(pairs, minlength=classes * classes).reshape(classes, classes)
