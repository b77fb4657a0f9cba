"""The recipes: their data and networks, what they print, how well they learn, what they leave."""

import csv
import gzip
import json
import re
import struct
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from command import attempts
from torch import nn

import dpframe
from dpframe import Task, UserError
from dpframe.config.compose import composed
from dpframe.modes.run import run
from dpframe.recipes import boston, lenet
from dpframe.recipes.boston import Boston, BostonData
from dpframe.recipes.lenet import LeNet, LeNetData
from dpframe.recipes.shapes import ShapesData

HEADER = boston.HEADER
ROW = "0.1,18,2.31,0,0.538,6.575,65.2,4.09,1,296,15.3,396.9,4.98,24"


def ready(data):
    data.setup()
    return data


def message(call, *args, **kwargs):
    with pytest.raises(dpframe.UserError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Boston


def test_boston_has_404_rows_to_train_on_and_102_held_out():
    data = ready(BostonData())
    assert [t.shape for t in data.train_dataset().tensors] == [(404, 13), (404, 1)]
    assert [t.shape for t in data.test_dataset().tensors] == [(102, 13), (102, 1)]
    assert all(t.dtype == torch.float32 for t in data.train_dataset().tensors)
    assert data.val_dataset() is data.test_dataset() is data.predict_dataset()


def test_boston_split_holds_every_row_of_the_file_once_in_an_order_of_its_own_seed():
    data, other = (ready(BostonData(normalize=False, split_seed=seed)) for seed in (0, 1))
    parts = [*data.train_dataset(), *data.val_dataset()]
    rows = sorted(torch.cat(row).tolist() for row in parts)
    assert rows == sorted(boston.read_table(boston.PACKAGED_FILE).float().tolist())
    assert not torch.equal(data.train_dataset().tensors[1], other.train_dataset().tensors[1])


@pytest.mark.parametrize("kind", [BostonData, LeNetData, ShapesData])
def test_the_rows_of_a_recipe_are_the_same_whatever_the_runs_seed(kind):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = ready(kind()).predict_dataset().tensors
    assert torch.equal(torch.get_rng_state(), state), "the run's own generator was drawn from"
    torch.manual_seed(2)
    second = ready(kind()).predict_dataset().tensors
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_boston_features_are_scaled_by_the_training_rows_alone_and_targets_never():
    data, raw = ready(BostonData()), ready(BostonData(normalize=False))
    train, target = (tensor.double() for tensor in raw.train_dataset().tensors)
    mean, scale = train.mean(0), train.std(0, correction=0)
    for name in ("train_dataset", "test_dataset"):
        scaled, rows = (getattr(its, name)().tensors for its in (data, raw))
        assert torch.allclose(scaled[0].double(), (rows[0].double() - mean) / scale, atol=1e-5)
        assert torch.equal(scaled[1], rows[1])
    assert target.max() == 50


def test_a_constant_feature_is_centred_and_not_divided_by_zero():
    table = torch.tensor([[1.0, 0.538, 0.0]] * 3 + [[3.0, 0.538, 0.0]] * 3, dtype=torch.float64)
    mean, scale = boston.feature_statistics(table)
    assert mean.tolist() == pytest.approx([2.0, 0.538])
    assert scale.tolist() == [1.0, 1.0]


def test_boston_measures_squared_and_absolute_error_in_thousand_dollars():
    task = Boston(nn.Linear(1, 1), torch.optim.SGD)
    nn.init.zeros_(task.net.weight)
    nn.init.zeros_(task.net.bias)
    x, y = torch.zeros(2, 1), torch.tensor([[3.0], [-1.0]])
    output = task.training_step((x, y))
    assert {name: value.item() for name, value in output.items()} == {"loss": 5.0, "mae": 2.0}
    assert task.predict_step((x, y)).shape == task.predict_step((x,)).shape == (2, 1)
    assert task.summarize({"loss": 6.25, "mae": 2.0}) == {"loss": 6.25, "mae": 2.0, "rmse": 2.5}


def write_table(folder, *lines):
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_good_csv_with_quotes_blank_lines_and_a_byte_order_mark_is_read(tmp_path):
    quoted = ",".join(f'"{name}"' for name in boston.COLUMNS)
    path = write_table(tmp_path, "\ufeff" + quoted, ROW, "", ROW, "")
    table = boston.read_table(path)
    assert table.dtype == torch.float64
    assert table.tolist() == [[float(value) for value in ROW.split(",")]] * 2
    assert len(ready(BostonData(file=str(path))).train_dataset()) == 1


def test_a_missing_csv_is_named(tmp_path):
    said = message(BostonData(file=str(tmp_path / "gone.csv")).setup)
    assert f"cannot read {tmp_path / 'gone.csv'}: No such file or directory" in said
    assert "data.file=null" in said
    assert "Is a directory" in message(boston.read_table, tmp_path)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (HEADER.replace(",MEDV", ""), "CRIM,ZN,"),
        (HEADER.replace("RM", "ROOMS"), "CRIM,ZN,INDUS,CHAS,NOX,ROOMS,"),
        (HEADER.replace("RM", '"RO\nOMS"'), r"CRIM,ZN,INDUS,CHAS,NOX,RO\nOMS,"),
        (HEADER.replace("CRIM,ZN", "ZN,CRIM"), "ZN,CRIM,"),
        (ROW, "0.1,18,"),
        ("", ""),
    ],
)
def test_wrong_columns_are_told_with_file_and_line(tmp_path, header, found):
    path = write_table(tmp_path, header, ROW, ROW)
    line = message(boston.read_table, path)
    assert line.startswith(f"{path} line 1: the columns are '{found}")
    assert line.endswith(f"'; they must be {HEADER}")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROW.replace("6.575", "many"), "line 3, column RM: 'many' is not a number"),
        (ROW.replace("6.575", ""), "line 3, column RM: '' is not a number"),
        (ROW.replace("6.575", "nan"), "line 3, column RM: 'nan' is not a finite float32 number"),
        (ROW.replace("6.575", "-inf"), "line 3, column RM: '-inf' is not a finite"),
        (ROW.replace("6.575", "1e39"), "line 3, column RM: '1e39' is not a finite"),
        (ROW + ",1", "line 3: 15 values, not 14"),
        (ROW.removesuffix(",24"), "line 3: 13 values, not 14"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_column(tmp_path, row, said):
    path = write_table(tmp_path, HEADER, ROW, row)
    assert message(boston.read_table, path).startswith(f"{path} {said}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"{HEADER}\n".encode(), "has 0 rows; a split needs at least 2"),
        (f"{HEADER}\n{ROW}\n".encode(), "has 1 rows; a split needs at least 2"),
        (b"\xff\xfe\x00\x01", "is not a CSV text file: "),
    ],
)
def test_a_file_without_enough_rows_or_of_no_text_is_refused(tmp_path, content, said):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    assert message(boston.read_table, path).startswith(f"{path} {said}")


# LeNet


def test_lenet_has_the_layers_and_the_parameters_of_the_book():
    net, x, sizes = lenet.lenet(), torch.zeros(2, 1, 28, 28), []
    for layer in net:
        x = layer(x)
        if not isinstance(layer, nn.ReLU):
            sizes.append(tuple(x.shape[1:]))
    assert sizes == [
        *((20, 26, 26), (20, 13, 13), (50, 9, 9), (50, 4, 4)),
        *((800,), (128,), (10,)),
    ]
    layers = [sum(p.numel() for p in layer.parameters()) for layer in net]
    assert [count for count in layers if count] == [200, 25_050, 102_528, 1_290]


def test_lenet_measures_cross_entropy_and_accuracy():
    task = LeNet(torch.optim.SGD)
    task.net = nn.Identity()
    logits = torch.tensor([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0], [0.0, 9.0]])
    output = task.training_step((logits, torch.tensor([0, 1, 1, 1])))
    assert output["accuracy"].item() == 0.75
    assert output["loss"].item() == pytest.approx(9 / 4, abs=1e-3)
    assert torch.equal(task.predict_step((logits,)), logits)


def test_digits_are_1437_to_train_on_and_360_held_out():
    data = ready(LeNetData())
    images, labels = data.train_dataset().tensors
    assert images.shape == (1437, 1, 28, 28) and labels.shape == (1437,)
    assert [t.shape for t in data.test_dataset().tensors] == [(360, 1, 28, 28), (360,)]
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.min() == 0 and images.max() == 1
    assert labels.unique().tolist() == list(range(10))
    assert data.val_dataset() is data.test_dataset()


def idx(shape, values):
    return struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape) + bytes(values)


def images_of(count, side=28):
    return idx((count, side, side), (i % 256 for i in range(count * side * side)))


@pytest.fixture
def fashion(tmp_path):
    """A tiny Fashion-MNIST: 3 training images and 2 test images."""
    for (images, labels), count in zip(lenet.FASHION_FILES.values(), (3, 2), strict=True):
        (tmp_path / images).write_bytes(images_of(count))
        (tmp_path / labels).write_bytes(idx((count,), range(count)))
    return tmp_path


def zipped(folder):
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def test_fashion_files_are_read_plain_and_zipped_alike(fashion):
    plain = ready(LeNetData(root=str(fashion)))
    zipped(fashion)
    packed = ready(LeNetData(root=str(fashion)))
    for data in (plain, packed):
        images, labels = data.train_dataset().tensors
        assert images.shape == (3, 1, 28, 28) and images.dtype == torch.float32
        assert torch.equal(images.flatten() * 255, torch.arange(3 * 784).remainder(256).float())
        assert labels.tolist() == [0, 1, 2] and labels.dtype == torch.int64
        assert [len(t) for t in data.test_dataset().tensors] == [2, 2]


def test_every_missing_file_is_named_with_the_folder_and_the_source(fashion):
    (fashion / "train-labels-idx1-ubyte").unlink()
    (fashion / "t10k-images-idx3-ubyte").unlink()
    said = message(LeNetData(root=str(fashion)).setup)
    assert f"data.root={fashion} has no train-labels-idx1-ubyte, t10k-images-idx3-ubyte" in said
    assert "github.com/zalandoresearch/fashion-mnist, folder data/fashion" in said
    assert "train-images" not in said
    nowhere = message(LeNetData(root=str(fashion / "nowhere")).setup)
    assert all(name in nowhere for part in lenet.FASHION_FILES.values() for name in part)


IMAGES, LABELS = lenet.FASHION_FILES["train"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (IMAGES, b"", "0 bytes, less than its 16-byte header"),
        (IMAGES, b"<!DOCTYPE html><html>", "it starts with 0x3c21444f, not 0x00000803"),
        (LABELS, images_of(3), "it starts with 0x00000803, not 0x00000801"),
        (IMAGES, images_of(3)[:-1], "2367 bytes, not the 2368 its header promises"),
        (IMAGES, idx((0, 28, 28), ()), "it holds nothing"),
        (IMAGES, images_of(3, side=8), "its images are 8x8, not 28x28"),
        (LABELS, idx((2,), (0, 1)), f"2 labels for the 3 images of {IMAGES}"),
        (LABELS, idx((3,), (0, 10, 255)), "label 10 at position 1 is not 0 to 9"),
        (IMAGES, gzip.compress(images_of(3), mtime=0)[:10] + b"\xff" * 40, "gzip says: "),
        (IMAGES, gzip.compress(images_of(3), mtime=0)[:-20], "gzip says: "),
        # Its checksum:
        (IMAGES, gzip.compress(images_of(3), mtime=0)[:-6] + b"\0" * 6, "gzip says: "),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(fashion, name, content, said):
    (fashion / name).write_bytes(content)
    told = message(LeNetData(root=str(fashion)).setup)
    assert told.startswith(f"{fashion / name} is damaged: {said}")
    assert told.endswith(lenet.FASHION_SOURCE)


# From end to end


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def done(directory: Path, *overrides: str) -> dict[str, Any]:
    """A run's summary, as `dpframe …` would give it."""
    return run(composed([f"hydra.run.dir={directory}", "trainer.threads=1", *overrides]))


def read(path: Path) -> list[list[str]]:
    with path.open() as file:
        return list(csv.reader(file))


# boston


def test_boston_reaches_a_test_rmse_below_5(tmp_path):
    summary = done(tmp_path / "fit", "recipe=boston", "seed=0")
    assert (summary["epochs"], summary["steps"], summary["replicas"]) == (100, 400, 1)
    best = f"checkpoint={tmp_path}/fit/checkpoints/last.ckpt"
    tested = done(tmp_path / "test", "recipe=boston", "mode=test", best)
    assert tested["metrics"]["test/rmse"] < 5
    assert tested["metrics"]["test/loss"] == summary["metrics"]["val/loss"]
    assert json.loads((tmp_path / "fit" / "summary.json").read_text()) == summary


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("boston")
    done(directory, "recipe=boston", "trainer.max_epochs=3")
    return directory


def test_validating_the_best_checkpoint_gives_its_validation_loss_again(trained, tmp_path):
    with (trained / "metrics.csv").open() as file:
        losses = [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]]
    best = f"checkpoint={trained}/checkpoints/best.ckpt"
    again = done(tmp_path, "recipe=boston", "mode=validate", best)
    assert again["metrics"]["val/loss"] == min(losses)


def test_boston_predicts_102_rows_in_the_order_of_the_data_set(trained, tmp_path):
    weights = f"checkpoint={trained}/checkpoints/best.ckpt"
    done(tmp_path, "recipe=boston", "mode=predict", weights, "data.batch_size=10")
    header, *rows = read(tmp_path / "predictions.csv")
    assert header == ["output"]
    data = BostonData()
    data.setup()
    state = torch.load(trained / "checkpoints" / "best.ckpt", weights_only=True)["task"]
    layers = [(state[f"net.{n}.weight"], state[f"net.{n}.bias"]) for n in (0, 2, 4)]
    wanted = data.test_dataset().tensors[0]
    for number, (weight, bias) in enumerate(layers):
        wanted = torch.nn.functional.linear(wanted.relu() if number else wanted, weight, bias)
    assert len(rows) == 102
    given = torch.tensor([[float(cell) for cell in row] for row in rows])
    assert torch.allclose(given, wanted, rtol=1e-5)
    assert not torch.allclose(given, wanted.flip(0), rtol=1e-5)


def test_debug_takes_one_batch_of_everything(tmp_path):
    summary = done(tmp_path, "recipe=boston", "experiment=debug", "data.batch_size=16")
    assert (summary["epochs"], summary["steps"]) == (1, 1)
    assert {"train/loss", "val/loss"} <= summary["metrics"].keys()
    tables = csv.DictReader((tmp_path / "metrics.csv").open())
    assert any(row["step/loss"] for row in tables)


def test_overfit_brings_the_loss_of_one_batch_down_and_validates_once(tmp_path):
    summary = done(tmp_path, "recipe=boston", "experiment=overfit", "data.batch_size=16")
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    losses = [float(row["train/loss"]) for row in rows]
    assert (summary["steps"], len(losses)) == (100, 100)
    assert losses[-1] < losses[0] / 100
    assert losses[-10:] == sorted(losses[-10:], reverse=True)  # of one and the same batch
    assert [int(row["step"]) for row in rows if row["val/loss"]] == [100]


def test_the_words_best_and_last_name_no_run_of_debug_or_overfit(tmp_path):
    """Not even of one in which the checkpoint's keys are typed; a test reads all rows."""
    line = ["recipe=boston", "logger=none", "callbacks.checkpoint.keep=2"]
    short = "trainer.max_epochs=1"
    runs = [[], ["experiment=debug"], ["experiment=overfit"]]
    lines = [
        [*line, short, *run, f"hydra.run.dir=outputs/boston/{n}"] for n, run in enumerate(runs)
    ]
    lines += [["recipe=boston", "mode=test", "checkpoint=best"]]
    lines += [["recipe=boston", "resume=last", "trainer.max_epochs=2"]]
    *trained, tested, resumed = attempts(lines, tmp_path)
    assert [each.code for each in (*trained, tested, resumed)] == [0] * 5, tested.err + resumed.err
    assert "checkpoint  outputs/boston/0/checkpoints/best.ckpt, step " in tested.out
    assert "resume=last is outputs/boston/0/checkpoints/" in resumed.out
    assert not [*tmp_path.glob("outputs/boston/[12]/checkpoints")]


# shapes

IN_MODEL = "\tIn Model: input size torch.Size([{0}, 5]) output size torch.Size([{0}, 2])"
OUTSIDE = "Outside: input size torch.Size([{0}, 5]) output_size torch.Size([{0}, 2])"
TABLE = {
    1: ([30], [10]),
    2: ([15, 15], [5, 5]),
    3: ([10, 10, 10], [4, 4, 2]),
    4: ([8, 8, 8, 6], [3, 3, 3, 1]),
    8: ([4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2]),
}


def table(replicas: int) -> list[str]:
    """Three batches of 30 rows, then one of 10."""
    whole, rest = TABLE[replicas]
    batches = [whole, whole, whole, rest]
    return [
        line
        for shares in batches
        for line in [*(IN_MODEL.format(rows) for rows in shares), OUTSIDE.format(sum(shares))]
    ]


def shown(text: str) -> list[str]:
    return [line for line in text.splitlines() if "size" in line]


@pytest.mark.parametrize("replicas", TABLE)
def test_shapes_prints_what_each_replica_of_data_parallel_gets(tmp_path, capsys, replicas):
    done(tmp_path, "recipe=shapes", "strategy=data_parallel", f"trainer.gpus={replicas}")
    assert shown(capsys.readouterr().out) == table(replicas)


def test_shapes_prints_the_same_on_four_ranks_of_ddp(tmp_path):
    overrides = ["recipe=shapes", "strategy=ddp", "trainer.gpus=4", f"hydra.run.dir={tmp_path}"]
    ran = forked.run(overrides, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert shown(ran.stdout) == table(4)
    header, *rows = read(tmp_path / "predictions.csv")
    assert header == [*(f"input_{n}" for n in range(5)), "output_0", "output_1"]
    assert len(rows) == 100


# lenet


def test_lenet_learns_the_digits_and_reports_its_speed(tmp_path, capsys):
    summary = done(tmp_path, "recipe=lenet", "trainer.max_epochs=4", "callbacks.progress=null")
    assert summary["metrics"]["val/accuracy"] > 0.9
    accuracy = f"{summary['metrics']['val/accuracy']:.3f}"
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith("accuracy")]
    assert len(said) == 1
    assert re.fullmatch(rf"accuracy {accuracy}, \d+\.\d\d seconds an epoch on \S+", said[0])


# Predictions of other kinds


class Ragged(Task):
    """As many numbers a row as its index says."""

    def predict_step(self, batch: Any) -> Any:
        return [torch.arange(int(row[0].abs() * 5)) for row in batch[0]]


class Named(Task):
    def predict_step(self, batch: Any) -> Any:
        return {"name": [f"row {float(row[0]):.3f}" for row in batch[0]], "sum": batch[0].sum(1)}


class Numpy(Task):
    def predict_step(self, batch: Any) -> Any:
        return batch[0].numpy()[:, :2], {"nested": batch[0].numpy()[:, :, None]}


class Unkept(Task):
    def predict_step(self, batch: Any) -> Any:
        return {"where": [Path("here") for _ in batch[0]]}


def predicted(tmp_path: Path, task: type[Task]) -> Path:
    where = f"task._target_={__name__}.{task.__name__}"
    done(tmp_path, "recipe=shapes", where, "~task.net", "data.features=5", "callbacks.shapes=null")
    (path,) = tmp_path.glob("predictions.*")
    return path


def test_ragged_predictions_and_numpy_arrays_are_kept_as_tensors(tmp_path):
    path = predicted(tmp_path / "ragged", Ragged)
    assert path.name == "predictions.pt"
    rows = torch.load(path, weights_only=True)
    assert len(rows) == 100
    assert len({len(row) for row in rows}) > 1
    kept = torch.load(predicted(tmp_path / "numpy", Numpy), weights_only=True)
    assert kept[0].shape == (100, 2)


def test_text_beside_numbers_is_a_table(tmp_path):
    header, *rows = read(predicted(tmp_path, Named))
    assert header == ["name", "sum"]
    assert len(rows) == 100
    assert all(name.startswith("row ") and float(number) for name, number in rows)


def test_predictions_that_could_not_be_loaded_again_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"^predict_step returned a \w*Path; return tensors, numb"):
        predicted(tmp_path, Unkept)
