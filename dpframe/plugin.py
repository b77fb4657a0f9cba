"""What a package that extends dpframe imports, beside `dpframe` and its public packages.

A strategy, a mode, a callback, a logger, a recipe or a conformance test needs no other name of
dpframe's. Each is imported when it is first used. docs/stability.md says how they change.
"""

from typing import TYPE_CHECKING

from dpframe.util.lazy import lazy

if TYPE_CHECKING:
    from dpframe import checkpoint as checkpoint
    from dpframe import seeding as seeding
    from dpframe.adapter import Adapter as Adapter
    from dpframe.checkpoint.seal import step_of as step_of
    from dpframe.config.compose import Composed as Composed
    from dpframe.config.compose import composed as composed
    from dpframe.config.parts import callbacks_of as callbacks_of
    from dpframe.config.parts import data_of as data_of
    from dpframe.config.parts import strategy_of as strategy_of
    from dpframe.config.parts import task_of as task_of
    from dpframe.data import Share as Share
    from dpframe.data import move as move
    from dpframe.data import permutation as permutation
    from dpframe.data import split as split
    from dpframe.data.module import leaves as leaves
    from dpframe.data.module import tensors_of as tensors_of
    from dpframe.data.preparation import call_prepare_data as call_prepare_data
    from dpframe.data.source import Source as Source
    from dpframe.devices import memory as memory
    from dpframe.errors import Failure as Failure
    from dpframe.errors import first_line as first_line
    from dpframe.errors import not_one_of as not_one_of
    from dpframe.errors import suggestion as suggestion
    from dpframe.launch import environment as environment
    from dpframe.launch import signals as signals
    from dpframe.launch.local import allow_fork as allow_fork
    from dpframe.launch.rank_errors import RankFailed as RankFailed
    from dpframe.loggers.formats import ruled as ruled
    from dpframe.metrics import fraction as fraction
    from dpframe.metrics import is_number as is_number
    from dpframe.modes.measure import WARM_UPS as WARM_UPS
    from dpframe.modes.measure import Probe as Probe
    from dpframe.modes.measure import Sampled as Sampled
    from dpframe.modes.measure import bytes_of as bytes_of
    from dpframe.modes.measure import now as now
    from dpframe.modes.measure import refuse_by_hand as refuse_by_hand
    from dpframe.modes.measure import short as short
    from dpframe.modes.report import HOUR as HOUR
    from dpframe.modes.report import counted as counted
    from dpframe.modes.report import refuse_checkpoint as refuse_checkpoint
    from dpframe.modes.report import refuse_ranks as refuse_ranks
    from dpframe.modes.report import show as show
    from dpframe.modes.report import size as size
    from dpframe.modes.report import time as time
    from dpframe.modes.run import launch as launch
    from dpframe.parameters import updated_by as updated_by
    from dpframe.rows import current_share as current_share
    from dpframe.strategies.collectives import Collectives as Collectives
    from dpframe.strategies.devices import REHEARSED_REPLICAS as REHEARSED_REPLICAS
    from dpframe.strategies.devices import Gpus as Gpus
    from dpframe.strategies.group import GroupCollectives as GroupCollectives
    from dpframe.strategies.outline import fill_later as fill_later
    from dpframe.strategies.outline import is_outlined as is_outlined
    from dpframe.strategies.processes import Processes as Processes
    from dpframe.sums import MetricStates as MetricStates
    from dpframe.sums import Sums as Sums
    from dpframe.trainer import Predictions as Predictions
    from dpframe.trainer.compute.placement import default_dtype as default_dtype
    from dpframe.trainer.feed import TrainingData as TrainingData
    from dpframe.trainer.outputs import Measured as Measured
    from dpframe.values import refuse_below as refuse_below

_NAMES = {
    # What may go wrong.
    "errors": ("Failure", "first_line", "not_one_of", "suggestion"),
    "values": ("refuse_below",),
    "launch.rank_errors": ("RankFailed",),
    # A mode: its job, the parts of it, and what it prints.
    "config.compose": ("Composed", "composed"),
    "config.parts": ("callbacks_of", "data_of", "strategy_of", "task_of"),
    "modes.run": ("launch",),
    "loggers.formats": ("ruled",),
    "modes.report": (
        "HOUR",
        "counted",
        "refuse_checkpoint",
        "refuse_ranks",
        "show",
        "size",
        "time",
    ),
    # A mode that measures.
    "modes.measure": ("Probe", "Sampled", "WARM_UPS", "bytes_of", "now", "refuse_by_hand", "short"),
    "devices.memory": ("memory",),
    # A strategy, and its processes.
    "strategies.collectives": ("Collectives",),
    "strategies.devices": ("Gpus", "REHEARSED_REPLICAS"),
    "strategies.group": ("GroupCollectives",),
    "strategies.outline": ("fill_later", "is_outlined"),
    "strategies.processes": ("Processes",),
    "sums": ("MetricStates", "Sums"),
    "launch.environment": ("environment",),
    "launch.local": ("allow_fork",),
    "launch.signals": ("signals",),
    # Rows, batches and the shares of them.
    "data": ("Share", "move", "permutation", "split"),
    "data.module": ("leaves", "tensors_of"),
    "data.preparation": ("call_prepare_data",),
    "data.source": ("Source",),
    "rows": ("current_share",),
    # Training and what it gives.
    "adapter": ("Adapter",),
    "checkpoint": ("checkpoint",),
    "checkpoint.seal": ("step_of",),
    "metrics": ("fraction", "is_number"),
    "parameters": ("updated_by",),
    "seeding": ("seeding",),
    "trainer": ("Predictions",),
    "trainer.feed": ("TrainingData",),
    "trainer.outputs": ("Measured",),
    "trainer.compute.placement": ("default_dtype",),
}
_HOMES = {name: f"dpframe.{home}" for home, names in _NAMES.items() for name in names}
__all__ = [*_HOMES]

__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
