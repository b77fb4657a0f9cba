"""Callbacks act at the loop's hooks; the Trainer calls only those that a callback overrides."""

from typing import TYPE_CHECKING

from dpframe.lazy import lazy
from dpframe.trainer.callback import Callback

if TYPE_CHECKING:
    from dpframe.callbacks.averages import EMA, SWA
    from dpframe.callbacks.checkpoint import Checkpoint
    from dpframe.callbacks.confusion_matrix import ConfusionMatrix
    from dpframe.callbacks.early_stopping import EarlyStopping
    from dpframe.callbacks.freeze import Freeze
    from dpframe.callbacks.graph import Graph
    from dpframe.callbacks.histograms import Histograms
    from dpframe.callbacks.live import Live
    from dpframe.callbacks.pr_curve import PRCurve
    from dpframe.callbacks.progress import Progress
    from dpframe.callbacks.prune import Prune
    from dpframe.callbacks.sample_predictions import SamplePredictions

__all__ = [
    "EMA",
    "SWA",
    "Callback",
    "Checkpoint",
    "ConfusionMatrix",
    "EarlyStopping",
    "Freeze",
    "Graph",
    "Histograms",
    "Live",
    "PRCurve",
    "Progress",
    "Prune",
    "SamplePredictions",
]

_HOMES = {
    "EMA": "averages",
    "SWA": "averages",
    "Checkpoint": "checkpoint",
    "ConfusionMatrix": "confusion_matrix",
    "EarlyStopping": "early_stopping",
    "Freeze": "freeze",
    "Graph": "graph",
    "Histograms": "histograms",
    "Live": "live",
    "PRCurve": "pr_curve",
    "Progress": "progress",
    "Prune": "prune",
    "SamplePredictions": "sample_predictions",
}
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
