"""`resume=` on the command line: which checkpoint, which config, which directory."""

import csv
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import attempts, dpframe, environment

from dpframe import checkpoint
from dpframe.cli.resume import resumed_file
from dpframe.errors import Failure
from dpframe.trainer.evaluation import Predictions

BOSTON = ["recipe=boston", "logger=csv", "hydra.run.dir=run"]
START = [*BOSTON, "trainer.max_epochs=2", "task.optimizer.lr=0.02", "callbacks.checkpoint.keep=2"]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> tuple[Path, list]:
    """A run, then what is typed to go on with it, one line after the other."""
    directory = tmp_path_factory.mktemp("resumed")
    lines = [
        START,
        ["resume=run", "trainer.max_epochs=3"],
        ["resume=run", "data.batch_size=64", "task.optimizer.lr=0.5"],
        ["resume=run", "trainer.max_epochs=4", "task.optimizer.lr=0.5", "resume_anyway=true"],
        ["resume=run", "trainer.max_epochs=5"],
        ["resume=run/checkpoints/best.ckpt", "trainer.max_epochs=6", "resume_anyway=true"],
        ["resume=nowhere"],
        ["resume=last", "recipe=lenet"],
        ["recipe=boston", "mode=test", "checkpoint=run/checkpoints/best.ckpt"],
    ]
    done = attempts(lines, directory)
    return directory, done


def test_a_resume_needs_no_override_again_and_goes_on_in_the_same_directory(resumed):
    directory, (started, again, *_) = resumed
    assert (started.code, again.code) == (0, 0), again.err
    assert "resumed at epoch 2, step 8" in again.out
    assert "epoch 3/3  step 12" in again.out
    assert again.files == ["outputs", "run"] or again.files == ["run"]


def test_what_can_not_go_on_exactly_is_refused_with_all_that_differs(resumed):
    refused = resumed[1][2]
    assert refused.code == 2
    assert refused.err == (
        "dpframe: resume: this run differs from the one that it would continue: "
        "task.optimizer.lr=0.02 there, 0.5 here; data.batch_size=128 there, 64 here; "
        "set back what has changed, or set resume_anyway=true\n"
    )


def test_resume_anyway_goes_on_with_the_new_learning_rate_and_says_so(resumed):
    directory, done = resumed
    assert done[3].code == 0, done[3].err
    assert "not all is as it was: task.optimizer.lr=0.02 there, 0.5 here" in done[3].out
    with (directory / "run" / "metrics.csv").open() as file:
        rates = [row["progress/lr"] for row in csv.DictReader(file)]
    assert rates[:4] == ["0.02", "0.02", "0.02", "0.5"]
    assert done[4].code == 0, done[4].err  # and from then on that is the run's rate
    assert rates[4:] == ["0.5"] * len(rates[4:])


def test_the_configs_of_a_runs_earlier_parts_stay_beside_the_last_one(resumed):
    notes = resumed[0] / "run" / ".hydra"
    texts = [
        (notes / name).read_text() for name in ("config-1.yaml", "config-3.yaml", "config.yaml")
    ]
    assert ["lr: 0.02" in text for text in texts] == [True, False, False]


def test_a_file_is_resumed_in_its_own_run(resumed):
    assert resumed[1][5].code == 0, resumed[1][5].err
    assert "epoch 6/6" in resumed[1][5].out


def test_what_is_not_there_is_one_line(resumed):
    _, done = resumed
    assert [one.code for one in done[6:8]] == [2, 2]
    assert done[6].err == "dpframe: resume=nowhere: there is no such file\n"
    assert (
        done[7].err == "dpframe: resume=last: there is no run with a checkpoint in outputs/lenet\n"
    )


def test_the_weights_of_a_resumed_run_are_tested_like_any_others(resumed):
    assert resumed[1][8].code == 0
    assert "test/loss" in resumed[1][8].out


def test_the_curve_of_a_resumed_run_has_every_step_once(resumed):
    with (resumed[0] / "run" / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == [4, 8, 12, 16, 20, 24]


def damaged(directory: Path, lines: list[list[str]]) -> list:
    """After three epochs, last.ckpt loses its end."""
    attempts([[*START, "trainer.max_epochs=3"]], directory)
    last = directory / "run" / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    return attempts(lines, directory)


def test_a_damaged_last_ckpt_is_told_and_the_newest_good_one_is_taken(tmp_path):
    files = ["resume=run/checkpoints/last.ckpt"]
    by_file, by_run = damaged(tmp_path, [files, ["resume=run"]])
    good = r"run/checkpoints/(best|epoch0003-step12)\.ckpt"  # the same state, in two files
    assert by_file.code == 2
    assert re.search(f"; the newest good one there is {good}\n$", by_file.err)
    assert by_run.code == 0, by_run.err
    assert re.fullmatch(
        "dpframe: run/checkpoints/last.ckpt: its seal is missing: it is cut short, or no "
        f"checkpoint of dpframe's; resuming from {good}\n",
        by_run.err,
    )
    assert "resumed at epoch 3, step 12" in by_run.out


@pytest.mark.parametrize(("best_step", "name"), [(9, "best.ckpt"), (7, "last.ckpt")])
def test_a_newer_file_than_last_ckpt_is_taken_for_its_steps_and_not_for_a_copys_time(
    tmp_path, capsys, best_step, name
):
    for seconds, (file, step) in enumerate({"last.ckpt": 8, "best.ckpt": best_step}.items()):
        path = tmp_path / "checkpoints" / file
        checkpoint.save({"progress": {"epoch": 1, "global_step": step}}, path)
        os.utime(path, (seconds, seconds))
    assert resumed_file(str(tmp_path), tmp_path).name == name
    assert capsys.readouterr().err == ""


def test_a_link_to_nowhere_among_the_checkpoints_is_passed_over(tmp_path):
    checkpoint.save({}, last := tmp_path / "run" / "checkpoints" / "last.ckpt")
    (last.parent / "old.ckpt").symlink_to(tmp_path / "nowhere")
    assert resumed_file("last", tmp_path) == resumed_file(str(tmp_path / "run"), tmp_path) == last


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> tuple[dict[str, bytes], dict[str, bytes], list]:
    """A run's files before and after what is refused, and the refusals."""
    directory = tmp_path_factory.mktemp("refused")
    assert attempts([START], directory)[0].code == 0
    before = contents(directory)
    lines = [
        ["resume=run", "seed=3"],
        ["resume=run", "task.net._args_=[]"],
        ["resume=run", "x=1"],
        ["resume=run", "callbacks=none"],
        [*START, "seed=1"],
    ]
    done = attempts(lines, directory)
    return before, contents(directory), done


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_refused_resume_changes_nothing_in_the_run(refused):
    before, after, done = refused
    assert [one.code for one in done] == [2] * 5
    assert after == before


def test_an_override_of_the_resumed_run_that_no_longer_fits_is_told_as_such(refused):
    error = refused[2][3].err
    assert error.startswith("dpframe: callbacks.checkpoint.keep=2: there is no key")
    assert error.endswith(
        " (an override that the run was started with; if that had a --config-dir, pass it again)\n"
    )


def test_a_fresh_run_does_not_write_over_another_ones_checkpoints(refused):
    assert refused[2][4].err == (
        "dpframe: the run directory run has the checkpoints of another run; continue it with "
        "resume=run, or name another directory by hydra.run.dir=DIR\n"
    )


HOLDS = """
import sys, pathlib
from dpframe.cli.directory import Directory

directory = Directory(pathlib.Path("run"), is_given=True)
directory.make({})
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_that_another_run_is_in_is_refused_with_its_pid(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout and other.stdout.readline() == b"held\n"
        done = dpframe(*BOSTON, "trainer.max_epochs=1", cwd=tmp_path)
        assert done.returncode == 2
        assert f"run directory run is in use by process {other.pid} on " in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "run" / "checkpoints").exists()
        other.kill()  # its lock goes with it
        other.wait()
        done = dpframe(*BOSTON, "trainer.max_epochs=1", cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_a_run_directory_that_is_deleted_meanwhile_is_made_again(tmp_path):
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "deletes.py").write_text(
        "import shutil, dpframe\n"
        "class Deletes(dpframe.Callback):\n"
        "    def on_epoch_end(self, trainer):\n"
        "        if trainer.epoch == 1:\n"
        "            shutil.rmtree(trainer.run.directory)\n"
    )
    line = [*BOSTON, "trainer.max_epochs=3", "+callbacks.deletes={_target_: deletes.Deletes}"]
    (done,) = attempts([line], tmp_path)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epochs"] == 3
    assert checkpoint.load(tmp_path / "run" / "checkpoints" / "last.ckpt")["progress"]["epoch"] == 3


SMALL_DISK = """
import resource, sys
from dpframe.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    "bytes_left, code, said",
    [
        (16_000, 1, "dpframe: the checkpoint run/checkpoints/best.ckpt can't be written: File too"),
        (1_500, 2, "dpframe: the run directory run can't be made: File too large; name another"),
    ],
)
def test_a_full_disk_is_one_line(tmp_path, bytes_left, code, said):
    """No file may grow past a limit, as if there were no room left."""
    done = subprocess.run(
        [sys.executable, "-c", SMALL_DISK, str(bytes_left), *BOSTON, "trainer.max_epochs=3"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.part"))
    assert (tmp_path / "run").exists() == (code == 1)


MOVES = """
import os, time, dpframe

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


def test_a_run_that_is_moved_or_loses_its_checkpoints_meanwhile_ends_with_them(tmp_path):
    (tmp_path / "moves.py").write_text(MOVES)
    line = [*BOSTON, "trainer.max_epochs=5", "+callbacks.moves={_target_: moves.Moves}"]
    saved = "callbacks.checkpoint.seconds_between=0"
    (done,) = attempts([[*line, saved]], tmp_path)
    assert done.code == 0, done.err
    assert "run was moved or deleted; what is saved goes on there" in done.out
    assert checkpoint.load(tmp_path / "run/checkpoints/last.ckpt")["progress"]["epoch"] == 5
    named = json.loads((tmp_path / "run/summary.json").read_text())["checkpoint"]
    assert (tmp_path / named).is_file()


@pytest.mark.parametrize("columns, name", [(1, "predictions.csv"), ((2, 2), "predictions.pt")])
def test_a_full_disk_at_predict_is_one_line(tmp_path, columns, name):
    columns = (columns,) if isinstance(columns, int) else columns
    predictions = Predictions([[torch.ones(5000, *columns)]])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(Failure, match=f"{name} can't be written: File too large"):
            predictions.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_for_the_log_and_the_dashboard_does_not_stop_training(tmp_path):
    given = ["recipe=boston", "hydra.run.dir=run", "callbacks.checkpoint=null"]
    done = subprocess.run(
        [sys.executable, "-c", SMALL_DISK, "4000", *given, "trainer.max_epochs=40"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "training goes on without it" in done.stdout
    assert "epoch 40/40" in done.stdout
    assert "Traceback" not in done.stderr + done.stdout
