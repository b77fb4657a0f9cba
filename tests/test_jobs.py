"""`sweep.jobs`: several runs at a time, each in a process with its share of the machine."""

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import ROOT, attempts, cold_dpframe, dpframe, write
from forked import started

from dpframe import UserError
from dpframe.cli import jobs
from dpframe.cli.jobs import lanes
from dpframe.cli.results import read_earlier

OWN = """
import gc
import os
import signal
import sys
import time
from pathlib import Path

import torch

import dpframe
from dpframe.devices.accelerator import cores


class Told(dpframe.Callback):
    '''Does what the seed says.'''

    def on_fit_start(self, trainer):
        seed = trainer.seed
        assert gc.isenabled()
        if seed == 11:
            raise KeyError("a bug")
        if seed == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == 13:
            sys.exit(0)
        if seed > 20:  # runs of one sweep, all at a time
            Path(f"there-{seed}").touch()
            while trainer.placed.interruption.number is None and not Path("go").exists():
                time.sleep(0.01)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        threads = torch.get_num_threads()
        print(f"uses {cores()} cores, {threads} threads, GPUs {visible}", flush=True)
        sys.stderr.write("half a line")
"""
LINE = ("-m", "recipe=boston", "trainer.max_epochs=2", "logger=none", "hydra.sweep.dir=swept")
TOLD = "+callbacks.told._target_=own.Told"


def content(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "swept" / "sweep.json").read_text())


def told(directory: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(run[name] for name in names) for run in content(directory)["runs"]]


def test_runs_of_strategies_and_numbers_one_after_the_other_and_at_a_time(tmp_path):
    line = ["-m", "recipe=boston", "trainer.max_epochs=2", "hydra.sweep.dir=swept"]
    line += ["strategy=cpu,ddp", "task.optimizer.lr=0.01,0.001", "trainer.accelerator=cpu"]
    write(tmp_path, {"one/x": "", "two/x": ""})
    one = dpframe(*line, cwd=tmp_path / "one")
    two = dpframe(*line, "sweep.jobs=2", cwd=tmp_path / "two")
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    names = "number", "overrides", "directory", "status", "value"
    assert told(tmp_path / "two", *names) == told(tmp_path / "one", *names)
    points = [(strategy, rate) for strategy in ("cpu", "ddp") for rate in (0.01, 0.001)]
    summaries = []
    for number, (strategy, rate) in enumerate(points):
        run = tmp_path / "one" / "swept" / f"{number}_strategy={strategy},task.optimizer.lr={rate}"
        assert (run / "run.log").is_file() and (run / ".hydra" / "config.yaml").is_file()
        assert len(list(run.glob("events.out.tfevents.*-dpframe"))) == 1
        summaries.append(json.loads((run / "summary.json").read_text()))
        assert re.search(rf"^\[{number + 1}\] epoch 2/2  step 8 ", two.stdout, re.M)
        ending = rf"^run {number + 1} of 4: strategy=.*: finished, val/loss .* s$"
        assert re.search(ending, two.stdout, re.M)
    assert [summary["replicas"] for summary in summaries] == [1, 1, 2, 2]
    losses = [summary["metrics"]["val/loss"] for summary in summaries]
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-5), "the strategy changed the numbers"
    assert "sweep: 4 of 4 runs finished" in one.stdout
    assert not re.search("^epoch", two.stdout, re.M), "a line without its run"


def test_runs_have_their_shares_of_the_cores_and_one_that_fails_or_is_killed_is_told(tmp_path):
    write(tmp_path, {"own.py": OWN})
    (done,) = attempts([[*LINE, "seed=10,11,12,13,14", TOLD, "sweep.jobs=2"]], tmp_path)
    assert done.code == 1 and "sweep: 2 of 5 runs finished" in done.out
    ended = [status for (status,) in told(tmp_path, "status")]
    assert ended == ["finished", "failed", "failed", "failed", "finished"]
    _, bug, killed, left, _ = (reason for (reason,) in told(tmp_path, "reason"))
    assert bug == "KeyError: 'a bug'" and killed == "killed by SIGKILL"
    assert left.startswith("sys.exit(0) in on_fit_start (own.py")
    assert "[2] KeyError: 'a bug'" in done.err.splitlines()
    assert "[1] half a line" in done.err.splitlines()
    assert re.search(r"^sweep: failed: swept/2_.*: killed by SIGKILL$", done.err, re.M)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    uses = re.findall(rf"^\[(\d)\] uses {share} cores, 1 threads", done.out, re.M)
    assert sorted(uses) == ["1", "5"]


def test_ctrl_c_ends_all_runs_that_there_are_and_begins_no_other(tmp_path):
    write(tmp_path, {"own.py": OWN})
    words = [*LINE, "seed=21,22,23", TOLD, "sweep.jobs=2", "trainer.accelerator=cpu"]
    with started(words, tmp_path) as job:
        job.wait_for("there-21", "there-22")
        os.kill(job.pid, signal.SIGINT)
        code, said = job.ended()
    assert code == 130
    words = f"sweep.resume=swept {TOLD}"
    assert said[-1] == f"dpframe: interrupted by SIGINT; go on with {words}"
    assert [status for (status,) in told(tmp_path, "status")] == [
        "interrupted",
        "interrupted",
        "missing",
    ]
    (tmp_path / "go").touch()
    (done,) = attempts([["sweep.resume=swept", "sweep.jobs=3", TOLD]], tmp_path)
    assert done.code == 0, done.err
    assert told(tmp_path, "status") == [("finished",)] * 3


def test_a_run_ends_with_the_sweep_that_has_started_it(tmp_path):
    write(tmp_path, {"own.py": OWN})
    words = [*LINE, "seed=21,22", TOLD, "sweep.jobs=2", "trainer.accelerator=cpu"]
    with started(words, tmp_path) as job:
        job.wait_for("there-21", "there-22")
        assert len(job.ranks()) >= 2
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    # That no process is left is checked after each test.
    assert [run.status for run in read_earlier(tmp_path / "swept").runs] == ["running", "running"]


def job_of(gpus: Any, accelerator: str = "auto") -> Any:
    trainer = SimpleNamespace(gpus=gpus, accelerator=accelerator)
    return SimpleNamespace(settings=SimpleNamespace(trainer=trainer))


@pytest.mark.parametrize(
    ("count", "cores", "gpus", "visible", "shares"),
    [
        (2, 4, 0, "", [([0, 1], None), ([2, 3], None)]),
        (2, 5, 2, "", [([0, 1], "0"), ([2, 3, 4], "1")]),
        (2, 2, 4, "", [([0], "0,1"), ([1], "2,3")]),
        (3, 2, 2, "", [([0], "0"), ([1], "1"), ([0], "0")]),
        (2, 2, 2, "5,GPU-3", [([0], "5"), ([1], "GPU-3")]),
    ],
)
def test_lanes_divide_cores_and_gpus(monkeypatch, count, cores, gpus, visible, shares):
    there = [torch.device("cuda", index) for index in range(gpus)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(jobs, "present", lambda accelerator: there)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    made = lanes([job_of(None)], count)
    assert [(lane.cores, lane.environment.get("CUDA_VISIBLE_DEVICES")) for lane in made] == shares
    assert all(lane.has_gpus == bool(gpus) for lane in made)
    assert not any(lane.environment for lane in lanes([job_of(None, "cpu")], count))


def test_a_run_that_needs_more_gpus_than_its_share_is_refused(monkeypatch):
    there = [torch.device("cuda", index) for index in range(4)]
    monkeypatch.setattr(jobs, "present", lambda accelerator: there)
    assert lanes([job_of(2), job_of([0, 1, 2, 3])], 2)
    with pytest.raises(UserError, match=r"^trainer\.gpus=3 but sweep\.jobs=2 leaves each run 2"):
        lanes([job_of(2), job_of(3)], 2)


@pytest.mark.gpu(2)
def test_two_runs_at_a_time_have_a_gpu_each(tmp_path):
    write(tmp_path, {"own.py": OWN})
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    line = [*LINE, "seed=1,2", TOLD, "sweep.jobs=2"]
    done = cold_dpframe(*line, cwd=tmp_path, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    gpus = dict(re.findall(r"^\[(\d)\] uses .* GPUs (\S+)$", done.stdout, re.M))
    assert sorted(gpus) == ["1", "2"] and len(set(gpus.values())) == 2
    for (run,) in told(tmp_path, "directory"):
        summary = json.loads((tmp_path / "swept" / run / "summary.json").read_text())
        assert summary["devices"] == ["cuda:0"], "of those that it sees"
