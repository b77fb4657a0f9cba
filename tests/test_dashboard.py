"""The real TensorBoard, in a real browser, shows what a run has logged."""

import pytest
from browser import CHROMIUM, chromium, tensorboard
from command import dpframe

CALLBACKS = "callbacks=[graph,pr_curve,sample_predictions]"
PLUGINS = ("scalars", "hparams", "images", "pr_curves", "graphs")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium, e.g. of apt install chromium")
def test_tensorboard_shows_a_runs_results_its_pictures_and_its_model(tmp_path):
    words = ["recipe=lenet", "experiment=debug", CALLBACKS, "callbacks.pr_curve.activation=softmax"]
    with tensorboard("run", tmp_path) as when_it_shows, chromium(tmp_path) as page:
        done = dpframe(*words, f"hydra.run.dir={tmp_path}/run", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        address = when_it_shows(*PLUGINS)

        page.open(f"{address}#hparams")
        columns = page.wait_for("has(texts('.table-header'), 'progress/lr')")
        assert "data.batch_size" in columns
        assert page.wait_for("has(texts('.table-cell'), '64.000')")

        page.open(f"{address}#scalars&tagFilter=train|val")
        names = page.wait_for("has(texts('.heading-label.name'), 'val/loss')")
        assert names[:4] == ["train/accuracy", "train/loss", "val/accuracy", "val/loss"]

        page.open(f"{address}#images")
        side = page.wait_for("shown('img').map(each => each.naturalWidth)[0]")
        assert side == 3 * 28  # eight digits in rows of three

        page.open(f"{address}#pr_curves")
        names = page.wait_for("has(texts('.heading-label.name'), 'val/pr_curve/9')")
        assert names == [f"val/pr_curve/{digit}" for digit in range(10)]

        page.open(f"{address}#graphs")
        nodes = page.wait_for("has(shown('g.node').map(each => each.dataset.name), 'LeNet')")
        assert nodes == ["input", "output", "LeNet"]
