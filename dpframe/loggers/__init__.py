"""Loggers write down what a run measured; the main process alone has any."""

from typing import TYPE_CHECKING

from dpframe.loggers.base import Logger as Logger
from dpframe.util.lazy import lazy

if TYPE_CHECKING:
    from dpframe.loggers.csv import CSV as CSV
    from dpframe.loggers.mlflow import MLflow as MLflow
    from dpframe.loggers.tensorboard import TensorBoard as TensorBoard
    from dpframe.loggers.wandb import WandB as WandB

_HOMES = {"CSV": "csv", "MLflow": "mlflow", "TensorBoard": "tensorboard", "WandB": "wandb"}
__all__ = ["Logger", *_HOMES]
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
