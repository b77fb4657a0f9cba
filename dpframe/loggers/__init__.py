"""Loggers write down what a run measured; the main process alone has any."""

from typing import TYPE_CHECKING

from dpframe.lazy import lazy
from dpframe.loggers.base import Logger

if TYPE_CHECKING:
    from dpframe.loggers.csv import CSV
    from dpframe.loggers.mlflow import MLflow
    from dpframe.loggers.tensorboard import TensorBoard
    from dpframe.loggers.wandb import WandB

__all__ = ["CSV", "Logger", "MLflow", "TensorBoard", "WandB"]

_HOMES = {"CSV": "csv", "MLflow": "mlflow", "TensorBoard": "tensorboard", "WandB": "wandb"}
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
