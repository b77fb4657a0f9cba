"""Which class the rows of the validation set are taken for."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpframe.callbacks.counts import ValidationCounts, describe
from dpframe.errors import UserError

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

CELL = 16  # pixels


class ConfusionMatrix(ValidationCounts):
    """Counts as the table `val/confusion`, and each label's shares as an image.

    For batches (inputs, labels) and a predict_step that returns a score for each class. It
    computes each batch a second time.
    """

    def show(self, trainer: "Trainer", counts: Tensor) -> None:
        classes = [str(number) for number in range(len(counts))]
        rows = [[name, *row] for name, row in zip(classes, counts.tolist(), strict=True)]
        trainer.log_table("val/confusion", ["label \\ predicted", *classes], rows)
        shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
        cells = shares.repeat_interleave(CELL, 0).repeat_interleave(CELL, 1)
        trainer.log_image("val/confusion_shares", cells)

    def count(self, predictions: Any, labels: Any) -> Tensor:
        """[labels, predictions]; a row without a label of a class, e.g. of -100, is left out."""
        is_scores = isinstance(predictions, Tensor) and predictions.ndim == 2
        classes = predictions.shape[1] if is_scores else 0
        is_labels = (
            isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
        )
        if classes < 2 or not is_labels or len(labels) != len(predictions):
            raise UserError(
                f"callbacks.confusion_matrix got labels {describe(labels)} and predictions "
                f"{describe(predictions)}; it needs batches (inputs, labels) with a whole number "
                "a row, and a predict_step that returns [rows, classes]"
            )
        is_counted = (labels >= 0) & (labels < classes)
        pairs = labels[is_counted].long() * classes + predictions.argmax(dim=1)[is_counted]
        return torch.bincount(pairs, minlength=classes * classes).reshape(classes, classes)
