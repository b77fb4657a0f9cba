"""Precision over recall on the validation set, exact over all rows."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dpframe.callbacks.counts import ValidationCounts, describe
from dpframe.errors import UserError, not_one_of
from dpframe.loggers.media import MARGIN, THRESHOLDS

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

ACTIVATIONS = ("softmax", "sigmoid")
KEY = "callbacks.pr_curve"


class PRCurve(ValidationCounts):
    """`val/pr_curve/<class>`, each class against all others; of one score a row `val/pr_curve`.

    For batches (inputs, labels) and a predict_step that returns probabilities, or scores that
    `activation` makes some of. It computes each batch a second time.
    """

    def __init__(self, activation: str | None = None) -> None:
        if activation not in (None, *ACTIVATIONS):
            raise not_one_of(f"{KEY}.activation", activation, ACTIVATIONS)
        self.activation = activation

    def show(self, trainer: "Trainer", counts: Tensor) -> None:
        labels = torch.arange(2).repeat_interleave(len(THRESHOLDS))
        scores = torch.as_tensor(THRESHOLDS).repeat(2)
        for number, of_class in enumerate(counts):
            name = "val/pr_curve" if len(counts) == 1 else f"val/pr_curve/{number}"
            trainer.log_pr_curve(name, labels, scores, of_class)

    def count(self, predictions: Any, labels: Any) -> Tensor:
        """[classes, label of 0 or 1, thresholds]: rows by the highest threshold that they reach."""
        chances, is_true = self._by_class(predictions, labels)
        classes, levels = chances.shape[1], len(THRESHOLDS)
        at = torch.bucketize(chances, torch.as_tensor(THRESHOLDS), right=True) - 1
        at += levels * (is_true + 2 * torch.arange(classes))
        return torch.bincount(at.ravel(), minlength=2 * levels * classes).reshape(
            classes, 2, levels
        )

    def _by_class(self, scores: Any, labels: Any) -> tuple[Tensor, Tensor]:
        """[rows, classes] of probabilities, and of 0 and 1; without rows that have no label."""
        told = f"{KEY} got labels {describe(labels)} and predictions {describe(scores)}"
        if not (isinstance(scores, Tensor) and isinstance(labels, Tensor) and labels.ndim):
            raise UserError(f"{told}; {WANTED}")
        chances, labels = scores.cpu().double(), labels.cpu()
        chances = chances[:, None] if chances.ndim == 1 else chances
        labels = labels[:, None] if chances.shape[-1] == 1 and labels.ndim == 1 else labels
        is_class = labels.ndim == 1 and not labels.is_floating_point()
        is_like = labels.shape == (chances.shape[:1] if is_class else chances.shape)
        if chances.ndim != 2 or not is_like:
            raise UserError(f"{told}; {WANTED}")
        if not (is_class or ((labels == 0) | (labels == 1)).all()):
            raise UserError(f"{KEY} got other labels than 0 and 1; {WANTED}")
        if self.activation == "softmax" and chances.shape[1] == 1:
            raise UserError(f"{told}; set {KEY}.activation=sigmoid for one score a row")
        if self.activation is not None:
            chances = chances.softmax(1) if self.activation == "softmax" else chances.sigmoid()
        chances = chances.nan_to_num(0)  # reaches no threshold but 0
        low, high = chances.aminmax()
        if low < -MARGIN or high > 1 + MARGIN:
            raise UserError(
                f"{KEY} got predictions from {low:.4g} to {high:.4g}; set {KEY}.activation="
                "softmax for one class a row, or sigmoid for several"
            )
        chances = chances.clamp(0, 1)
        if is_class:
            is_known = (labels >= 0) & (labels < chances.shape[1])
            return chances[is_known], one_hot(labels[is_known].long(), chances.shape[1])
        return chances, labels.long()


WANTED = (
    "it needs batches (inputs, labels) with a class a row, or 0 or 1 for each class, and a "
    "predict_step that returns a score for each class"
)
