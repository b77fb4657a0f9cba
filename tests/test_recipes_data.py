"""The recipes' data and networks, without a Trainer: splits, files good and bad, sizes."""

import gzip
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dpframe
from dpframe.recipes import boston, lenet, shapes
from dpframe.recipes.boston import Boston, BostonData
from dpframe.recipes.lenet import LeNet, LeNetData, ReportSpeed
from dpframe.recipes.shapes import PrintShapes, Shapes, ShapesData

HEADER = boston.HEADER
ROW = "0.1,18,2.31,0,0.538,6.575,65.2,4.09,1,296,15.3,396.9,4.98,24"


def ready(data):
    data.setup()
    return data


def stacked(*datasets):
    return torch.cat([torch.cat(dataset.tensors, dim=1) for dataset in datasets])


def sorted_rows(table):
    return torch.tensor(sorted(table.tolist()))


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


def test_boston_split_holds_every_row_of_the_file_once():
    data = ready(BostonData(normalize=False))
    table = boston.read_table(boston.PACKAGED_FILE).float()
    parts = stacked(data.train_dataset(), data.val_dataset())
    assert torch.equal(sorted_rows(parts), sorted_rows(table))


@pytest.mark.parametrize("kind", [BostonData, LeNetData, ShapesData])
def test_the_rows_of_a_recipe_are_the_same_whatever_the_runs_seed(kind):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = ready(kind()).predict_dataset().tensors
    assert torch.equal(torch.get_rng_state(), state), "the run's own generator was drawn from"
    torch.manual_seed(2)
    second = ready(kind()).predict_dataset().tensors
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_boston_split_follows_its_own_seed():
    first = ready(BostonData()).train_dataset().tensors
    other = ready(BostonData(split_seed=1)).train_dataset().tensors
    assert not torch.equal(first[1], other[1])


def test_boston_statistics_come_from_the_training_rows_alone():
    data = ready(BostonData())
    features = data.train_dataset().tensors[0].double()
    assert torch.allclose(features.mean(0), torch.zeros(13, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(features.std(0, correction=0), torch.ones(13, dtype=torch.float64))
    raw = ready(BostonData(normalize=False))
    train = raw.train_dataset().tensors[0].double()
    held_out = raw.test_dataset().tensors[0].double()
    expected = (held_out - train.mean(0)) / train.std(0, correction=0)
    assert torch.allclose(data.test_dataset().tensors[0].double(), expected, atol=1e-5)


def test_boston_target_is_never_normalised():
    normalized, raw = ready(BostonData()), ready(BostonData(normalize=False))
    assert torch.equal(normalized.train_dataset().tensors[1], raw.train_dataset().tensors[1])
    assert raw.train_dataset().tensors[1].max() == 50


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


def test_a_csv_with_too_few_rows_is_refused(tmp_path):
    for lines, count in (((HEADER,), 0), ((HEADER, ROW), 1)):
        said = message(boston.read_table, write_table(tmp_path, *lines))
        assert said.endswith(f"has {count} rows; a split needs at least 2")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xff\xfe\x00\x01")
    assert message(boston.read_table, path).startswith(f"{path} is not a CSV text file: ")


# Shapes


def test_shapes_data_is_100_rows_of_5_in_batches_of_30():
    assert ready(ShapesData()).predict_dataset().tensors[0].shape == (100, 5)
    assert (ShapesData().batch_size, ShapesData().shuffle) == (30, False)


def test_shapes_are_printed_a_line_a_replica_then_a_line_a_batch(capsys):
    task = Shapes(nn.Linear(5, 2))
    batches = [
        [task.predict_step((share,)) for share in rows.chunk(4)]
        for (rows,) in (ShapesData().predict_dataset()[:30], ShapesData().predict_dataset()[90:])
    ]
    PrintShapes().on_predict_end(None, SimpleNamespace(batches=batches))
    inside = "\tIn Model: input size torch.Size([{0}, 5]) output size torch.Size([{0}, 2])"
    outside = "Outside: input size torch.Size([{0}, 5]) output_size torch.Size([{0}, 2])"
    assert capsys.readouterr().out.splitlines() == [
        *(inside.format(rows) for rows in (8, 8, 8, 6)),
        outside.format(30),
        *(inside.format(rows) for rows in (3, 3, 3, 1)),
        outside.format(10),
    ]


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
        (LABELS, b"\0\0\x08\x01", "4 bytes, less than its 8-byte header"),
        (IMAGES, b"<!DOCTYPE html><html>", "it starts with 0x3c21444f, not 0x00000803"),
        (LABELS, images_of(3), "it starts with 0x00000803, not 0x00000801"),
        (IMAGES, images_of(3)[:-1], "2367 bytes, not the 2368 its header promises"),
        (IMAGES, images_of(3) + b"\0", "2369 bytes, not the 2368 its header promises"),
        (IMAGES, idx((0, 28, 28), ()), "it holds nothing"),
        (IMAGES, images_of(3, side=8), "its images are 8x8, not 28x28"),
        (LABELS, idx((2,), (0, 1)), f"2 labels for the 3 images of {IMAGES}"),
        (LABELS, idx((3,), (0, 10, 255)), "label 10 at position 1 is not 0 to 9"),
        (LABELS, idx((3,), (0, 1, 10)), "label 10 at position 2 is not 0 to 9"),
        (IMAGES, gzip.compress(images_of(3), mtime=0)[:10] + b"\xff" * 40, "gzip says: "),
        (IMAGES, gzip.compress(images_of(3), mtime=0)[:-20], "gzip says: "),
        (IMAGES, b"\x1f\x8b" + b"\xff" * 40, "gzip says: "),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(fashion, name, content, said):
    (fashion / name).write_bytes(content)
    told = message(LeNetData(root=str(fashion)).setup)
    assert told.startswith(f"{fashion / name} is damaged: {said}")
    assert told.endswith(lenet.FASHION_SOURCE)


def test_one_flipped_bit_in_a_zipped_file_is_noticed(fashion):
    zipped(fashion)
    path = fashion / f"{IMAGES}.gz"
    content = bytearray(path.read_bytes())
    content[-6] ^= 1  # in its checksum
    path.write_bytes(content)
    assert message(LeNetData(root=str(fashion)).setup).startswith(f"{path} is damaged: gzip says")


def a_trainer(*, is_main=True, **metrics):
    strategy = SimpleNamespace(is_main=is_main, devices=["cuda:0", "cuda:1"])
    return SimpleNamespace(strategy=strategy, metrics=metrics)


def report(trainer, epochs):
    callback = ReportSpeed()
    callback.on_fit_start(trainer)
    for _ in range(epochs):
        callback.on_epoch_start(trainer)
        callback.on_epoch_end(trainer)
    callback.on_fit_end(trainer)


def test_speed_is_reported_once_by_the_main_process(capsys):
    report(a_trainer(**{"val/accuracy": 0.9128}), epochs=2)
    line = r"accuracy 0\.913, \d+\.\d\d seconds an epoch on cuda:0, cuda:1\n"
    assert re.fullmatch(line, capsys.readouterr().out)
    report(a_trainer(is_main=False), epochs=2)
    report(a_trainer(), epochs=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("module", [boston, lenet])
def test_packaged_data_lies_beside_its_recipe(module):
    assert Path(module.__file__).parent / "data" == module.PACKAGED_FILE.parent
    assert module.PACKAGED_FILE.is_file()


@pytest.mark.parametrize("module", [boston, lenet, shapes])
def test_a_recipe_has_one_task_and_one_data_module(module):
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    assert sum(issubclass(kind, dpframe.Task) for kind in own) == 1
    assert sum(issubclass(kind, dpframe.DataModule) for kind in own) == 1
