"""`mode=predict data.input=FILE`: a table and images, in order, on one or several devices."""

import csv
import gzip
import importlib
import os
import re
from collections import namedtuple
from itertools import islice

import numpy as np
import pytest
import torch
from command import attempts, dpframe, write
from small import Rows, Small, Streamed, is_same, trainer
from torch.utils.data import DataLoader

from dpframe import DataSets, UserError, load
from dpframe.data import input
from dpframe.data.columns import Columns
from dpframe.data.input import Images, Table, dataset_of, numbers_of
from dpframe.recipes.boston import COLUMNS, BostonData, read_table
from dpframe.recipes.boston import PACKAGED_FILE as BOSTON
from dpframe.recipes.lenet import LeNetData
from dpframe.strategies.ddp import DDP
from dpframe.trainer.predictions import Predictions

House = namedtuple("House", "rooms street")
TRAINED = "run/checkpoints/best.ckpt"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("input")
    line = ["recipe=boston", "trainer.max_epochs=2", "trainer.precision=64", "hydra.run.dir=run"]
    done = dpframe(*line, cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(BOSTON.open()))
    names = [*reversed(COLUMNS[:-1]), "note"]  # in another order, without the price
    with (folder / "houses.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, "note": "mine"} for row in lines)
    return folder


@pytest.mark.parametrize(
    "words", [("strategy=cpu",), ("strategy=ddp", "trainer.gpus=2", "trainer.accelerator=cpu")]
)
def test_a_tables_rows_are_predicted_in_their_order_on_each_strategy(run, words):
    where = f"predicted-{len(words)}"
    line = ["recipe=boston", "mode=predict", f"checkpoint={TRAINED}", "data.input=houses.csv"]
    done = dpframe(*line, *words, f"hydra.run.dir={where}", cwd=run)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^506 rows in [\d.]+ s, [\d,]+ samples/s$", done.stdout, re.M)
    data = BostonData()
    data.setup()
    features = (read_table(BOSTON)[:, :-1] - data.mean) / data.scale
    wanted = load(run / TRAINED).predict_step((features.float().double(),))[:, 0]
    got = (run / where / "predictions.csv").read_text().split()[1:]
    assert list(map(float, got)) == pytest.approx(wanted.tolist(), rel=1e-12)


@pytest.mark.parametrize(
    "words", [("strategy=cpu",), ("strategy=ddp", "trainer.gpus=2", "trainer.accelerator=cpu")]
)
def test_a_tables_own_columns_stand_beside_its_predictions_as_they_were(run, words):
    where = f"beside-{len(words)}"
    line = ["recipe=boston", "mode=predict", f"checkpoint={TRAINED}", "data.input=houses.csv"]
    columns = "predict.columns=[id,note,RM,Z*]"
    done = dpframe(*line, *words, columns, f"hydra.run.dir={where}", cwd=run)
    assert done.returncode == 0, done.stderr
    got = list(csv.DictReader((run / where / "predictions.csv").open()))
    assert [*got[0]] == ["id", "note", "RM", "ZN", "output"]
    with (run / "houses.csv").open() as file:
        for number, (wanted, row) in enumerate(zip(csv.DictReader(file), got, strict=True)):
            assert float(row.pop("output"))
            assert row == {"id": str(number), **{name: wanted[name] for name in [*row][1:]}}


def test_columns_that_are_not_there_are_refused_before_the_run_has_a_directory(run):
    line = ["recipe=boston", "mode=predict", f"checkpoint={TRAINED}", "hydra.run.dir=refused"]
    table, its_own = attempts(
        [
            [*line, "data.input=houses.csv", "predict.columns=[id,NOTE]"],
            [*line, "predict.columns=[rooms]"],
        ],
        run,
    )
    assert table.err == (
        "dpframe: predict.columns=[NOTE]: a row has no such column; did you mean note?\n"
    )
    assert its_own.err.startswith(
        "dpframe: predict.columns=[rooms]: a row has no such column; there is: id, input_0_0, "
    )
    assert (table.code, its_own.code) == (2, 2) and not (run / "refused").exists()


ROWS = {
    "a tensor": (torch.tensor(1.5), {"input": 1.5}),
    "tensors and a number": (
        (torch.tensor([1.0, 2.0]), torch.tensor([3.0]), 4, torch.zeros(2, 2)),
        {"input_0_0": 1.0, "input_0_1": 2.0, "input_1": 3.0, "input_2": 4},
    ),
    "names": (
        {"text": "a", "size": np.int64(3), "image": torch.zeros(2, 2)},
        {"text": "a", "size": 3},
    ),
    "a named tuple": (House(1.0, "b"), {"rooms": 1.0, "street": "b"}),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_columns_of_a_row_are_its_numbers_and_texts(name):
    row, wanted = ROWS[name]
    columns = Columns([row, row], ["*"])
    assert columns.names == [*wanted]
    assert [*columns.rows()] == [[*wanted.values()]] * 2
    assert [*Columns([row, row], ["id", "*"]).rows()][1] == [1, *wanted.values()]
    assert [*islice(Columns([row, row], ["id"]).rows(), 2)] == [[0], [1]]


def test_a_column_of_the_input_that_is_called_id_is_that_one():
    columns = Columns([{"id": "x7"}, {"id": "x9"}], ["id"])
    assert [*columns.rows()] == [["x7"], ["x9"]]


def test_a_later_row_without_a_column_has_an_empty_cell(tmp_path):
    columns = Columns([{"id": "a", "extra": 1}, {"id": "b"}], ["id", "extra"])
    path = Predictions([[torch.ones(2)]], columns=columns).save(tmp_path)
    assert path.read_text().split() == ["id,extra,output", "a,1,1.0", "b,,1.0"]


def test_of_several_data_sets_the_one_without_a_column_is_named():
    both = {"clean": [{"input": 1.0, "note": "a"}], "noisy": [{"input": 1.0}]}
    with pytest.raises(UserError, match=r"\[note\]: a row of noisy has no such column; there is"):
        trainer(Small(), DataSets(predict=both)).predict(columns=["note"])


def test_an_image_has_its_files_name_for_a_column(tmp_path):
    columns = Columns(Images([tmp_path / "a.png", tmp_path / "b.png"], dict), ["id", "file"])
    assert [*columns.rows()] == [[0, "a.png"], [1, "b.png"]]


def test_a_stream_has_the_places_of_its_rows_alone():
    stream = Streamed(8, 4).train_dataset()
    assert [*islice(Columns(stream, ["id"]).rows(), 2)] == [[0], [1]]
    with pytest.raises(UserError, match="a stream's rows are read once; use .*=\\[id\\]"):
        Columns(stream, ["*"])


def test_an_order_of_a_data_loaders_own_has_no_columns():
    data = DataSets(predict=DataLoader(Rows().train, sampler=[2, 0, 1]))
    with pytest.raises(UserError, match="an order of its own"):
        trainer(Small(), data).predict(columns=["id"])
    assert trainer(Small(), data).predict().rows == 3


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("id", "predict.columns=id is text; use a list of names"),
        ([3], r"predict.columns=\[3\] is a list; use a list of names"),
        (None, "predict.columns=null is nothing; use a list of names"),
    ],
)
def test_columns_that_are_no_list_of_names_are_refused_in_a_line(columns, said):
    with pytest.raises(UserError, match=f"^{said}$"):
        trainer(Small(), Rows()).predict(columns=columns)


def test_a_column_called_as_a_prediction_has_another_name_in_the_table(tmp_path):
    columns = Columns([{"output": 1.0, "x": 2.0}], ["*"])
    path = Predictions([[torch.ones(1)]], columns=columns).save(tmp_path)
    assert path.read_text().split() == ["input_output,x,output", "1.0,2.0,1.0"]
    columns = Columns([{"output": 1.0, "input_output": 2.0, "id": 3}], ["*"])
    made = {"output": torch.ones(1), "id": torch.zeros(1)}
    path = Predictions([[made]], columns=columns).save(tmp_path)
    names = "input_input_output,input_output,input_id,output,id"
    assert path.read_text().split() == [names, "1.0,2.0,3,1.0,0.0"], "no name is there twice"


def test_predictions_that_are_no_table_have_no_columns_and_say_so(tmp_path, caplog):
    columns = Columns([0.0], ["id"])
    path = Predictions([[torch.ones(1, 2, 2)]], columns=columns).save(tmp_path)
    assert path.name == "predictions.pt" and is_same(torch.load(path), torch.ones(1, 2, 2))
    (record,) = caplog.records
    assert record.message.startswith("predict.columns stand in predictions.csv alone")


def test_ranks_hand_the_columns_to_the_trainer_that_started_them(tmp_path):
    data = Rows(10)
    with trainer(Small(), data, strategy=DDP(2, accelerator="cpu")) as made:
        made.predict(columns=["id", "input_1"]).save(tmp_path)
    got = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert [int(row["id"]) for row in got] == list(range(10))
    held_out = data.held_out.tensors[1]
    assert [float(row["input_1"]) for row in got] == held_out.tolist()


NUMBERS = ["0", "-7", "+3", "1.50", "10.", ".5", "-0.25", "2e3", "1.5E-7", " 4 "]
TEXTS = [
    "2021_05",
    "007",
    "-01.5",
    "nan",
    "NaN",
    "inf",
    "-Infinity",
    "1e999",
    "0x10",
    "1,5",
    "",
    "٣",
]


def test_a_number_is_what_looks_like_one_and_all_else_is_text(tmp_path):
    rows = "".join(f'"{text}"\n' for text in [*NUMBERS, *TEXTS])
    write(tmp_path, {"table.csv": "a\n" + rows})
    read = [row["a"] for row in Table(tmp_path / "table.csv", dict)]
    assert read == [*map(float, NUMBERS), *TEXTS]


def test_a_table_is_read_as_it_goes(tmp_path):
    write(tmp_path, {"long.csv": "a,b\n1,2\n\n3,x\n5\n"})
    rows = iter(Table(tmp_path / "long.csv", dict))
    assert [next(rows), next(rows)] == [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": "x"}]
    with pytest.raises(UserError, match=r"long.csv line 5: 1 values for 2 columns; fix that line$"):
        next(rows)


def test_a_data_module_without_input_row_takes_all_numbers(tmp_path):
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(b"x,y,z\n1,0,0\n0,1,0\n0,0,1\n"))
    data = Rows()
    data.input = str(tmp_path / "packed.csv.gz")
    made = trainer(Small(), data)
    predicted = made.predict()
    assert predicted.rows == 3
    with torch.no_grad():
        assert torch.equal(predicted.joined(), made.task.net(torch.eye(3)))


def test_images_come_in_the_order_of_their_names_and_as_the_recipe_wants_them(tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    pillow.new("L", (56, 40), 255).save(tmp_path / "b.png")
    pillow.new("RGB", (28, 28), (0, 51, 102)).save(tmp_path / "a.PNG")
    write(tmp_path, {"notes.txt": "no image"})
    plain = dataset_of(str(tmp_path), numbers_of)
    assert [path.name for path in plain.paths] == ["a.PNG", "b.png"]
    assert [tuple(plain[row][0].shape) for row in range(2)] == [(3, 28, 28), (1, 40, 56)]
    assert plain[0][0][:, 0, 0].tolist() == pytest.approx([0, 0.2, 0.4])
    digits = dataset_of(str(tmp_path), LeNetData().input_row)
    assert [tuple(digits[row][0].shape) for row in range(2)] == [(1, 28, 28)] * 2
    assert digits[1][0].mean().item() == pytest.approx(1)
    assert len(dataset_of(str(tmp_path / "b.png"), numbers_of)) == 1


def first(data, path):
    return next(iter(dataset_of(str(path), data.input_row)))


def test_what_can_not_be_read_is_one_line_with_its_place(tmp_path):
    data = BostonData()
    files = {"twice.csv": "CRIM,ZN, CRIM,ZN\n1,2,3,4\n", "text.csv": "a\nword\n"}
    files |= {"few.csv": "CRIM,ZN\n1,2\n", "rows.txt": "", "bad.png": "x"}
    write(tmp_path, files | {"empty/notes.txt": "", "none.csv": "", "header.csv": "CRIM,ZN\n\n"})
    data.mean = data.scale = torch.ones(1)
    for name, said in {
        "nowhere.csv": "there is no such file; name a CSV file or images",
        "rows.txt": "is neither a table nor an image; use one of .csv, .csv.gz, .png",
        "empty": "has no images",
        "none.csv": "none.csv has no rows below its header; name another",
        "header.csv": "header.csv has no rows below its header; name another",
        "twice.csv": "twice.csv line 1: several columns are called 'CRIM', 'ZN'; give each its own",
        "few.csv": "line 2: there is no number in the columns INDUS, CHAS,",
        "bad.png": "bad.png: is no PNG that Pillow can read: it is damaged, or has the ending",
    }.items():
        with pytest.raises(UserError) as caught:
            row = dataset_of(str(tmp_path / name), data.input_row)
            row[0] if isinstance(row, Images) else next(iter(row))
        assert said in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"text.csv line 2: column a: 'word' is not a number; "):
        first(Rows(), tmp_path / "text.csv")


def test_a_file_is_read_as_what_its_name_says(tmp_path, monkeypatch):
    """Pillow looks into a file for what it may be: for PostScript it starts Ghostscript."""
    pytest.importorskip("PIL.Image", reason="pillow is not installed")
    postscript = importlib.import_module("PIL.EpsImagePlugin")
    monkeypatch.setattr(postscript, "gs_binary", None)  # it remembers where it has found one
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    write(tmp_path, {"gs": f"#!/bin/sh\ntouch {tmp_path}/canary\necho 10.0\n", "a.png": program})
    (tmp_path / "gs").chmod(0o755)
    with pytest.raises(UserError, match=r"a\.png: is no PNG that Pillow can read: "):
        dataset_of(str(tmp_path), numbers_of)[0]
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("width", [15, 30])  # for which Pillow warns, and raises
def test_an_image_of_too_many_pixels_is_one_line(width, tmp_path, monkeypatch, recwarn):
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    pillow.new("L", (width, 10)).save(tmp_path / "large.png")
    monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UserError, match=r"large\.png: has more than 100 pixels; .* leave it out$"):
        dataset_of(str(tmp_path / "large.png"), numbers_of)[0]
    assert not recwarn.list


def test_a_pipe_among_images_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UserError, match=r"pipe\.png: is no file; remove it$"):
        dataset_of(str(tmp_path), numbers_of)[0]


TABLES = {
    "damaged": (gzip.compress(b"")[:10] + b"\xff" * 50, "line 1 can't be read: Error -3 while"),
    "short": (gzip.compress(b"x,y,z\n1,2,3\n")[:-8], "line 2 can't be read: Compressed file ended"),
    "unpacked": (b"x,y,z\n1,2,3\n", "line 1 can't be read: Not a gzipped file"),
    "endless line": (gzip.compress(b"x,y,z\n" + b"1" * 2000), "line 1: a line has more than 1000 "),
    "endless header": (gzip.compress(b"x," * 1000), "line 1: a line has more than 1000 "),
}


def test_columns_without_a_name_may_be_several(tmp_path):
    (tmp_path / "rows.csv").write_text("x,y,,\n1,2,,\n")
    (row,) = dataset_of(str(tmp_path / "rows.csv"), dict)
    assert (row["x"], row["y"]) == (1, 2)


@pytest.mark.parametrize("name", TABLES)
def test_a_packed_table_that_is_damaged_or_has_no_end_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.setattr(input, "LONGEST_LINE", 1000)
    content, says = TABLES[name]
    (tmp_path / "rows.CSV.GZ").write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(dataset_of(str(tmp_path / "rows.CSV.GZ"), dict))
    assert f"rows.CSV.GZ {says}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values, wanted",
    [
        (np.array([[0, 255]], np.uint8), [0.0, 1.0]),
        (np.array([[0, 13107, 65535]], np.uint16), [0.0, 0.2, 1.0]),
        (np.array([[0.25, 0.5]], np.float32), [0.25, 0.5]),
    ],
)
def test_a_grey_image_of_more_than_8_bits_keeps_its_values(values, wanted, tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    path = tmp_path / "grey.tiff"
    pillow.fromarray(values).save(path)
    image = Images([path], lambda image: image)[0]
    assert image.shape == (1, 1, len(wanted))
    torch.testing.assert_close(image.flatten(), torch.tensor(wanted))


def test_another_mode_has_no_use_for_it(tmp_path):
    (tried,) = attempts([["recipe=boston", "data.input=a.csv"]], tmp_path)
    said = "dpframe: data.input=a.csv is what to predict on, but mode=fit; use mode=predict\n"
    assert (tried.code, tried.err) == (2, said)
