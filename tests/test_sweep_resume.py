"""A sweep that was interrupted or killed, or of which runs failed, is gone on with."""

import json
import os
import re
import signal
import socket
import statistics
from pathlib import Path
from typing import Any

import forked
import injector
import pytest
import torch
from command import ROOT, attempts, cold_dpframe, dpframe, launcher, write
from forked import started

from dpframe import checkpoint
from dpframe.cli.results import read_earlier

OWN = """
import os
import signal
import threading
import time
from pathlib import Path

import torch

import dpframe


class Signal(dpframe.Callback):
    '''Ctrl-C as soon as the run is done.'''

    runs_last = True

    def on_fit_end(self, trainer):
        number = os.getpid()
        path = Path(trainer.run.directory) / "summary.json"

        def wait():
            while not path.exists():
                time.sleep(0.001)
            os.kill(number, signal.SIGINT)

        threading.Thread(target=wait, daemon=True).start()


class Trouble(dpframe.Callback):
    '''What the file `trouble` says, of the run with seed 1, at the end of its second epoch.'''

    def on_epoch_end(self, trainer):
        path = Path("trouble")
        if trainer.seed != 1 or trainer.epoch != 2 or not path.exists():
            return
        kind = path.read_text()
        if kind == "bug":
            raise KeyError("a bug")
        if kind == "lost":
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        Path("there").touch()
        while kind == "wait" and trainer.placed.interruption.number is None:
            time.sleep(0.01)
"""
LINE = ("-m", "recipe=boston", "seed=0,1,2", "trainer.max_epochs=3", "logger=none")
TROUBLE = "+callbacks.trouble._target_=own.Trouble"  # typed again: a directory is data
LINE += ("callbacks.checkpoint.seconds_between=0", TROUBLE)
LINE += ("hydra.sweep.dir=swept",)
RESUME = ("-m", "sweep.resume=swept", TROUBLE)
GO_ON = "dpframe: interrupted by SIGINT; go on with sweep.resume=swept"


def folder(path: Path, trouble: str) -> Path:
    return write(path, {"own.py": OWN, "trouble": trouble})


def content(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "swept" / "sweep.json").read_text())


def statuses(directory: Path) -> list[str]:
    """As a sweep that is gone on with reads them, e.g. after a SIGKILL."""
    return [run.status for run in read_earlier(directory / "swept").runs]


def weights(directory: Path) -> list[dict[str, torch.Tensor]]:
    runs = sorted((directory / "swept").glob("[012]_*"))
    return [checkpoint.load(run / "checkpoints" / "last.ckpt")["task"] for run in runs]


def is_same(some: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]) -> bool:
    return len(some) == len(others) and all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(some, others, strict=True)
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = folder(tmp_path_factory.mktemp("undisturbed"), "")
    (done,) = attempts([list(LINE)], directory)
    assert done.code == 0 and statuses(directory) == ["finished"] * 3, done.err
    return directory


def ended(directory: Path) -> dict[str, int]:
    """When each run that has finished did so."""
    return {
        path.parent.name: path.stat().st_mtime_ns
        for path in directory.rglob("summary.json")
        if json.loads(path.read_text())["status"] == "finished"
    }


def test_a_run_that_failed_goes_on_from_its_checkpoint_and_finished_ones_are_left(
    tmp_path, undisturbed
):
    """By another launcher, too."""
    directory = write(folder(tmp_path, "bug"), {"site/hydra_plugins/own.py": launcher("another")})
    (failed,) = attempts([list(LINE)], directory)
    assert failed.code == 1 and statuses(directory) == ["finished", "failed", "finished"]
    assert content(directory)["runs"][1]["reason"] == "KeyError: 'a bug'"
    before = ended(directory)
    assert len(before) == 2
    (directory / "trouble").unlink()
    lines = [[*RESUME, "hydra/launcher=another"], list(RESUME)]
    again, whole = attempts(lines, directory, PYTHONPATH=f"{ROOT}:{directory / 'site'}")
    assert again.code == 0, again.err
    assert again.out.startswith("run 2 of 3: seed=1\n") and "run 3 of 3" not in again.out
    assert statuses(directory) == ["finished"] * 3
    assert before.items() <= ended(directory).items()
    assert is_same(weights(directory), weights(undisturbed))
    assert "run 2 of 3" not in whole.out and whole.code == 0, "there was nothing left to run"
    values = [run["value"] for run in content(undisturbed)["runs"]]
    assert [run["value"] for run in content(directory)["runs"]] == values
    (log,) = directory.glob("swept/1_*/run.log")
    assert "resumed at epoch 1, step 4" in log.read_text()


def test_a_pair_lacks_a_run_that_failed_until_the_sweep_is_gone_on_with(tmp_path):
    """And what is compared may be typed later, for a sweep that has ended."""
    directory, key = folder(tmp_path, "bug"), "task.optimizer.lr"
    line = [*LINE, f"{key}=0.01,0.001", f"sweep.compare={key}"]
    (failed,) = attempts([line], directory)
    assert failed.code == 1 and re.search(r"^0\.001 .* 2 of 3 .* 2 of 3$", failed.out, re.M)
    (directory / "trouble").unlink()
    (whole,) = attempts([list(RESUME)], directory)
    assert whole.code == 0 and re.search(r"^0\.001 .*  3  .*  3$", whole.out, re.M), whole.err
    found = content(directory)
    values = [run["value"] for run in found["runs"]]  # of 0.01 and 0.001 for each seed
    pairs = [b - a for a, b in zip(values[::2], values[1::2], strict=True)]
    first, second = found["means"]
    assert (found["over"], found["compare"], first["difference"]) == (["seed"], key, None)
    assert second["difference"]["mean"] == pytest.approx(statistics.mean(pairs))
    half = 4.302653 * statistics.stdev(pairs) / 3**0.5
    low, high = second["difference"]["interval"]
    assert (high - low) / 2 == pytest.approx(half, rel=1e-6)
    again = [*RESUME, f"sweep.over={key}", "sweep.compare=seed"]
    other, wrong = attempts([again, [*RESUME, "sweep.compare=lr"]], directory)
    assert (other.code, wrong.code) == (0, 2), other.err
    assert "run 1 of 6" not in other.out and "difference to seed=0" in other.out
    assert [row["runs"] for row in content(directory)["means"]] == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("strategy", ["cpu", pytest.param("single_gpu", marks=pytest.mark.gpu(1))])
def test_a_device_that_fails_ends_its_run_and_the_others_run_in_other_processes(tmp_path, strategy):
    directory = folder(tmp_path, "lost")
    line = [*LINE, f"strategy={strategy}"]
    paths = os.pathsep.join([str(ROOT), str(directory), os.environ.get("PYTHONPATH", "")])
    run = dpframe if strategy == "cpu" else cold_dpframe
    lost = run(*line, cwd=directory, PYTHONPATH=paths)
    assert lost.returncode == 1 and statuses(directory) == ["finished", "failed", "finished"]
    *_, failed = lost.stderr.splitlines()
    assert re.match("sweep: failed: .*swept/1_.* failed in training: CUDA error: device-", failed)
    assert "\n[3] epoch 3/3" in lost.stdout and "\nepoch 3/3" in lost.stdout
    (saved,) = directory.glob("swept/1_*/checkpoints/last.ckpt")
    assert checkpoint.load(saved)["progress"]["epoch"] == 1


@pytest.mark.parametrize("strategy", ["cpu", "ddp"])
def test_a_sweep_that_is_killed_or_interrupted_in_a_run_is_gone_on_with(
    tmp_path, undisturbed, strategy
):
    directory = folder(tmp_path, "wait")
    more = [f"strategy={strategy}", "trainer.gpus=1", "trainer.accelerator=cpu"]
    line = LINE
    if strategy == "cpu":
        with started(LINE, directory) as job:
            job.wait_for("there")
            os.kill(job.pid, signal.SIGKILL)
            job.wait()
        assert statuses(directory) == ["finished", "running", "missing"]
        (directory / "there").unlink()
        line, more = RESUME, []
    with started([*line, *more], directory) as job:
        job.wait_for("there")
        os.kill(job.pid, signal.SIGINT)
        code, said = job.ended()
        out = job.printed()
    assert code == 130 and said[-1].startswith(GO_ON)
    assert statuses(directory) == ["finished", "interrupted", "missing"]
    assert "sweep: 1 of 3 runs finished" in out and "best: run 1, " in out
    (directory / "trouble").unlink()
    done = dpframe(*RESUME, cwd=directory)
    assert done.returncode == 0, done.stderr
    assert statuses(directory) == ["finished"] * 3
    assert is_same(weights(directory), weights(undisturbed))


def test_a_sweep_that_still_runs_is_not_gone_on_with_by_another_process(tmp_path):
    directory = folder(tmp_path, "wait")
    with started(LINE, directory) as job:
        job.wait_for("there")
        before = content(directory)
        fresh_start = [*LINE[:-1], "hydra.sweep.dir=swept"]
        done = attempts([list(RESUME), fresh_start], directory)
        assert content(directory) == before
        (directory / "trouble").write_text("")
        os.kill(job.pid, signal.SIGINT)
        job.ended()
    for attempt in done:
        assert attempt.code == 2
        assert attempt.err == (
            f"dpframe: the sweep's directory swept is in use by process {job.pid} on "
            f"{socket.gethostname()}; end that first, or use another one: hydra.sweep.dir=DIR\n"
        )


def test_ctrl_c_between_two_runs_ends_the_sweep_with_its_table(tmp_path):
    """The signal comes when the first run's summary is there: the next may have its header."""
    directory = folder(tmp_path, "")
    more = "+callbacks.signal._target_=own.Signal"
    with started([*LINE, more], directory) as job:
        code, said = job.ended()
        out = job.printed()
    assert code == 130 and len(said) == 1 and said[0].startswith(GO_ON)
    first, second, third = statuses(directory)
    assert first == "finished" and second in ("missing", "interrupted") and third == "missing"
    assert "sweep: 1 of 3 runs finished" in out and "run 3 of 3" not in out
    assert not list(directory.glob("swept/[12]_*")), "a run was begun"


def test_what_can_not_be_gone_on_with_is_one_line(undisturbed):
    text = {"runs": [], "overrides": ["recipe=boston", "seed=0,1"], "sweeper": "basic"}
    write(undisturbed, {"linked/sweep.json": json.dumps(text), "elsewhere/x": ""})
    (undisturbed / "linked" / "0_seed=0").symlink_to(undisturbed / "elsewhere")
    link = "linked/0_seed=0 is a link out of the run directory"
    lines = {
        "sweep.resume=linked": link,
        "sweep.resume=nowhere": "sweep.resume=nowhere: there is no sweep.json in it",
        "sweep.resume=swept seed=3": "seed=3: sweep.resume goes on with a sweep as it was",
        "sweep.jobs=0 recipe=boston": "sweep.jobs=0 is out of range; use 1 or more",
        "sweep.jobs=two recipe=boston": "sweep.jobs=two is text; use a whole number",
        "sweep.job=2 recipe=boston": "sweep.job=2: there is no key sweep.job; did you mean sweep.j",
    }
    done = attempts([["-m", *line.split()] for line in lines], undisturbed)
    for one, said in zip(done, lines.values(), strict=True):
        assert (one.code, one.out, one.err.count("\n")) == (2, "", 1), one
        assert one.err.startswith(f"dpframe: {said}"), one.err
    assert [path.name for path in (undisturbed / "elsewhere").iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("strategy", "variables"),
    [
        (["strategy=cpu"], {}),
        (["strategy=ddp", "trainer.gpus=2"], {"SUBMITIT_PREEMPT_SIGNAL": "QUIT"}),
    ],
    ids=["USR2", "another one, two ranks"],
)
def test_a_point_that_submitit_preempts_is_queued_again_and_ends_with_the_same_bits(
    tmp_path, strategy, variables
):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs dpframe[slurm]")
    once = injector.fail_at(0, 5, "preempt")
    line = [*injector.words(tmp_path, *strategy, "logger=none")[:2], *strategy, "logger=none"]
    submitted = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=2", "seed=0"]
    paths = f"{ROOT}:{ROOT / 'tests'}"
    done = forked.run(
        ["-m", *line, "hydra.sweep.dir=swept", *submitted],
        tmp_path,
        PYTHONPATH=paths,
        **once,
        **variables,
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("swept/.submitit/*/*log.*"))
    assert injector.has_fired(tmp_path) and "sweep: 1 of 1 runs finished" in done.stdout, logs
    assert "Requeued job" in logs
    forked.run([*line, "seed=0", "hydra.run.dir=whole"], tmp_path)
    (point,) = tmp_path.glob("swept/0*")
    swept, whole = (
        checkpoint.load(run / "checkpoints" / "last.ckpt")["task"]
        for run in (point, tmp_path / "whole")
    )
    assert is_same([swept], [whole])
