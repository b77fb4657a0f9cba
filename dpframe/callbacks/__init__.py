"""Callbacks act at the loop's hooks; the Trainer calls only those that a callback overrides."""

from typing import TYPE_CHECKING

from dpframe.trainer.callback import Callback as Callback
from dpframe.util.lazy import lazy

if TYPE_CHECKING:
    from dpframe.callbacks.averages import EMA as EMA
    from dpframe.callbacks.averages import SWA as SWA
    from dpframe.callbacks.checkpoint import Checkpoint as Checkpoint
    from dpframe.callbacks.confusion_matrix import ConfusionMatrix as ConfusionMatrix
    from dpframe.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from dpframe.callbacks.freeze import Freeze as Freeze
    from dpframe.callbacks.graph import Graph as Graph
    from dpframe.callbacks.histograms import Histograms as Histograms
    from dpframe.callbacks.live import Live as Live
    from dpframe.callbacks.pr_curve import PRCurve as PRCurve
    from dpframe.callbacks.progress import Progress as Progress
    from dpframe.callbacks.prune import Prune as Prune
    from dpframe.callbacks.sample_predictions import SamplePredictions as SamplePredictions
    from dpframe.callbacks.throughput import Throughput as Throughput

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
    "Throughput": "throughput",
}
__all__ = ["Callback", *_HOMES]
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
