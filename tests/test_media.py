"""More than scalars: what hooks log is checked, reaches each logger that can, and is read back."""

import io
import wave
from copy import deepcopy

import numpy as np
import pytest
import torch
from forked import on
from PIL import Image
from small import Hooks, Rows, Small, fitted, trainer
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from dpframe import Logger, UserError
from dpframe.callbacks.confusion_matrix import ConfusionMatrix
from dpframe.callbacks.graph import Graph
from dpframe.callbacks.histograms import Histograms
from dpframe.callbacks.pr_curve import PRCurve
from dpframe.callbacks.sample_predictions import SamplePredictions, name_parts
from dpframe.loggers import media
from dpframe.loggers.csv import CSV
from dpframe.loggers.formats import png
from dpframe.loggers.tensorboard import TensorBoard
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU

WHITE = torch.ones(3, 2, 4)
PLUGINS = ("images", "audio", "histograms", "text", "scalars")


# The forms


@pytest.mark.parametrize(
    "value, shape, first",
    [
        (torch.tensor([[0.5, 0.0], [0.0, 0.0]]), (2, 2, 1), [128]),
        (
            torch.tensor([[[1.0]], [[0.0]], [[1 + 5e-4]]], requires_grad=True),
            (1, 1, 3),
            [255, 0, 255],
        ),
        (WHITE.bfloat16(), (2, 4, 3), [255] * 3),
        (np.full((4, 5, 6), 7, np.uint8), (5, 6, 4), [7] * 4),
        (torch.ones(1, 2, 2, dtype=torch.bool), (2, 2, 1), [255]),
        (torch.stack([WHITE] * 5), (2 * 2, 3 * 4, 3), [255] * 3),  # a grid, two down, three across
    ],
)
def test_a_picture_becomes_rows_of_pixels(value, shape, first):
    pixels = media.image("x", value)
    assert pixels.shape == shape and pixels.dtype == np.uint8
    assert pixels[0, 0].tolist() == first


def test_a_grid_goes_from_left_to_right_and_ends_in_black():
    pixels = media.image("x", torch.arange(1, 4, dtype=torch.uint8).reshape(3, 1, 1, 1))
    assert pixels[..., 0].tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize(
    "form, values, line",
    [
        ("image", [WHITE.permute(1, 2, 0)], r"got the shape \(2, 4, 3\); put the channels first"),
        ("image", [torch.ones(2, 4, 5)], r"got the shape \(2, 4, 5\); pass \[H, W\], \[C, H, W\]"),
        ("image", [torch.ones(0, 3, 4, 4)], r"got the shape \(0, 3, 4, 4\); pass"),
        ("image", [-WHITE], r"got values from -1 to -1; scale them to 0\.\.1"),
        ("image", [WHITE * torch.nan], "got values from nan to nan; scale them"),
        ("image", [WHITE.long()], "got int64 values; pass floats from 0 to 1, or uint8"),
        ("image", ["a.png"], "got str; pass a tensor or an array of numbers"),
        ("figure", [WHITE], "got Tensor; pass a figure of matplotlib's"),
        ("histogram", [None], "got NoneType; pass a tensor or an array"),
        ("text", [3], "got int; pass text"),
        ("audio", [torch.ones(3, 9), 8000], r"got the shape \(3, 9\); pass \[samples\]"),
        ("audio", [torch.full((9,), 2.0), 8000], "got values from 2 to 2; divide them"),
        ("audio", [torch.ones(9), 0.5], "got sample_rate=0.5; pass the samples a second"),
        ("table", [["a", "b"], [[1, 2], [3]]], "has 2 columns, but row 1 has 1"),
        ("table", [["a"], [[WHITE]]], "has a Tensor in a cell; pass numbers or text"),
        ("pr_curve", [[0, 1], [0.5]], "got 2 labels, 1 scores and 1 weights; pass as many of each"),
        ("pr_curve", [[2], [0.5]], "got other labels than 0 and 1; pass those of one class"),
        ("pr_curve", [[1], [1.5]], "got values from 1.5 to 1.5; pass probabilities"),
    ],
)
def test_a_wrong_value_is_one_line(form, values, line):
    log = Hooks(on_step_end=lambda trainer: getattr(trainer, f"log_{form}")("val/x", *values))
    with pytest.raises(UserError, match=rf"trainer\.log_{form}\('val/x'\) {line}"):
        fitted(callbacks=[log], loggers=[Logger()])


def test_a_name_is_of_one_form():
    """TensorBoard shows the first of two, Weights & Biases the last."""

    def show(trainer):
        trainer.log_text("val/x", "one")
        trainer.log_image("val/x", WHITE)

    with pytest.raises(UserError, match=r"log_image\('val/x'\): there is a text with this name"):
        fitted(callbacks=[Hooks(on_step_end=show)], loggers=[Logger()])


def test_a_histogram_is_of_the_finite_values():
    values = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    assert media.histogram("x", values).tolist() == [1.0, 2.0]


def test_a_precision_recall_curve_counts_the_scores_that_reach_each_threshold():
    labels, scores = [1, 0, 1, 0, 1], torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    curve = media.pr_curve("x", labels, scores, weights=[1, 1, 2, 1, 1])
    counts = dict(zip(media.THRESHOLDS.round(4), curve.T.tolist(), strict=True))
    assert counts[0.0] == [4, 2, 0, 0]  # true and false positives, true and false negatives
    assert counts[0.5] == [3, 1, 1, 1]
    assert counts[1.0] == [1, 0, 2, 3]
    precision, recall = media.precision_recall(curve)
    assert (precision[63], recall[63]) == (0.75, 0.75)
    nothing, _ = media.precision_recall(media.pr_curve("x", [], []))
    assert not nothing.any()


def test_a_png_of_a_gradient_has_a_byte_for_fifty_of_its_pixels_which_stay():
    down, across = np.mgrid[:500, :500] // 2
    pixels = np.stack([down, across, (down + across) // 2], axis=-1).astype(np.uint8)
    before = pixels.copy()
    assert len(png(pixels)) < pixels.size / 50 and np.array_equal(pixels, before)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_has_the_pixels(channels):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)
    with Image.open(io.BytesIO(png(pixels))) as read:
        assert np.array_equal(np.asarray(read).reshape(pixels.shape), pixels)


# From the hooks to the loggers


class Drawing:
    """Stands for a figure of matplotlib's."""

    canvas = None

    def savefig(self, file, format):
        file.write(png(np.zeros((6, 8, 4), np.uint8)))


def show_all(trainer):
    if trainer.global_step in (3, 8):
        trainer.log_image("val/rows", torch.full((1, 2, 3), 0.2))
        trainer.log_figure("curve", Drawing())
        trainer.log_histogram("weights/a", torch.arange(10.0))
        trainer.log_text("said", f"step *{trainer.global_step}*")
        trainer.log_audio("tone", torch.tensor([[0.0, 0.5], [0.0, -0.5]]), 8000)
        trainer.log_table("val/worst", ["row", "guess"], [[torch.tensor(7), "a|b"], [8, None]])
        trainer.log_pr_curve("found", [1, 0], [0.9, 0.4])


def show_epoch(trainer):
    trainer.log_text("epoch", str(trainer.epoch))
    trainer.log_pr_curve("of epoch", [1, 0], [0.9, 0.4])


def shown(directory):
    """As TensorBoard's pages get it: each value is a tensor."""
    return EventAccumulator(str(directory), tensor_size_guidance=dict.fromkeys(PLUGINS, 0)).Reload()


def values(accumulator, tag):
    """By step; a text or a file is bytes."""
    events = accumulator.Tensors(tag)
    assert len({event.step for event in events}) == len(events)
    return {event.step: make_ndarray(event.tensor_proto) for event in events}


def test_what_a_hook_logs_is_read_back_once_after_a_resume(tmp_path):
    saved = {}
    show = Hooks(
        on_step_end=show_all,
        # Of the first epoch's end, the checkpoint's step, is logged before the checkpoint alone,
        # and hidden after the resume.
        on_validation_end=show_epoch,
        # And this twice: after the checkpoint, and again by the resumed run.
        on_epoch_start=lambda t: t.log_text("begun", str(t.epoch)),
    )
    keep = Hooks(on_epoch_end=lambda t: saved.update({t.epoch: deepcopy(t.state_dict())}))
    fitted(callbacks=[show, keep], loggers=[TensorBoard(), CSV()], directory=tmp_path)
    fitted(callbacks=[show], loggers=[TensorBoard(), CSV()], directory=tmp_path, resume=saved[1])
    read = shown(tmp_path)
    for tag, size in (("val/rows", (3, 2)), ("curve", (8, 6))):
        assert values(read, tag).keys() == {3, 8}
        width, height, encoded = values(read, tag)[8].tolist()
        with Image.open(io.BytesIO(encoded)) as picture:
            assert picture.size == size == (int(width), int(height))
            assert picture.convert("L").getpixel((0, 0)) == (51 if tag == "val/rows" else 0)
    histogram = values(read, "weights/a")[3]
    assert histogram[0].tolist() == [0, 9 / 64, 1]  # from, to, how many
    assert histogram[-1, 1] == 9 and histogram[:, 2].sum() == 10
    assert {s: text.item() for s, text in values(read, "said").items()} == {
        3: b"step *3*",
        8: b"step *8*",
    }
    assert {s: text.item() for s, text in values(read, "epoch").items()} == {10: b"2"}
    assert values(read, "of epoch").keys() == {10}
    assert {s: text.item() for s, text in values(read, "begun").items()} == {0: b"0", 5: b"1"}
    assert values(read, "val/worst")[8].item().decode().splitlines() == [
        "| row | guess |",
        "| --- | --- |",
        "| 7 | a\\|b |",
        "| 8 |  |",
    ]
    with wave.open(io.BytesIO(values(read, "tone")[8].ravel()[0])) as tone:
        assert (tone.getframerate(), tone.getnchannels(), tone.getnframes()) == (8000, 2, 2)
        assert np.frombuffer(tone.readframes(2), "<i2").tolist() == [0, 0, 16384, -16384]
    assert values(read, "found").keys() == {3, 8}
    assert values(read, "found")[8][:, 60].tolist() == [1, 0, 1, 0, 1, 1]
    rows = (tmp_path / "tables" / "found-step8.csv").read_text().splitlines()
    assert rows[0].startswith("threshold,true positives,") and len(rows) == 128
    assert (tmp_path / "texts" / "said-step8.txt").read_text() == "step *8*"
    assert (tmp_path / "tables" / "val_worst-step3.csv").read_text() == "row,guess\n7,a|b\n8,\n"


def test_a_figure_of_matplotlibs_is_shown_and_closed(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")

    def show(trainer):
        figure, _ = pyplot.subplots(figsize=(2, 1), dpi=50)
        trainer.log_figure("curve", figure)

    hooks = [Hooks(on_epoch_end=show)]
    for loggers in ([TensorBoard()], []):  # a rank that is not the main one has none
        fitted(callbacks=hooks, loggers=loggers, directory=tmp_path)
    assert values(shown(tmp_path), "curve")[10][:2].tolist() == [b"100", b"50"]
    assert pyplot.get_fignums() == []


def test_files_of_steps_that_come_again_are_dropped(tmp_path):
    logger = CSV()
    logger.open(str(tmp_path), config="", hparams={}, purge_step=None)
    for step in (3, 8, 9):
        logger.text("../said", "…", step=step)
    logger.open(str(tmp_path), config="", hparams={}, purge_step=8)
    kept = sorted(path.name for path in tmp_path.rglob("*.txt"))
    assert kept == ["___said-step3.txt", "___said-step8.txt"]


def test_a_logger_that_can_not_is_one_warning(caplog):
    class Failing(Logger):
        def image(self, name, pixels, *, step):
            raise OSError("no space")

    log = Hooks(on_step_end=lambda trainer: trainer.log_image("x", WHITE))
    assert fitted(callbacks=[log], loggers=[Failing()]).global_step == 10
    assert caplog.messages == ["Failing stopped: OSError: no space; training goes on without it"]


@pytest.mark.parametrize("mode", ["validate", "test", "predict"])
def test_another_mode_than_fit_logs_what_its_hooks_show_and_nothing_else(tmp_path, mode):
    hook = "on_validation_end" if mode == "validate" else f"on_{mode}_end"
    show = Hooks(**{hook: lambda trainer: trainer.log_table("rows", ["a"], [[1]])})
    for hooks in ([], [show]):
        assert list(tmp_path.iterdir()) == []
        made = trainer(callbacks=hooks, loggers=[CSV(), TensorBoard()], directory=tmp_path)
        getattr(made, mode)()
    assert (tmp_path / "tables" / "rows-step0.csv").read_text() == "a\n1\n"
    assert values(shown(tmp_path), "rows").keys() == {0}
    made.run.directory = ""
    with pytest.raises(UserError, match="CSV writes files, and nothing says where"):
        getattr(made, mode)()


# PyTorch's own writer


def test_the_writer_is_pytorchs_and_the_curves_go_on_beside_it(tmp_path):
    logger, read = TensorBoard(), shown(tmp_path)
    with pytest.raises(UserError, match="is there from on_fit_start on"):
        _ = logger.writer
    logger.open(str(tmp_path), config="a: 1", hparams={}, purge_step=None)
    logger.log({"train/loss": 1.0}, step=1)
    logger.flush()
    read.Reload()
    logger.writer.add_scalars("pair", {"one": 1.0}, 1)
    logger.writer.add_histogram("theirs", np.arange(3), 1)
    logger.flush()
    read.Reload()
    logger.log({"train/loss": 2.0}, step=2)
    logger.close({}, succeeded=True)
    assert values(read.Reload(), "train/loss") == {1: 1.0, 2: 2.0}
    assert values(read, "theirs").keys() == {1}
    assert len(list(tmp_path.glob("events*[!s]"))) == 3  # beside those of hparams


# Callbacks to switch on


class Kept(Logger):
    """Remembers what it gets: (form, name, step) and the value."""

    def __init__(self):
        self.shown = {}

    def keep(self, form, name, value, step):
        assert (form, name, step) not in self.shown
        self.shown[form, name, step] = value

    def image(self, name, pixels, *, step):
        self.keep("image", name, pixels.tolist(), step)

    def histogram(self, name, values, *, step):
        self.keep("histogram", name, values.tolist(), step)

    def table(self, name, columns, rows, *, step):
        self.keep("table", name, (columns, rows), step)

    def graph(self, module, inputs):
        self.keep("graph", type(module).__name__, tuple(module(*inputs).shape[1:]), 0)


def test_histograms_are_of_the_weights_and_gradients_of_an_update():
    kept = Kept()
    run = fitted(callbacks=[Histograms(every_n_steps=4)], loggers=[kept], max_epochs=1)
    names = [name for name, _ in run.task.named_parameters()]
    parts = ("weights", "gradients")
    expected = {(f"{part}/{name}", s) for part in parts for name in names for s in (0, 4)}
    assert {(name, step) for _, name, step in kept.shown} == expected
    before, gradient = (
        torch.tensor(kept.shown["histogram", f"{part}/net.3.bias", 4]) for part in parts
    )
    assert torch.equal(run.task.net[3].bias.detach(), before - 0.05 * gradient)


class Classes(Small):
    """Two classes, by the sign of the sum; what it predicts is random, too."""

    def training_step(self, batch):
        x, labels = batch
        logits = torch.cat([self.net(x), -self.net(x)], dim=1)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels)}

    def predict_step(self, batch):
        torch.rand(3)
        score = self.net(batch[0])
        return torch.cat([score, -score], dim=1)


class Labelled(Rows):
    def __init__(self, **options):
        super().__init__(10, batch_size=7, **options)
        for rows in (self.train, self.held_out):
            rows.tensors = rows.tensors[0], (rows.tensors[1] > 0).long()


def classified(strategy, callbacks, dropout=0.0, **settings):
    kept = Kept()
    run = fitted(
        make=lambda: Classes(dropout=dropout),
        data=Labelled(),
        callbacks=callbacks,
        loggers=[kept],
        strategy=strategy,
        precision="64",
        **settings,
    )
    return kept.shown, {name: value.tolist() for name, value in run.task.state_dict().items()}


@pytest.mark.parametrize(
    "strategy", [DataParallel(3, "cpu"), DDP(4, "cpu")], ids=["data_parallel", "ddp"]
)
def test_samples_and_confusion_are_of_the_same_rows_on_every_strategy(strategy):
    callbacks = [ConfusionMatrix(), SamplePredictions(rows=8), PRCurve("softmax"), Graph()]
    shown, weights = on(strategy, classified, callbacks)
    same, _ = on(CPU(), classified, callbacks)
    forms = {
        ("table", "val/confusion"),
        ("image", "val/confusion_shares"),
        ("table", "val/samples"),
        ("table", "val/pr_curve/0"),
        ("table", "val/pr_curve/1"),
    }
    at_steps = {(*form, step) for form in forms for step in (2, 4)}
    assert shown.keys() == {*at_steps, ("graph", "Classes", 0)}
    assert shown == same
    columns, rows = shown["table", "val/samples", 4]
    assert columns == ["batch_0", "batch_1", "predicted"]
    x, labels = Labelled().held_out.tensors
    assert [label for _, label, _ in rows] == labels[:8].tolist()
    task = Classes()
    task.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    task.double()
    scores = task.predict_step([x.double()])
    assert [first for _, _, first in rows] == [
        " ".join(str(round(number, 4)) for number in row) for row in scores[:8].tolist()
    ]
    counts = [[0, 0], [0, 0]]
    for label, guess in zip(labels.tolist(), scores.argmax(1).tolist(), strict=True):
        counts[label][guess] += 1
    chances = scores.softmax(1)[:, 1]
    for threshold, *counted in shown["table", "val/pr_curve/1", 4][1]:
        said = chances >= threshold
        true = [int((said & (labels == 1)).sum()), int((said & (labels == 0)).sum())]
        assert counted[:2] == true, threshold
    columns, rows = shown["table", "val/confusion", 4]
    assert rows == [["0", *counts[0]], ["1", *counts[1]]]
    (cell,) = np.asarray(shown["image", "val/confusion_shares", 4])[0, 0]
    assert cell == round(255 * counts[0][0] / sum(counts[0]))


def test_callbacks_that_predict_change_no_random_number_of_training():
    callbacks = [ConfusionMatrix(), SamplePredictions(), PRCurve("softmax"), Graph()]
    within_epochs = {"dropout": 0.1, "validate_every_steps": 1}
    with_them = classified(CPU(), callbacks, **within_epochs)
    assert with_them[0]["graph", "Classes", 0] == (2,)
    assert with_them[1] == classified(CPU(), [], **within_epochs)[1]


def test_a_task_that_has_no_classes_has_no_confusion_matrix():
    with pytest.raises(UserError, match=r"got labels of torch.float32 \(4,\) and predictions of t"):
        fitted(callbacks=[ConfusionMatrix()])


@pytest.mark.parametrize(
    "scores, labels, line",
    [
        ([[2.0, 0.0]], [1], r"got predictions from 0 to 2; set callbacks\.pr_curve\.activation="),
        ([[0.5, 0.5]], [[0.0]], r"got labels of torch.float32 \(1, 1\) and predictions of torch."),
        ([[7.5]], [[3.5]], "got other labels than 0 and 1; it needs batches"),
        ([[0.5, 0.5]], None, "got labels as NoneType and predictions of torch.float32"),
    ],
)
def test_a_precision_recall_curve_of_no_probabilities_is_one_line(scores, labels, line):
    labels = None if labels is None else torch.tensor(labels)
    with pytest.raises(UserError, match=rf"^callbacks\.pr_curve {line}"):
        PRCurve().count(torch.tensor(scores), labels)


def test_a_softmax_of_one_score_a_row_would_always_be_one_and_is_refused():
    with pytest.raises(UserError, match="activation=sigmoid for one score a row"):
        PRCurve("softmax").count(torch.zeros(3), torch.ones(3))


def test_a_precision_recall_curve_takes_one_label_a_row_or_one_for_each_class():
    chances = torch.tensor([[0.9, 0.1], [0.2, 0.8], [torch.nan, 1.0000001]])
    by_class = PRCurve().count(chances, torch.tensor([0, 1, -100]))
    assert by_class.sum(2).tolist() == [[1, 1], [1, 1]]
    several = PRCurve().count(chances, torch.tensor([[1, 1], [0, 1], [1, 0]]))
    assert several.sum(2).tolist() == [[1, 2], [1, 2]]
    assert several[0, 1].nonzero().flatten().tolist() == [0, 113]  # 0.9 reaches 113 / 126
    one = PRCurve("sigmoid").count(torch.zeros(3), torch.tensor([1.0, 0.0, 1.0]))
    assert one[0, :, 63].tolist() == [1, 2]


def test_a_task_is_traced_with_its_own_parts(tmp_path, caplog):
    """Without what it refuses to have, e.g. Lightning's attributes."""
    fitted(callbacks=[Graph()], loggers=[TensorBoard()], directory=tmp_path, max_steps=2)
    assert not caplog.records
    assert "Small/Sequential[net]" in str(shown(tmp_path).Graph())


def test_a_model_that_can_not_be_traced_is_one_warning(tmp_path, caplog, capsys):
    class Untraceable(Small):
        def predict_step(self, batch):
            return ["a", "b"]

    logger = TensorBoard()
    fitted(make=Untraceable, callbacks=[Graph()], loggers=[logger], directory=tmp_path, max_steps=2)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("callbacks.graph: Untraceable can't be shown: ")
    assert capsys.readouterr().out == ""
    assert values(shown(tmp_path), "train/loss")  # the logger goes on


@pytest.mark.parametrize(
    "batch, names",
    [
        ([torch.ones(2, 3), ["a", "b"]], ["x_0", "x_1"]),
        ({"ids": (torch.ones(2), torch.tensor(3)), "text": ["a"]}, ["x_ids_0", "x_text"]),
        (torch.ones(2), ["x"]),
    ],
)
def test_the_parts_of_a_batch_have_names(batch, names):
    assert [name for name, _ in name_parts("x", batch)] == names


def test_predicted_pictures_are_a_grid_from_black_to_white():
    class Pictures(Small):
        def predict_step(self, batch):
            return batch[0].reshape(-1, 3, 1, 1).expand(-1, 3, 2, 2)

    kept = Kept()
    fitted(make=Pictures, callbacks=[SamplePredictions(rows=4)], loggers=[kept], max_epochs=1)
    pixels = np.array(kept.shown["image", "val/samples/predicted", 5])
    assert pixels.shape == (4, 4, 3)
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert kept.shown["table", "val/samples", 5][0] == ["batch_0", "batch_1"]
