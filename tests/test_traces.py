"""A traceback of the user's code begins there and folds dpframe's frames; the log has them all."""

import re

import pytest
from command import attempts, dpframe, write

from dpframe import errors
from dpframe.util import traces

OWN = """
import dpframe
import dpframe.recipes.boston as b
import torch

class Bug(b.Boston):
    def training_step(self, batch):
        raise KeyError("a bug")

    def validation_step(self, batch):
        return super().validation_step(batch)

class Hook(dpframe.Callback):
    def on_step_end(self, trainer):
        {}["x"]

class Row(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        raise KeyError("a bug")

class Rows(dpframe.DataModule):
    def __init__(self, batch_size, workers, **more):
        super().__init__(batch_size, workers=workers)

    def train_dataset(self):
        return Row()

class InPlace(b.Boston):
    def training_step(self, batch):
        error = self.net(batch[0]).exp()
        error += 1
        return {"loss": error.mean()}

class AtEnd(dpframe.Callback):
    def on_validation_end(self, trainer):
        {}["x"]
"""
FOLDED = r"""Traceback \(most recent call last\):
  … \d+ frames of dpframe \(HYDRA_FULL_ERROR=1 shows them\)
  File ".*own\.py", line 11, in validation_step
    return super\(\)\.validation_step\(batch\)
[ ^]+
  … 1 frame of dpframe
  File ".*own\.py", line 8, in training_step
    raise KeyError\("a bug"\)
KeyError: 'a bug'
"""
BUG = ["recipe=boston", "task._target_=own.Bug", "logger=none"]
HOOK = ["recipe=boston", "logger=none", "hydra.run.dir=run", "+callbacks.mine._target_=own.Hook"]
RANKS = ["strategy=ddp", "trainer.gpus=2", "trainer.accelerator=cpu"]


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, {"own.py": OWN})


def test_a_traceback_begins_at_the_users_code_and_folds_dpframes_frames(folder):
    (done,) = attempts([BUG], folder)
    assert done.code == 1 and re.fullmatch(FOLDED, done.err), done.err


ROW = r"""Traceback \(most recent call last\):
  … \d+ frames of dpframe \(HYDRA_FULL_ERROR=1 shows them\)
KeyError: Caught KeyError in DataLoader worker process 0\.
Original Traceback \(most recent call last\):
  … \d+ frames of dpframe \(HYDRA_FULL_ERROR=1 shows them\)
  File ".*own\.py", line 22, in __getitem__
    raise KeyError\("a bug"\)
KeyError: 'a bug'
while reading row \d of Row
"""
UNREAD = ["data._target_=own.Rows", "data.workers=1", "trainer.share_check=off", "callbacks=none"]


def test_that_of_a_data_worker_and_of_autograd_are_too(folder):
    options = ["recipe=boston", "logger=none", "hydra.run.dir=run", "trainer.sanity_batches=0"]
    worker, graph = attempts([[*options, *UNREAD], [*options, "task._target_=own.InPlace"]], folder)
    said = worker.err[worker.err.index("Traceback") :].partition("\ndpframe: ")[0]
    assert worker.code == 1 and re.fullmatch(ROW, said), worker.err
    first, frames, error, *rest = graph.err.splitlines()
    assert re.fullmatch(r"  … \d+ frames of dpframe \(HYDRA_FULL_ERROR=1 shows them\)", frames)
    assert error.startswith("RuntimeError: one of the variables needed for gradient computation")
    assert len(rest) <= 1


def test_that_of_a_rank_is_folded_too(folder):
    done = dpframe(*BUG, *RANKS, cwd=folder)
    assert done.returncode == 1
    assert re.search(rf"^rank \d failed:\n{FOLDED}\Z", done.stderr, re.M), done.stderr


def test_hydra_full_error_shows_all_frames_of_one_process_and_of_ranks(folder):
    (one,) = attempts([BUG], folder, HYDRA_FULL_ERROR="1")
    ranks = dpframe(*BUG, *RANKS, cwd=folder, HYDRA_FULL_ERROR="1")
    for text in (one.err, ranks.stderr):
        assert "…" not in text and "in _run_rank" in text and "in training_step" in text


def test_an_error_in_a_hook_names_the_callback_and_the_log_has_all_frames(folder):
    (done,) = attempts([HOOK], folder)
    *_, said, of, where = done.err.splitlines()
    assert (done.code, said, where) == (1, "KeyError: 'x'", f"dpframe: {SAVED}")
    assert of == "KeyError in on_step_end of the callback Hook"
    assert "frames of dpframe" in done.err and "in _train_epoch" not in done.err
    assert "in _train_epoch" in (folder / "run/run.log").read_text()


def test_so_does_that_of_a_rank(folder):
    done = dpframe(*HOOK, *RANKS, cwd=folder)
    *_, said, of, where = done.stderr.splitlines()
    assert (done.returncode, said, where) == (1, "KeyError: 'x'", f"dpframe: {SAVED}")
    assert of == "KeyError in on_step_end of the callback Hook"
    assert re.search(r"^rank \d ended after it: KeyError: 'x'$", done.stderr, re.M), done.stderr
    assert "in _train_epoch" in (folder / "run/run.log").read_text()


def test_so_does_one_of_a_validation(folder):
    line = ["recipe=boston", "logger=none", "mode=validate", "checkpoint=none"]
    (done,) = attempts([[*line, "+callbacks.mine._target_=own.AtEnd"]], folder)
    assert done.err.endswith("\nKeyError in on_validation_end of the callback AtEnd\n"), done.err


def test_an_error_that_dpframe_raises_keeps_all_its_frames():
    with pytest.raises(AttributeError) as ours:
        errors.nearest(None, [])
    assert traces.shown(ours.value) == traces.whole(ours.value)
    assert "in nearest" in traces.shown(ours.value)


def test_a_cause_in_dpframe_keeps_its_frames_under_an_error_of_the_users():
    with pytest.raises(ValueError, match="mine") as mine:
        try:
            errors.nearest(None, [])
        except AttributeError as error:
            raise ValueError("mine") from error
    text = traces.shown(mine.value)
    assert "in nearest" in text and "direct cause" in text and "…" not in text


SAVED = "the run is in run; nothing was saved"
