"""The parts of a composed job, each a function that makes it: in this process or in others."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from dpframe.callbacks import Callback
from dpframe.config.build import build
from dpframe.config.compose import Composed
from dpframe.config.schema import is_off
from dpframe.data import DataModule
from dpframe.loggers import Logger
from dpframe.strategies import Strategy
from dpframe.task import Task


def strategy_of(job: Composed, arguments: Mapping[str, Any] | None = None) -> partial[Strategy]:
    """`arguments` are set in the config's node."""
    node = {**job.config["strategy"], **(arguments or {})}
    return partial(build, node, "strategy", Strategy)


def task_of(job: Composed) -> partial[Task]:
    return partial(build, job.config["task"], "task", Task)


def data_of(job: Composed) -> partial[DataModule]:
    return partial(build, job.config["data"], "data", DataModule)


def callbacks_of(job: Composed) -> dict[str, partial[Callback]]:
    """Those that are not off, by their names."""
    return _group(job.settings.callbacks, "callbacks", Callback)


def loggers_of(job: Composed) -> dict[str, partial[Logger]]:
    return _group(job.settings.logger, "logger", Logger)


def _group(nodes: Mapping[str, Any], where: str, kind: type) -> dict[str, partial[Any]]:
    return {
        name: partial(build, node, f"{where}.{name}", kind)
        for name, node in nodes.items()
        if not is_off(node)
    }
