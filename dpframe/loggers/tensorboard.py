"""The TensorBoard logger writes a run's curves, config, hyperparameters and graph as event files.

It builds the records itself from TensorBoard's protobuf classes, which import in 20 ms. The stock
writer imports in 160 ms and keeps what was logged in memory for up to two minutes.
"""

import logging
import math
import re
import shlex
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MultilineChartContent,
)
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import (
    HParamsPluginData,
    SessionEndInfo,
    SessionStartInfo,
)

from dpframe.loggers import event_file
from dpframe.loggers.base import ROWS_IN_MEMORY, Logger, Scalar
from dpframe.loggers.event_file import EventFile

if TYPE_CHECKING:
    from torch import nn

SESSION_START = "_hparams_/session_start_info"
SESSION_END = "_hparams_/session_end_info"


class TensorBoard(Logger):
    needs_directory = True

    def __init__(self, *, graph: bool = True) -> None:
        self.draws_graph = graph
        self._rows: list[tuple[float, int, dict[str, float]]] = []
        self._logged: set[str] = set()
        self._charted: set[str] = set()
        self._last_step = 0

    def open(
        self, run_dir: str, *, config: str, hparams: dict[str, Scalar], purge_step: int | None
    ) -> None:
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        older = sorted(directory.glob(event_file.PATTERN))
        self._is_continued = bool(older)
        self._last_step = purge_step or 0
        self._file = EventFile(event_file.next_path(directory))
        self._add(file_version="brain.Event:2")
        for path in older:
            # The HPARAMS tab takes the first start and end that it reads, but the run is not over,
            # and may have other limits now.
            event_file.replace(path, b"_hparams_/session_", b"_replaced/session_")
        if purge_step is not None:
            # At a second START, TensorBoard drops the steps from this one on. The file that began
            # this run may have no first one.
            self._add(session_log=SessionLog(status=SessionLog.START))
            self._add(session_log=SessionLog(status=SessionLog.START))
        self._add(summary=Summary(value=[_config(config), _session_start(hparams)]))
        self.flush()

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        self._last_step = step
        self._logged.update(scalars)
        self._rows.append((time.time(), step, dict(scalars)))
        if len(self._rows) >= ROWS_IN_MEMORY:
            self.flush()

    def graph(self, module: "nn.Module", batch: Any) -> None:
        if not self.draws_graph or self._is_continued:
            return  # a second graph in one run makes TensorBoard complain
        try:
            from dpframe.loggers import model_graph

            self._add(graph_def=model_graph.draw(module, batch))
        except Exception as error:
            logging.getLogger("dpframe").warning(
                "no graph of %s in TensorBoard: %s: %s",
                type(module).__name__,
                type(error).__name__,
                str(error).partition("\n")[0],
            )

    def dashboard(self, run_dir: str) -> str:
        return f"tensorboard --logdir {shlex.quote(run_dir)}"

    def flush(self) -> None:
        for when, step, scalars in self._rows:  # many at once take half as long as one by one
            event = Event(wall_time=when, step=step)
            for tag, value in scalars.items():
                event.summary.value.add(tag=tag, simple_value=value)
            self._append(event)
        self._rows.clear()
        charted = {
            tag.partition("/")[2] for tag in self._logged if tag.startswith(("train/", "val/"))
        }
        if charted != self._charted:
            self._charted = charted
            self._add(summary=Summary(value=[_layout(charted)]))
        self._file.write()

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        missing = {tag: value for tag, value in metrics.items() if tag not in self._logged}
        if missing:
            self.log(missing, step=self._last_step)
        self.flush()
        self._add(summary=Summary(value=[_session_end(succeeded)]))
        self._file.write()

    def _add(self, **what: Any) -> None:
        self._append(Event(wall_time=time.time(), step=self._last_step, **what))

    def _append(self, event: Event) -> None:
        self._file.append(event.SerializeToString())


def _config(config: str) -> Summary.Value:
    """Indented: markdown shows that as code, whatever it contains."""
    return _text_value("config", "text", textwrap.indent(config, "    ").encode())


def _layout(names: set[str]) -> Summary.Value:
    """train/<name> and val/<name> on one chart. A name has the same chart in every run, because
    TensorBoard merges the layouts of all runs and shows each chart that differs."""
    charts = [
        Chart(title=name, multiline=MultilineChartContent(tag=[f"^(train|val)/{re.escape(name)}$"]))
        for name in sorted(names)
    ]
    layout = Layout(category=[Category(title="train and val", chart=charts)])
    return _text_value("custom_scalars__config__", "custom_scalars", layout.SerializeToString())


def _session_start(hparams: dict[str, Scalar]) -> Summary.Value:
    """Without an experiment summary: TensorBoard would take the first one of all runs and show no
    hyperparameter or metric that it does not list."""
    info = SessionStartInfo(start_time_secs=time.time())
    for name, value in hparams.items():
        if isinstance(value, bool):
            info.hparams[name].bool_value = value
        elif isinstance(value, int | float) and math.isfinite(value):
            info.hparams[name].number_value = value
        else:
            info.hparams[name].string_value = str(value)
    return _hparams_value(SESSION_START, HParamsPluginData(session_start_info=info))


def _session_end(succeeded: bool) -> Summary.Value:
    info = SessionEndInfo(
        status=STATUS_SUCCESS if succeeded else STATUS_FAILURE, end_time_secs=time.time()
    )
    return _hparams_value(SESSION_END, HParamsPluginData(session_end_info=info))


def _text_value(tag: str, plugin: str, content: bytes) -> Summary.Value:
    return Summary.Value(
        tag=tag,
        metadata=_metadata(plugin),
        tensor=TensorProto(dtype=DT_STRING, string_val=[content]),
    )


def _hparams_value(tag: str, data: HParamsPluginData) -> Summary.Value:
    """The content is in the metadata; the tensor is there because a value must have one."""
    empty = TensorProto(dtype=DT_FLOAT)
    empty.tensor_shape.dim.add(size=0)
    metadata = _metadata("hparams", data.SerializeToString())
    return Summary.Value(tag=tag, metadata=metadata, tensor=empty)


def _metadata(plugin: str, content: bytes = b"") -> SummaryMetadata:
    return SummaryMetadata(
        plugin_data=SummaryMetadata.PluginData(plugin_name=plugin, content=content)
    )
