"""dpframe trains PyTorch models from Hydra configs: change the strategy, not the maths."""

# Nothing that Python has not imported already: with `python -m dpframe`, what lies in the current
# directory comes first until `__main__` runs.
import importlib
import os

TYPE_CHECKING = False

# Run from a checkout, `dpframe.conf` and `dpframe.recipes` are the folders beside this one;
# an installed package carries them inside and never takes this branch.
_package = os.path.dirname(os.path.realpath(__file__))
_checkout = os.path.dirname(_package)
if not os.path.exists(os.path.join(_package, "conf")) and os.path.exists(
    os.path.join(_checkout, "conf", "config.yaml")
):
    __path__.append(_checkout)

# Each name is imported when first used: `import dpframe` alone never imports torch.
_HOME = {
    "Batches": "dpframe.data.batches",
    "Callback": "dpframe.callbacks",
    "DataModule": "dpframe.data",
    "DataSets": "dpframe.data",
    "LRSchedule": "dpframe.schedules",
    "Logger": "dpframe.loggers",
    "Mix": "dpframe.data.mix",
    "Result": "dpframe.cli.api",
    "RunInfo": "dpframe.trainer",
    "ShardedStream": "dpframe.data.stream",
    "Strategy": "dpframe.strategies",
    "Supervised": "dpframe.supervised",
    "Task": "dpframe.task",
    "Trainer": "dpframe.trainer",
    "TrainerSettings": "dpframe.trainer.settings",
    "UserError": "dpframe.errors",
    "dropout_rows": "dpframe.layers.dropout",
    "load": "dpframe.config.load",
    "locked": "dpframe.util.files",
    "run": "dpframe.cli.api",
}

if TYPE_CHECKING:
    __version__: str

    from dpframe.callbacks import Callback as Callback
    from dpframe.cli.api import Result as Result
    from dpframe.cli.api import run as run
    from dpframe.config.load import load as load
    from dpframe.data import DataModule as DataModule
    from dpframe.data import DataSets as DataSets
    from dpframe.data.batches import Batches as Batches
    from dpframe.data.mix import Mix as Mix
    from dpframe.data.stream import ShardedStream as ShardedStream
    from dpframe.errors import UserError as UserError
    from dpframe.layers.dropout import dropout_rows as dropout_rows
    from dpframe.loggers import Logger as Logger
    from dpframe.schedules import LRSchedule as LRSchedule
    from dpframe.strategies import Strategy as Strategy
    from dpframe.supervised import Supervised as Supervised
    from dpframe.task import Task as Task
    from dpframe.trainer import RunInfo as RunInfo
    from dpframe.trainer import Trainer as Trainer
    from dpframe.trainer.settings import TrainerSettings as TrainerSettings
    from dpframe.util.files import locked as locked

__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name == "__version__":  # of the installation; a checkout's alone is unknown
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("dpframe")
        except PackageNotFoundError:
            return "0+unknown"
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dpframe' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
