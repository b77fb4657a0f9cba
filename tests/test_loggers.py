"""What the loggers write is read back with TensorBoard's own reader and with the csv module."""

import csv
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from attempted import attempted
from forked import fresh
from small import Hooks, fitted
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler

from dpframe.loggers import Logger, tensorboard
from dpframe.loggers.csv import CSV
from dpframe.loggers.history import History
from dpframe.loggers.tensorboard import TensorBoard
from dpframe.trainer import recorder

ROOT = Path(__file__).resolve().parent.parent


# The records


def test_ten_scalars_are_one_record(tmp_path):
    logger = opened(tmp_path)
    before = len(events(tmp_path))
    logger.log({f"train/{index}": float(index) for index in range(10)}, step=3)
    logger.flush()
    event = events(tmp_path)[before]
    assert event.step == 3
    assert [value.tag for value in event.summary.value] == [f"train/{i}" for i in range(10)]


def test_every_checksum_is_the_one_that_tensorboard_computes(tmp_path):
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    for data in (*(bytes(range(length)) for length in range(257)), b"123456789" * 100):
        assert tensorboard.checksum(data) == masked_crc32c(data).to_bytes(4, "little")


@pytest.mark.parametrize("length", [0, 1, 1023, 40_000])
def test_the_checksum_of_a_long_record_is_the_same_by_parts(monkeypatch, length):
    data = bytes(at * at % 251 for at in range(tensorboard.LONG + length))
    by_parts = tensorboard.checksum(data)
    monkeypatch.setattr(tensorboard, "LONG", math.inf)
    assert by_parts == tensorboard.checksum(data)


def test_a_long_record_is_not_gone_through_byte_by_byte(monkeypatch):
    monkeypatch.setattr(tensorboard, "_crc", None)
    assert len(tensorboard.checksum(bytes(tensorboard.LONG))) == 4


def test_non_finite_and_out_of_range_scalars_are_written(tmp_path):
    logger = opened(tmp_path)
    values = [math.nan, math.inf, -math.inf, 1e300, 5e-324, 0.1]
    for step, value in enumerate(values):
        logger.log({"train/loss": value}, step=step)
    logger.close({}, succeeded=True)
    read = [value for _, value in curve(tmp_path, "train/loss")]
    assert math.isnan(read[0])
    assert read[1:5] == [math.inf, -math.inf, math.inf, 0.0]
    assert read[5] == pytest.approx(0.1)


def test_flushed_scalars_survive_a_killed_process(tmp_path):
    code = """
from dpframe.loggers.csv import CSV
from dpframe.loggers.tensorboard import TensorBoard
from dpframe.trainer import recorder
loggers = [TensorBoard(), CSV()]
for logger in loggers:
    logger.open(RUN, config="a: 1", hparams={"lr": 0.1}, purge_step=None)
    for step in range(5):
        logger.log({"train/loss": float(step)}, step=step)
    logger.flush()
    logger.log({"train/loss": 5.0}, step=5)
print("ready", flush=True)
import time; time.sleep(60)
"""
    process = start(f"RUN = {str(tmp_path)!r}\n{code}", stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert curve(tmp_path, "train/loss") == [(step, float(step)) for step in range(5)]
    assert [row["step"] for row in table(tmp_path)] == ["0", "1", "2", "3", "4"]
    (group,) = session_groups(tmp_path)
    assert group.hparams["lr"].number_value == 0.1
    assert group.sessions[0].status == api_pb2.STATUS_UNKNOWN


# What TensorBoard shows


def test_the_config_is_a_code_block(tmp_path):
    opened(tmp_path, config="task:\n  lr: 0.1\n")
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    assert accumulator.SummaryMetadata("config").plugin_data.plugin_name == "text"
    (event,) = accumulator.Tensors("config")
    assert event.tensor_proto.string_val[0] == b"    task:\n      lr: 0.1\n"


def test_each_run_is_one_hparams_row_with_its_final_metrics(tmp_path):
    for name, lr in (("a", 0.1), ("b", 0.01)):
        hparams = {"lr": lr, "epochs": 3, "nesterov": True, "recipe": "boston"}
        logger = opened(tmp_path / name, hparams=hparams)
        logger.log({"val/loss": lr * 2}, step=7)
        logger.log({"test/loss": lr * 3}, step=7)
        logger.close({"val/loss": lr * 2, "test/loss": lr * 3}, succeeded=name == "a")
    first, second = session_groups(tmp_path)
    assert [group.sessions[0].status for group in (first, second)] == [
        api_pb2.STATUS_SUCCESS,
        api_pb2.STATUS_FAILURE,
    ]
    assert first.hparams["lr"].number_value == 0.1
    assert first.hparams["epochs"].number_value == 3
    assert first.hparams["nesterov"].bool_value is True
    assert first.hparams["recipe"].string_value == "boston"
    assert {metric.name.tag: metric.value for metric in second.metric_values} == pytest.approx(
        {"val/loss": 0.02, "test/loss": 0.03}
    )
    assert curve(tmp_path / "a", "test/loss") == [(7, pytest.approx(0.3))]
    assert len(curve(tmp_path / "a", "val/loss")) == 1


def test_recipes_with_other_names_share_one_hparams_table(tmp_path):
    for name in ("boston", "shapes"):
        logger = opened(tmp_path / name, hparams={f"{name}_width": 8})
        logger.close({f"val/{name}_error": 1.0}, succeeded=True)
    hparams, metrics = columns(tmp_path)
    assert set(hparams) == {"boston_width", "shapes_width"}
    assert metrics == ["val/boston_error", "val/shapes_error"]


def test_tensorboard_shows_a_run_once_and_its_hyperparameters_are_those_of_its_curves(tmp_path):
    logger = opened(tmp_path / "a", hparams={"lr": 0.1})
    logger.log({"step/loss": 3.0, "step/lr": 0.1}, step=1)
    logger.log({"train/loss": 2.0, "val/loss": 1.0}, step=2)
    logger.flush()
    (group,) = session_groups(tmp_path)
    assert (group.name, group.hparams["lr"].number_value) == ("a", 0.1)
    logger.close({"train/loss": 2.0, "val/loss": 1.0}, succeeded=True)
    runs = data_provider(tmp_path).list_runs(RequestContext(), experiment_id="")
    assert [run.run_name for run in runs] == ["a"]
    assert columns(tmp_path)[1] == ["step/loss", "step/lr", "train/loss", "val/loss"]


def test_a_resumed_run_shows_the_end_and_the_hyperparameters_that_it_goes_on_with(tmp_path):
    for epochs, purge_step in ((3, None), (5, 4)):
        logger = opened(tmp_path / "a", hparams={"epochs": epochs}, purge_step=purge_step)
        logger.log({"val/loss": 1 / epochs}, step=epochs)
        logger.close({"val/loss": 1 / epochs}, succeeded=epochs == 5)
    opened(tmp_path / "b", hparams={"epochs": 7}).close({}, succeeded=True)
    groups = session_groups(tmp_path)
    assert [group.hparams["epochs"].number_value for group in groups] == [5, 7]
    assert groups[0].sessions[0].status == api_pb2.STATUS_SUCCESS
    assert [step for step, _ in curve(tmp_path / "a", "val/loss")] == [3, 5]


def test_train_and_val_of_one_name_share_a_chart_and_new_names_join(tmp_path):
    logger = opened(tmp_path)
    logger.log({"train/loss": 1.0, "lr": 0.1}, step=1)
    logger.flush()
    assert charts(tmp_path) == {"loss": "^(train|val)/loss$"}
    size = event_path(tmp_path).stat().st_size
    logger.log({"val/loss": 1.0}, step=2)
    logger.flush()
    assert event_path(tmp_path).stat().st_size - size < 100  # no second layout for the same names
    logger.log({"val/loss": 1.0, "val/mae": 1.0}, step=3)
    logger.flush()
    assert charts(tmp_path) == {"loss": "^(train|val)/loss$", "mae": "^(train|val)/mae$"}


def test_runs_with_other_names_do_not_repeat_charts(tmp_path):
    for name, tags in (("a", ["train/loss"]), ("b", ["train/loss", "val/loss", "val/mae"])):
        opened(tmp_path / name).close(dict.fromkeys(tags, 1.0), succeeded=True)
    layout = chart_layout(tmp_path)
    assert [chart["title"] for chart in layout["category"][0]["chart"]] == ["loss", "mae"]


@pytest.mark.parametrize("began_with", ["our logger", "the stock writer"])
def test_a_resumed_curve_is_monotonic_without_duplicates(tmp_path, began_with):
    if began_with == "our logger":
        logger = opened(tmp_path)
        for step in range(10):
            logger.log({"train/loss": 1.0}, step=step)
        logger.flush()
    else:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as writer:
            for step in range(10):
                writer.add_scalar("train/loss", 1.0, step)
    for purge_step, value in ((6, 2.0), (8, 3.0)):
        logger = opened(tmp_path, purge_step=purge_step)
        for step in range(purge_step, 12):
            logger.log({"train/loss": value}, step=step)
        logger.close({}, succeeded=True)
    expected = [(s, 1.0 if s < 6 else 2.0 if s < 8 else 3.0) for s in range(12)]
    assert len(list(tmp_path.glob("events*[!s]"))) == 3  # beside those of hparams
    assert curve(tmp_path, "train/loss") == expected
    assert shown_curve(tmp_path, "train/loss") == expected


def test_a_later_file_sorts_last_even_within_one_second(tmp_path):
    paths = []
    for _ in range(12):
        paths.append(tensorboard.next_path(tmp_path, "dpframe"))
        paths[-1].touch()
    assert paths == sorted(set(paths))


@pytest.mark.parametrize("writers", [("ours", "theirs"), ("theirs", "ours")])
def test_a_writer_of_the_users_own_in_the_run_directory_erases_nothing(tmp_path, writers):
    fresh(write_within_a_second, tmp_path, writers)
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    (event,) = accumulator.Tensors("config")
    assert event.tensor_proto.string_val[0] == b"    seed: 3"
    assert curve(tmp_path, "theirs") == [(1, 2.0)]
    assert len(session_groups(tmp_path)) == 1


def write_within_a_second(directory, writers):
    from torch.utils.tensorboard import SummaryWriter

    with patch("time.time", lambda: 1e9):
        for who in writers:
            if who == "ours":
                opened(directory, config="seed: 3").close({}, succeeded=True)
            else:
                with SummaryWriter(str(directory)) as writer:
                    writer.add_scalar("theirs", 2.0, 1)


# The table


def test_the_table_grows_a_column_for_each_new_name(tmp_path):
    logger = opened(tmp_path, CSV())
    logger.log({"train/loss": 1.5}, step=1)
    logger.flush()
    logger.log({"train/loss": math.nan, "val/loss": math.inf}, step=2)
    logger.log({"train/loss": 0.1}, step=3)
    logger.close({"val/loss": math.inf, "test/loss": 0.25}, succeeded=True)
    assert (tmp_path / "metrics.csv").read_text() == (
        "step,train/loss,val/loss,test/loss\n1,1.5,,\n2,nan,inf,\n3,0.1,,0.25\n"
    )
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_a_new_name_takes_no_row_apart(tmp_path, monkeypatch):
    logger = opened(tmp_path, CSV())
    monkeypatch.setattr("dpframe.loggers.csv._read", None)
    for step in range(40):
        logger.log({f"val/{step}": 0.5, "a,b": 1}, step=step)
        logger.flush()
    logger.close({}, succeeded=True)
    rows = table(tmp_path)
    assert [row[f"val/{step}"] for step, row in enumerate(rows)] == ["0.5"] * 40
    assert all(len(row) == 42 and row["a,b"] == "1" for row in rows)


def test_a_resumed_table_drops_the_rows_that_are_written_anew(tmp_path):
    logger = opened(tmp_path, CSV())
    for step in range(4):
        logger.log({"train/loss": 1.0}, step=step)
    logger.flush()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("1,0.")  # and no more: the process was killed
    logger = opened(tmp_path, CSV(), purge_step=2)
    logger.log({"val/loss": 2.0}, step=2)
    logger.flush()
    assert [(row["step"], row["train/loss"], row["val/loss"]) for row in table(tmp_path)] == [
        ("0", "1.0", ""),
        ("1", "1.0", ""),
        ("2", "", "2.0"),
    ]


@pytest.mark.parametrize("kind", [CSV, TensorBoard])
def test_numbers_of_a_step_that_failed_are_written_at_no_other_step(tmp_path, kind):
    """The epoch's own are measured by then, and nobody has logged them."""
    hook = Hooks(on_validation_end=lambda trainer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fitted(loggers=[kind()], callbacks=[hook], directory=tmp_path, log_every=2)
    if kind is CSV:
        rows = table(tmp_path)
        assert [row["step"] for row in rows] == ["2", "4"]
        assert all(name.startswith("step") for name in rows[0])
    else:
        accumulator = EventAccumulator(str(tmp_path)).Reload()
        assert all(name.startswith("step/") for name in accumulator.scalars.Keys())


TORN = {
    "zeros": b"\0" * 40 + b"\n",
    "a half row and zeros": b"3,0.2" + b"\0" * 40 + b"\n",
    "a blank line": b"\n",
    "a row with too few cells": b"3\n",
    "what is no text": b"3,\xff\xfe,1.0\n",
}


@pytest.mark.parametrize("torn", TORN.values(), ids=TORN)
@pytest.mark.parametrize("is_last", [True, False])
def test_a_resumed_table_goes_on_without_the_rows_that_a_power_cut_has_torn(
    tmp_path, torn, is_last
):
    good = b"1,0.5,\n2,nan,0.25\n"
    content = good + torn if is_last else torn + good
    (tmp_path / "metrics.csv").write_bytes(b"step,train/loss,val/loss\n" + content)
    logger = opened(tmp_path, CSV(), purge_step=4)
    logger.log({"train/loss": 0.125}, step=4)
    logger.close({}, succeeded=True)
    assert (tmp_path / "metrics.csv").read_text() == (
        "step,train/loss,val/loss\n1,0.5,\n2,nan,0.25\n4,0.125,\n"
    )


def test_csv_has_one_row_for_a_step_that_is_logged_twice(tmp_path):
    logger = opened(tmp_path, CSV())
    logger.log({"step/loss": 1.0}, step=4)
    logger.log({"train/loss": 2.0}, step=4)
    logger.close({}, succeeded=True)
    assert (tmp_path / "metrics.csv").read_text() == "step,step/loss,train/loss\n4,1.0,2.0\n"


# Failure


def test_a_full_disk_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tensorboard, "next_path", lambda directory, suffix: Path("/dev/full"))
    fitted(loggers=[TensorBoard(), CSV()], directory=tmp_path, log_every=1)
    (record,) = caplog.records
    assert record.name == "dpframe" and record.levelno == logging.WARNING
    assert "TensorBoard stopped" in record.message and "No space left" in record.message
    assert len(table(tmp_path)) == 10


def test_files_that_may_not_grow_stop_their_loggers_and_nothing_else(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "BETWEEN_FLUSHES", 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        loggers = [TensorBoard(), CSV()]
        done = fitted(loggers=loggers, directory=tmp_path, log_every=1, max_epochs=20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.global_step == 100
    assert sorted(text.split()[0] for text in caplog.messages) == ["CSV", "TensorBoard"]
    assert len(curve(tmp_path, "step/loss")) > 5


METHODS = ["open", "log", "flush", "close"]


@pytest.mark.parametrize("method", METHODS)
def test_a_logger_that_failed_is_not_called_again_and_training_goes_on(method, caplog):
    calls = []

    class Failing(Logger):
        def __getattribute__(self, name):
            if name not in METHODS:
                return super().__getattribute__(name)

            def call(*args, **kwargs):
                calls.append(name)
                if name == method:
                    raise ValueError("broken")

            return call

    assert fitted(loggers=[Failing()]).global_step == 10
    assert calls[-1] == method and calls.count(method) == 1
    assert caplog.messages == ["Failing stopped: ValueError: broken; training goes on without it"]


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_package_that_is_not_installed_is_one_line(tmp_path, package):
    (run,) = fresh(attempted_without, package, folder=tmp_path)
    line = f"logger={package} needs the package {package}: pip install 'dpframe[{package}]'"
    assert (run.code, run.err) == (2, f"dpframe: {line}\n")
    assert run.files == []


def attempted_without(package):
    sys.modules[package] = None
    return attempted([["recipe=boston", f"logger={package}"]])


# What is imported


def test_the_loggers_import_no_more_than_they_need():
    """The stock TensorBoard writer imports 160 ms of modules."""
    code = "import sys; import dpframe.loggers.csv; print(*sys.modules, end=';');"
    code += "import dpframe.loggers.tensorboard; print(*sys.modules)"
    process = start(code, stdout=subprocess.PIPE)
    light, all_of_them = (set(part.split()) for part in process.communicate()[0].split(";"))
    assert light & {"torch", "tensorboard", "numpy"} == set()
    assert all_of_them & {"torch", "numpy", "tensorflow", "absl", "fsspec"} == set()


# Writing and reading back


def opened(directory, logger=None, *, config="a: 1", hparams=None, purge_step=None) -> Logger:
    logger = logger or TensorBoard()
    logger.open(str(directory), config=config, hparams=hparams or {}, purge_step=purge_step)
    return logger


def event_path(directory):
    (path,) = directory.glob("events*-dpframe")
    return path


def events(directory):
    paths = sorted(directory.glob("events*"))
    return [event for path in paths for event in EventFileLoader(str(path)).Load()]


def curve(directory, tag):
    accumulator = EventAccumulator(str(directory)).Reload()
    if tag not in accumulator.Tags()["scalars"]:
        return []
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def data_provider(directory):
    multiplexer = EventMultiplexer(tensor_size_guidance={"scalars": 1000})
    multiplexer.AddRunsFromDirectory(str(directory)).Reload()
    return MultiplexerDataProvider(multiplexer, str(directory))


def shown_curve(directory, tag):
    """As the web page gets it."""
    provider = data_provider(directory)
    found = provider.read_scalars(
        RequestContext(), experiment_id="", plugin_name="scalars", downsample=1000
    )
    return [(datum.step, datum.value) for datum in found["."][tag]]


def columns(directory):
    """The names of the hyperparameters and of the metrics, in TensorBoard's order."""
    context = Context(TBContext(data_provider=data_provider(directory)))
    request = RequestContext()
    metadata = context.hparams_metadata(request, "")
    experiment = context.experiment_from_metadata(request, "", True, metadata, [])
    names = [info.name for info in experiment.hparam_infos]
    return names, [info.name.tag for info in experiment.metric_infos]


def session_groups(directory):
    context = Context(TBContext(data_provider=data_provider(directory)))
    statuses = api_pb2.Status.values()
    request = api_pb2.ListSessionGroupsRequest(allowed_statuses=statuses, slice_size=10)
    return list(Handler(RequestContext(), context, "", request).run().session_groups)


def chart_layout(directory):
    context = TBContext(data_provider=data_provider(directory), plugin_name_to_instance={})
    return json.loads(CustomScalarsPlugin(context).layout_impl(RequestContext(), ""))


def charts(directory):
    (category,) = chart_layout(directory)["category"]
    return {chart["title"]: chart["multiline"]["tag"][0] for chart in category["chart"]}


def table(directory, file="metrics.csv"):
    with (directory / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def start(code, **pipes):
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)


@pytest.mark.parametrize("kind", [CSV, TensorBoard, History])
def test_a_logger_that_another_run_has_had_begins_afresh(tmp_path, kind):
    def logged(logger: Logger, name: str, epochs: int = 1) -> Any:
        fitted(loggers=[logger], directory=tmp_path / name, max_epochs=epochs)
        if isinstance(logger, History):
            return [list(row) for row in logger.rows]
        if isinstance(logger, CSV):
            return [row["step"] for row in table(tmp_path / name)]
        return charts(tmp_path / name), columns(tmp_path / name)

    shared = kind()
    logged(shared, "first", 2)
    assert logged(shared, "second") == logged(kind(), "alone")
