"""Runs of the command: what `resume=` goes on with, what full disks and moves leave."""

import csv
import io
import json
import logging
import os
import re
import resource
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attempted import Attempt, attempted
from command import attempts, write
from forked import fresh, started

from dpframe import checkpoint
from dpframe.checkpoint import seal
from dpframe.config.earlier_run import resumed_file
from dpframe.errors import Failure
from dpframe.modes.directory import Directory
from dpframe.modes.output import logging_to
from dpframe.trainer.predictions import Predictions

BOSTON = ["recipe=boston", "logger=csv", "hydra.run.dir=run"]
START = [*BOSTON, "trainer.max_epochs=2", "task.optimizer.lr=0.02", "callbacks.checkpoint.keep=2"]
RESUMED = {  # one line after the other
    "start": START,
    "again": ["resume=run", "trainer.max_epochs=3"],
    "differs": ["resume=run", "data.batch_size=64", "task.optimizer.lr=0.5"],
    "anyway": ["resume=run", "trainer.max_epochs=4", "task.optimizer.lr=0.5", "resume_anyway=true"],
    "after": ["resume=run", "trainer.max_epochs=5"],
    "file": ["resume=run/checkpoints/best.ckpt", "trainer.max_epochs=6", "resume_anyway=true"],
    "nowhere": ["resume=nowhere"],
    "last": ["resume=last", "recipe=lenet"],
    "test": ["recipe=boston", "mode=test", "checkpoint=run/checkpoints/best.ckpt"],
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("resumed")
    return directory, dict(zip(RESUMED, attempts([*RESUMED.values()], directory), strict=True))


def test_a_resume_needs_no_override_again_and_goes_on_in_the_same_directory(resumed):
    _, done = resumed
    for name, said in {
        "start": "epoch 2/2",
        "again": "resumed at epoch 2, step 8",
        "after": "epoch 5/5",
        "file": "epoch 6/6",
        "test": "test/loss",
    }.items():
        assert done[name].code == 0 and said in done[name].out, (name, done[name])
    assert "epoch 3/3  step 12" in done["again"].out
    assert done["file"].files == ["run"]


def test_what_can_not_go_on_exactly_is_refused_with_all_that_differs(resumed):
    assert {name: (one.code, one.err) for name, one in resumed[1].items() if one.code} == {
        "differs": (
            2,
            "dpframe: resume: this run differs from the one that it would continue: "
            "task.optimizer.lr=0.02 there, 0.5 here; data.batch_size=128 there, 64 here; "
            "set back what has changed, or set resume_anyway=true\n",
        ),
        "nowhere": (
            2,
            "dpframe: resume=nowhere: there is no such file; use resume=last, of the newest run, "
            "or a run's directory, or a checkpoint\n",
        ),
        "last": (
            2,
            "dpframe: resume=last: there is no run with a checkpoint in outputs/lenet\n",
        ),
    }


def ended_meanwhile(line: list[str], late: dict[str, bytes]) -> Attempt:
    """The run that is resumed saves its last checkpoint when this one has read the one before."""
    make = Directory.make

    def made(self: Directory, notes: Any) -> str:
        for name, content in late.items():
            (self.path / "checkpoints" / name).write_bytes(content)
        return make(self, notes)

    with patch.object(Directory, "make", made):
        return attempted([line])[0]


@pytest.mark.parametrize("start", ["run", "run/checkpoints/last.ckpt", "last"])
def test_a_resume_goes_on_from_what_a_run_has_saved_until_its_directory_was_free(
    resumed, tmp_path, start
):
    folder = tmp_path / "outputs/boston" if start == "last" else tmp_path
    shutil.copytree(resumed[0] / "run", folder / "run")
    last = folder / "run/checkpoints/last.ckpt"
    late, end = {"last.ckpt": last.read_bytes()}, seal.step_of(last)
    step, older = min((seal.step_of(path), path) for path in last.parent.glob("*.ckpt"))
    older.replace(last)
    for path in set(last.parent.iterdir()) - {last}:
        path.unlink()
    line = [f"resume={start}", "recipe=boston", "trainer.max_epochs=9", "resume_anyway=true"]
    done = fresh(ended_meanwhile, line, late, folder=tmp_path)
    assert done.code == 0, done.err
    assert step < end and f"step {end}\n" in done.out and f", step {step}\n" not in done.out
    assert json.loads((folder / "run/summary.json").read_text())["steps"] == 36


def test_the_same_command_again_after_a_kill_before_the_first_checkpoint_has_each_step_once(
    tmp_path,
):
    line = [*BOSTON, "callbacks.checkpoint=null", "trainer.log_every=1"]
    attempts([[*line, "trainer.max_steps=3"]], tmp_path)
    (tmp_path / "run/summary.json").unlink()  # as a kill leaves it
    (again,) = attempts([[*line, "trainer.max_steps=5"]], tmp_path)
    assert again.code == 0, again.err
    with (tmp_path / "run/metrics.csv").open() as file:
        steps = [row["step"] for row in csv.DictReader(file)]
    assert steps == ["1", "2", "3", "4", "5"]


def test_resume_anyway_goes_on_with_the_new_learning_rate_and_draws_every_step_once(resumed):
    directory, done = resumed
    assert "not all is as it was: task.optimizer.lr=0.02 there, 0.5 here" in done["anyway"].out
    with (directory / "run" / "metrics.csv").open() as file:
        curve = {int(row["step"]): row["progress/lr"] for row in csv.DictReader(file)}
    assert list(curve) == [4, 8, 12, 16, 20, 24]
    assert list(curve.values())[:4] == ["0.02", "0.02", "0.02", "0.5"]
    assert set(list(curve.values())[4:]) == {"0.5"}  # from then on that is the run's rate


def test_the_configs_of_a_runs_earlier_parts_stay_beside_the_last_one(resumed):
    notes = resumed[0] / "run" / ".hydra"
    names = ("config-1.yaml", "config-3.yaml", "config.yaml")
    assert ["lr: 0.02" in (notes / name).read_text() for name in names] == [True, False, False]


def test_a_refused_resume_changes_nothing_in_the_run(resumed):
    directory, _ = resumed
    shutil.copytree(directory / "run", directory / "of_another_folder")
    with (directory / "of_another_folder/.hydra/overrides.yaml").open("a") as saved:
        saved.write("- trainer.of_another=3\n")
    before = contents(directory)
    lines = [
        ["resume=run", "seed=3"],
        ["resume=run", "task.net._args_=[]"],
        ["resume=run", "x=1"],
        ["resume=of_another_folder"],
        [*START, "seed=1"],
    ]
    done = attempts(lines, directory)
    assert [one.code for one in done] == [2] * 5
    assert contents(directory) == before
    assert done[3].err.startswith("dpframe: trainer.of_another=3: there is no key")
    assert done[3].err.endswith(
        " (an override that the run was started with; if that had a --config-dir, pass it again)\n"
    )
    assert done[4].err == (
        "dpframe: the run directory run has the checkpoints of another run; continue it with "
        "resume=run, or name another by hydra.run.dir=DIR\n"
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_damaged_last_ckpt_is_told_and_the_newest_good_one_is_taken(resumed, tmp_path):
    shutil.copytree(resumed[0] / "run", tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    lines = [["resume=run/checkpoints/last.ckpt"], ["resume=run", "resume_anyway=true"]]
    by_file, by_run = attempts(lines, tmp_path)
    good = r"run/checkpoints/(best|epoch\d{4}-step\d+)\.ckpt"
    assert by_file.code == 2
    assert re.search(f"; the newest good one there is {good}\n$", by_file.err)
    assert by_run.code == 0, by_run.err
    assert re.fullmatch(
        "dpframe: run/checkpoints/last.ckpt: it has no checksum: truncated, or not written by "
        f"dpframe; resuming from {good}\n",
        by_run.err,
    )
    assert "resumed at epoch" in by_run.out


def saved_in_turn(folder: Path, steps: dict[str, int]) -> None:
    for seconds, (file, step) in enumerate(steps.items()):
        path = folder / "checkpoints" / file
        checkpoint.save({"progress": {"epoch": 1, "global_step": step}}, path)
        os.utime(path, (seconds, seconds))


@pytest.mark.parametrize(("best_step", "name"), [(9, "best.ckpt"), (7, "last.ckpt")])
def test_a_newer_file_than_last_ckpt_is_taken_for_its_steps_and_not_for_a_copys_time(
    tmp_path, capsys, best_step, name
):
    saved_in_turn(tmp_path, {"last.ckpt": 8, "best.ckpt": best_step})
    assert resumed_file(str(tmp_path), tmp_path).name == name
    assert capsys.readouterr().err == ""


def test_without_a_whole_last_ckpt_the_most_steps_are_taken_whatever_a_copys_times(tmp_path):
    saved_in_turn(tmp_path, {"epoch0002-step8.ckpt": 8, "last.ckpt": 9, "best.ckpt": 4})
    last = tmp_path / "checkpoints/last.ckpt"
    last.write_bytes(last.read_bytes()[:-10])
    assert resumed_file(str(tmp_path), tmp_path).name == "epoch0002-step8.ckpt"


def test_a_link_to_nowhere_among_the_checkpoints_is_passed_over(tmp_path):
    checkpoint.save({}, last := tmp_path / "run" / "checkpoints" / "last.ckpt")
    (last.parent / "old.ckpt").symlink_to(tmp_path / "nowhere")
    assert resumed_file("last", tmp_path) == resumed_file(str(tmp_path / "run"), tmp_path) == last


# What happens to the directory meanwhile


def test_a_directory_that_another_run_is_in_is_refused_with_its_pid(tmp_path):
    line = [*BOSTON, "callbacks.checkpoint=null"]
    with started([*line, "trainer.max_epochs=1000000"], tmp_path) as other:
        other.wait_for("run/run.log")
        (refused,) = attempts([line], tmp_path)
        assert refused.code == 2
        assert f"run directory run is in use by process {other.pid} on " in refused.err
        assert refused.err.count("\n") == 1
    (done,) = attempts([[*line, "trainer.max_epochs=1"]], tmp_path)  # the lock went with it
    assert done.code == 0, done.err


CALLBACKS = """
import os, shutil, time, dpframe

class Deletes(dpframe.Callback):
    def on_epoch_end(self, trainer):
        if trainer.epoch == 1:
            shutil.rmtree(trainer.run.directory)

class Asks(dpframe.Callback):
    def on_fit_start(self, trainer):
        assert type(trainer) is dpframe.Trainer

class Moves(dpframe.Callback):
    def on_epoch_end(self, trainer):
        checkpoints = os.path.join(trainer.run.directory, "checkpoints")
        if trainer.epoch == 2:
            os.rename(trainer.run.directory, "moved")
        if trainer.epoch == 4:
            while not os.path.exists(checkpoints):
                time.sleep(0.01)  # another thread writes
            os.rename(checkpoints, "gone")
"""


def after_five_epochs_with(callback, folder):
    write(folder, {"own.py": CALLBACKS})
    more = [f"+callbacks.own._target_=own.{callback}", "callbacks.checkpoint.seconds_between=0"]
    (done,) = attempts([[*BOSTON, *more, "trainer.max_epochs=5"]], folder)
    assert done.code == 0, done.err
    assert checkpoint.load(folder / "run/checkpoints/last.ckpt")["progress"]["epoch"] == 5
    return done, json.loads((folder / "run/summary.json").read_text())


def test_a_run_directory_that_is_deleted_meanwhile_is_made_again(tmp_path):
    _, summary = after_five_epochs_with("Deletes", tmp_path)
    assert summary["epochs"] == 5


def test_a_run_that_is_moved_or_loses_its_checkpoints_meanwhile_ends_with_them(tmp_path):
    done, summary = after_five_epochs_with("Moves", tmp_path)
    assert "run was moved or deleted; what is saved goes on there" in done.out
    assert (tmp_path / summary["checkpoint"]).is_file()


def test_hooks_have_the_trainer_that_programs_make(tmp_path):
    after_five_epochs_with("Asks", tmp_path)


def on_small_disk(bytes_left, call, *args):
    """No file may grow past a limit, as if there were no room left."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, most))
    return call(*args)


@pytest.mark.parametrize(
    "bytes_left, code, said",
    [
        (16_000, 1, "dpframe: the checkpoint run/checkpoints/best.ckpt can't be written: File too"),
        (1_500, 2, "dpframe: the run directory run can't be made: File too large; name another"),
    ],
)
def test_a_full_disk_is_one_line(tmp_path, bytes_left, code, said):
    line = [*BOSTON, "trainer.max_epochs=3"]
    (done,) = fresh(on_small_disk, bytes_left, attempted, [line], folder=tmp_path)
    assert (done.code, done.err.count("\n")) == (code, 1)
    assert done.err.startswith(said)
    assert not list(tmp_path.rglob("*.part"))
    assert (tmp_path / "run").exists() == (code == 1)


def test_a_full_disk_for_the_log_and_the_dashboard_does_not_stop_training(tmp_path):
    line = ["recipe=boston", "callbacks.checkpoint=null", "trainer.max_epochs=40"]
    (done,) = fresh(on_small_disk, 4000, attempted, [line], folder=tmp_path)
    assert done.code == 0, done.err
    assert "training goes on without it" in done.out and "epoch 40/40" in done.out
    assert "Traceback" not in done.err + done.out


def test_the_line_that_a_full_disk_refuses_is_still_shown_on_screen(tmp_path):
    shown = fresh(on_small_disk, 300, logged_lines, tmp_path)
    assert [line for line in shown if line.startswith("line")] == [f"line {i}" for i in range(9)]
    assert sum("training goes on without it" in line for line in shown) == 1


def logged_lines(folder):
    with redirect_stdout(io.StringIO()) as screen, logging_to(folder, rank=0):
        for i in range(9):
            logging.getLogger("dpframe").info("line %d", i)
    return screen.getvalue().splitlines()


@pytest.mark.parametrize("columns, name", [((1,), "predictions.csv"), ((2, 2), "predictions.pt")])
def test_a_full_disk_at_predict_is_one_line(tmp_path, columns, name):
    with pytest.raises(Failure, match=f"{name} can't be written: File too large"):
        fresh(on_small_disk, 1000, save_predictions, columns, tmp_path)
    assert list(tmp_path.iterdir()) == []


def save_predictions(columns, folder):
    Predictions([[torch.ones(5000, *columns)]]).save(folder)
