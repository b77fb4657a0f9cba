"""The TensorBoard logger writes a run's curves, config and hyperparameters as event files.

It builds the records itself from TensorBoard's protobuf classes, which import in 20 ms. The stock
writer imports in 160 ms and keeps what was logged in memory for up to two minutes; `writer` is one.
"""

import io
import math
import os
import re
import shlex
import socket
import struct
import textwrap
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
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

from dpframe.errors import UserError
from dpframe.loggers.base import Logger, Scalar

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PATTERN = "events.out.tfevents.[0-9]*"
BINS = 64  # of a histogram
HPARAMS = "hparams"
"""The end of the names of two small files, with the hyperparameters and with how the run has ended.
TensorBoard takes the first of each that it reads, so a resumed run removes those of before: it was
not over, and may have other limits now. In a folder of their own they would be a second run."""
BEFORE = -1  # a step that no resumed run writes again
LONG = 1 << 15  # bytes of a record


class TensorBoard(Logger):
    """Writes event files, which `tensorboard --logdir` shows."""

    needs_directory = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._logged: set[str] = set()
        self._charted: set[str] = set()
        self._last_step = 0
        self._file: EventFile | None = None  # once it is open
        self._writer: SummaryWriter | None = None

    @property
    def writer(self) -> "SummaryWriter":
        """PyTorch's own, for what the methods here don't do; its file is beside this logger's."""
        if self._file is None:
            raise UserError("TensorBoard.writer is there from on_fit_start on, not before")
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._file.write()
            directory = self._file.path.parent
            self._writer = SummaryWriter(str(directory), filename_suffix=".writer")
            # TensorBoard may read a file only until there is a later one.
            self._file = EventFile(directory)
        return self._writer

    def open(
        self, run_dir: str, *, config: str, hparams: dict[str, Scalar], purge_step: int | None
    ) -> None:
        directory = Path(run_dir)
        self._last_step = purge_step or 0
        before = [*directory.glob(f"{PATTERN}-{HPARAMS}")]
        begin = EventFile(directory, suffix=f"begin-{HPARAMS}")  # sorts before the next one
        self._file = EventFile(directory, purge_step=purge_step)
        begin.add(_session_start(hparams), step=BEFORE)
        begin.write()
        self._add(_config(config))
        for path in before if purge_step is not None else ():
            path.unlink()
        self.flush()

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        self._last_step = step
        self._logged.update(scalars)
        self._add(*(Summary.Value(tag=tag, simple_value=each) for tag, each in scalars.items()))

    def media_file(
        self, kind: str, name: str, suffix: str, encode: Callable[[], bytes], *, step: int
    ) -> None:
        content = encode()
        if kind == "sounds":
            audio = Summary.Audio(encoded_audio_string=content, content_type="audio/wav")
            value = Summary.Value(tag=name, audio=audio)
        else:
            width, height = struct.unpack(">II", content[16:24])  # as PNG's header says
            image = Summary.Image(width=width, height=height, encoded_image_string=content)
            value = Summary.Value(tag=name, image=image)
        self._add_media(value, step=step)

    def histogram(self, name: str, values: Any, *, step: int) -> None:
        import numpy as np

        if not values.size:
            return
        counts, limits = np.histogram(values, BINS)
        summed = {"sum": values.sum(), "sum_squares": np.square(values, dtype=np.float64).sum()}
        facts = {"min": values.min(), "max": values.max(), "num": values.size, **summed}
        histogram = HistogramProto(**facts, bucket=counts.tolist(), bucket_limit=limits[1:])
        self._add_media(Summary.Value(tag=name, histo=histogram), step=step)

    def text(self, name: str, text: str, *, step: int) -> None:
        self._add_media(_text_value(name, "text", text.encode()), step=step)

    def table(self, name: str, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self.text(
            name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step=step
        )

    def pr_curve(self, name: str, curve: Any, *, step: int) -> None:
        from tensorboard.plugins.pr_curve.plugin_data_pb2 import PrCurvePluginData

        from dpframe.loggers.media import precision_recall

        rows = [*curve, *precision_recall(curve)]
        tensor = TensorProto(dtype=DT_FLOAT, float_val=[number for row in rows for number in row])
        for size in (len(rows), len(rows[0])):
            tensor.tensor_shape.dim.add(size=size)
        content = PrCurvePluginData(num_thresholds=len(rows[0])).SerializeToString()
        metadata = _metadata("pr_curves", content)
        self._add_media(Summary.Value(tag=name, metadata=metadata, tensor=tensor), step=step)

    def graph(self, module: Any, inputs: tuple[Any, ...]) -> None:
        with redirect_stdout(io.StringIO()):  # PyTorch prints its errors, and raises them
            self.writer.add_graph(module, inputs, use_strict_trace=False)

    def dashboard(self, run_dir: str) -> str:
        return f"tensorboard --logdir {shlex.quote(run_dir)}"

    def flush(self) -> None:
        charted = {
            tag.partition("/")[2] for tag in self._logged if tag.startswith(("train/", "val/"))
        }
        if charted != self._charted:
            self._charted = charted
            self._add(_layout(charted))
        if self._writer is not None:  # first: its file is the older one
            self._writer.flush()
        if self._file is not None:
            self._file.write()

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        missing = {tag: value for tag, value in metrics.items() if tag not in self._logged}
        if missing and succeeded:  # after an error they may be of a later step
            self.log(missing, step=self._last_step)
        self.flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._file is not None:
            end = EventFile(self._file.path.parent, suffix=HPARAMS)
            end.add(_session_end(succeeded), step=BEFORE)
            end.write()

    def _add_media(self, value: Summary.Value, *, step: int) -> None:
        self._last_step = step
        self._add(value)

    def _add(self, *values: Summary.Value) -> None:
        assert self._file is not None
        self._file.add(*values, step=self._last_step)


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
    info = SessionStartInfo(start_time_secs=time.time())
    for name, value in hparams.items():
        if isinstance(value, bool):
            info.hparams[name].bool_value = value
        elif isinstance(value, int | float) and math.isfinite(value):
            info.hparams[name].number_value = value
        else:
            info.hparams[name].string_value = str(value)
    data = HParamsPluginData(session_start_info=info)
    return _hparams_value("_hparams_/session_start_info", data)


def _session_end(succeeded: bool) -> Summary.Value:
    info = SessionEndInfo(
        status=STATUS_SUCCESS if succeeded else STATUS_FAILURE, end_time_secs=time.time()
    )
    return _hparams_value("_hparams_/session_end_info", HParamsPluginData(session_end_info=info))


def _text_value(tag: str, plugin: str, content: bytes) -> Summary.Value:
    return Summary.Value(
        tag=tag,
        metadata=_metadata(plugin),
        tensor=TensorProto(dtype=DT_STRING, string_val=[content]),
    )


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


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


# Event files: records, each framed by its length and two checksums


class EventFile:
    """A new one, in which all that is added is written at once."""

    def __init__(
        self, directory: Path, *, purge_step: int | None = None, suffix: str = "dpframe"
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = next_path(directory, suffix)
        self._records = bytearray()  # not yet written
        self._append(file_version="brain.Event:2")
        if purge_step is not None:
            # At a second START, TensorBoard drops the steps from this one on. The file that began
            # this run may have no first one.
            for _ in range(2):
                self._append(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, *values: Summary.Value, step: int) -> None:
        self._append(step=step, summary=Summary(value=values))

    def write(self) -> None:
        """Unbuffered: what it wrote survives a killed process, and a full disk raises here."""
        with open(self.path, "ab", buffering=0) as file:
            while self._records:
                del self._records[: file.write(self._records)]

    def _append(self, **what: Any) -> None:
        record = Event(wall_time=time.time(), **what).SerializeToString()
        length = struct.pack("<Q", len(record))
        self._records += length + checksum(length) + record + checksum(record)


def next_path(directory: Path, suffix: str) -> Path:
    """TensorBoard reads a directory's files by name: this one comes after all that are there."""
    older = [path.name.split(".")[3] for path in directory.glob(PATTERN)]
    seconds = max([int(time.time()), *(int(digits) + 1 for digits in older if digits.isdecimal())])
    # Before SummaryWriter's of the same second, which has a dot after the number of the process.
    name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}-{suffix}"
    return directory / name


def checksum(data: bytes) -> bytes:
    """A masked CRC-32C. Importing a module that computes it costs 100 ms or more."""
    crc = _crc(data) if len(data) < LONG else _crc_by_parts(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _crc_by_parts(data: bytes) -> int:
    """NumPy goes through the parts of a long record side by side, e.g. of an image, and joins them
    in pairs."""
    import numpy as np

    count = 1 << (len(data) // 1024).bit_length()
    size = -(-len(data) // count)
    padded = np.zeros(count * size, np.uint8)  # zeros in front leave a CRC that begins with 0
    start = len(padded) - len(data)
    padded[start:] = np.frombuffer(data, np.uint8)
    padded[start : start + 4] ^= 0xFF  # instead of beginning with ones
    # Beside the parts: each bit, of which zeros for the length of a part make what it is later on.
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    table, crcs = np.array(TABLE, np.uint32), np.append(bits, np.zeros(count, np.uint32))
    columns = np.pad(padded.reshape(count, size).T, ((0, 0), (32, 0)))
    for column in np.ascontiguousarray(columns):
        crcs = table[(crcs ^ column) & 0xFF] ^ crcs >> 8
    later, parts = crcs[:32], crcs[32:]

    def moved(values: Any) -> Any:
        of_bits = np.where(values[:, None] & bits, later, np.uint32(0))
        return np.bitwise_xor.reduce(of_bits, axis=1)

    while len(parts) > 1:
        parts, later = moved(parts[::2]) ^ parts[1::2], moved(later)
    return int(parts[0]) ^ 0xFFFFFFFF


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


TABLE = [_table_entry(byte) for byte in range(256)]
