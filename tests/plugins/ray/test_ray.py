"""Ray on a cluster of two nodes: the numbers of one process, what Ray is told, and how jobs end."""

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
from command import attempts, environment, write
from forked import fresh, started

from dpframe import UserError, checkpoint
from dpframe.errors import Interrupted
from dpframe.launch import signals
from dpframe.launch.rank import Parent
from dpframe.launch.signals import Interruption
from dpframe.plugins.ray.strategy import Ray

# Each process of Ray's imports much: on a busy machine the jobs take minutes.
SECONDS = 500
pytestmark = pytest.mark.timeout(2 * SECONDS)
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

node = {"num_cpus": 4, "resources": {"seat": 1}, "object_store_memory": 100 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
second = cluster.add_node(node_ip_address="127.0.0.2", **node)
print(cluster.address, flush=True)
if sys.stdin.readline():  # a node is lost, and there is another one instead
    cluster.remove_node(second, allow_graceful=False)
    cluster.add_node(node_ip_address="127.0.0.3", **node)
    sys.stdin.read()
cluster.shutdown()
"""
STRATEGY = "strategy   Ray on 2 x cpu: 2 replicas = 2 nodes x 1"
OWN = """
import time
from pathlib import Path

import dpframe
import ray


class Placed(dpframe.Callback):
    def on_fit_start(self, trainer):
        node = ray.get_runtime_context().get_node_id()
        Path(f"rank{trainer.strategy.rank}").write_text(node)


class Failing(dpframe.Callback):
    def on_step_end(self, trainer):
        if trainer.strategy.rank == 1 and trainer.global_step == 3:
            raise KeyError("broken")


class Stays(dpframe.Callback):
    def on_step_end(self, trainer):
        if trainer.strategy.rank == 1 and trainer.global_step == 6 and not Path("stays").exists():
            while not Path("lost/checkpoints/last.ckpt").exists():  # rank 0 writes it meanwhile
                time.sleep(0.01)
            Path("stays").touch()
            time.sleep(600)


class Slow(dpframe.Callback):
    def on_step_end(self, trainer):
        if trainer.global_step == 3:
            Path("slow").touch()
            trainer.interruption_seconds = 60.0
        deadline = time.monotonic() + getattr(trainer, "interruption_seconds", 0.0)
        while time.monotonic() < deadline and trainer.placed.interruption.number is None:
            time.sleep(0.01)
"""
BOSTON = ["recipe=boston", "trainer.max_epochs=2", "trainer.sanity_batches=0"]
TWO = [*BOSTON, "strategy=ray", "trainer.gpus=2"]
FITTED = [*BOSTON, "trainer.precision=64", "hydra.run.dir=fitted"]
FITTED += ["strategy=ray", "trainer.gpus=2", "+strategy.resources.seat=1", "strategy.storage=store"]
FITTED += ["+callbacks.placed._target_=own.Placed"]
FAILING = [*TWO, "+callbacks.failing._target_=own.Failing", "hydra.run.dir=failing"]
SLOW = [
    *BOSTON,
    "strategy=ray",
    "trainer.gpus=1",
    "+callbacks.slow._target_=own.Slow",
    "hydra.run.dir=slow_run",
]
LOST = [*BOSTON, "trainer.precision=64", "hydra.run.dir=lost", "trainer.max_restarts=1"]
LOST += ["strategy=ray", "trainer.gpus=2", "+strategy.resources.seat=1"]
LOST += ["callbacks.checkpoint.seconds_between=0", "+callbacks.stays._target_=own.Stays"]
STORED = [*TWO, "strategy.storage=nowhere://bucket/runs"]
VERIFIED = ["mode=verify", "recipe=boston", "strategy=ray", "trainer.gpus=2"]
BY_RAY = ["hydra/launcher=ray", "+hydra.launcher.ray.init.object_store_memory=null"]
BY_RAY += ["+hydra.launcher.ray.init.log_to_driver=false", "trainer.max_epochs=2"]
SWEPT = ["-m", "recipe=boston", "task.optimizer.lr=0.01,0.02", *BY_RAY, "hydra.sweep.dir=swept"]
SEARCHED = ["-m", "recipe=boston", "task.optimizer.lr=interval(0.01,0.02)", *BY_RAY]
SEARCHED += ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweep.dir=searched"]
REFUSED: list[dict[str, Any]] = [
    {"gpus": 9},
    {"gpus": 2, "resources": {"CPU": 5}},
    {"accelerator": "cuda"},
]


@contextmanager
def cluster() -> Iterator[SimpleNamespace]:
    """Two nodes with four CPUs and one seat each; `lose()` replaces the second one."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        variables = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(**variables),
        )
        assert process.stdin and process.stdout
        try:
            address = process.stdout.readline().strip()
            yield SimpleNamespace(address=address, lose=partial(_say, process.stdin))
        finally:
            process.stdin.close()
            process.wait()
            process.stdout.close()


def _say(stdin: IO[str]) -> None:
    stdin.write("\n")
    stdin.flush()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What came of some commands, which ran beside each other on one cluster."""
    pytest.importorskip("ray.train", reason="dpframe[ray] is not installed")
    folder = write(tmp_path_factory.mktemp("ray"), {"own.py": OWN})
    commands = [FITTED, FAILING, VERIFIED, SWEPT, STORED]
    if find_spec("hydra_plugins") and find_spec("hydra_plugins.hydra_optuna_sweeper"):
        commands.append(SEARCHED)
    with cluster() as nodes, ThreadPoolExecutor(2) as pool:
        variables = environment(RAY_ADDRESS=nodes.address)
        waiting = [pool.submit(done, words, folder, variables) for words in commands]
        stopped = done(SLOW, folder, variables, stops_at="slow")
        refused = fresh(refusals, environment=variables)
        fitted, failing, verified, swept, stored, *searched = [each.result() for each in waiting]
        lost = done(LOST, folder, variables, stops_at="stays", stop=nodes.lose)
    return SimpleNamespace(
        folder=folder,
        fitted=fitted,
        failing=failing,
        verified=verified,
        swept=swept,
        stored=stored,
        searched=searched,
        lost=lost,
        refused=refused,
        stopped=stopped,
    )


def done(
    words: list[str],
    folder: Path,
    variables: dict[str, str],
    *,
    stops_at: str = "",
    stop: Callable[[], None] | None = None,
) -> SimpleNamespace:
    """A command that has ended, by SIGTERM or by `stop` once there is that file."""
    with started(words, folder, **variables) as job:
        if stops_at:
            job.wait_for(stops_at)
            stop() if stop is not None else os.kill(job.pid, signal.SIGTERM)
        code = job.wait(SECONDS)
        return SimpleNamespace(returncode=code, stdout=job.printed(), stderr=job.said())


def refusals() -> list[str]:
    said = []
    for options in REFUSED:
        with pytest.raises(UserError) as refused:
            Ray(**options).launch(print)
        said.append(str(refused.value))
    return said


def weights(path: Path) -> dict[str, Any]:
    return checkpoint.load(path)["task"]


def test_ranks_on_two_nodes_have_the_numbers_of_one_process(jobs, tmp_path):
    assert jobs.fitted.returncode == 0, jobs.fitted.stderr
    nodes = [(jobs.folder / f"rank{rank}").read_text() for rank in range(2)]
    assert len(set(nodes)) == 2
    words = [*BOSTON, "trainer.precision=64", "strategy=cpu", "hydra.run.dir=run"]
    assert [each.code for each in attempts([words], tmp_path)] == [0]
    summary, expected = (
        json.loads((path / "summary.json").read_text())
        for path in (jobs.folder / "fitted", tmp_path / "run")
    )
    assert (summary["strategy"], summary["replicas"]) == ("Ray", 2)
    assert summary["metrics"].keys() == expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        assert summary["metrics"][name] == pytest.approx(value, rel=1e-12), name
    here, there = (
        weights(path / "checkpoints" / "last.ckpt")
        for path in (jobs.folder / "fitted", tmp_path / "run")
    )
    assert here.keys() == there.keys()
    for name, weight in there.items():
        torch.testing.assert_close(here[name], weight, rtol=0, atol=1e-12)


def test_ray_has_the_numbers_and_a_copy_of_the_newest_checkpoint(jobs):
    from ray.train import Result

    (kept,) = (jobs.folder / "store").iterdir()
    result = Result.from_path(kept)
    summary = json.loads((jobs.folder / "fitted" / "summary.json").read_text())
    assert result.metrics.items() >= summary["metrics"].items()
    assert (result.metrics["step"], result.metrics["progress/epoch"]) == (8, 2.0)
    with result.checkpoint.as_directory() as folder:
        (copy,) = Path(folder).iterdir()
        own = jobs.folder / "fitted" / "checkpoints" / copy.name
        assert copy.read_bytes() == own.read_bytes()
    assert not list((jobs.folder / "fitted").rglob("ray_*"))


def test_what_a_rank_prints_is_shown_as_that_of_a_process_here(jobs):
    lines = jobs.fitted.stdout.splitlines()
    for line in ("recipe     boston  (Boston, seed 0)", STRATEGY):
        assert lines.count(line) == 1
    assert sum(line.startswith("epoch 2/2") for line in lines) == 1
    assert not any("TrainingReport" in line for line in lines)
    assert "2 Ray workers stand in for 2 GPUs" in jobs.fitted.stderr


def test_a_rank_that_fails_ends_the_job_with_its_traceback(jobs):
    assert jobs.failing.returncode == 1
    said = jobs.failing.stderr
    assert "rank 1 failed:\nTraceback (most recent call last):" in said
    *_, broken, last = said.splitlines()
    assert broken == "KeyError: 'broken'" and last.startswith("dpframe: the run is in failing; ")
    summary = json.loads((jobs.folder / "failing" / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", "KeyError: 'broken'")


def test_a_signal_saves_and_says_how_to_go_on(jobs):
    assert jobs.stopped.returncode == 128 + signal.SIGTERM
    last = jobs.stopped.stderr.splitlines()[-1]
    found = re.fullmatch(
        r"dpframe: interrupted by SIGTERM after step (\d+); go on with (dpframe )?resume=slow_run",
        last,
    )
    assert found, jobs.stopped.stderr
    path = jobs.folder / "slow_run" / "checkpoints" / "last.ckpt"
    assert checkpoint.load(path)["progress"]["global_step"] == int(found[1])


def test_a_run_whose_node_is_lost_goes_on_from_its_last_checkpoint_on_another_one(jobs):
    """To the weights of the run that lost none."""
    assert jobs.lost.returncode == 0, jobs.lost.stderr
    lines = jobs.lost.stderr.splitlines()
    assert [line for line in lines if re.fullmatch(r"rank [01] failed:", line)], lines
    assert "restart 1 of 1 from lost/checkpoints/last.ckpt, step 4" in lines
    ours, theirs = (
        weights(jobs.folder / name / "checkpoints" / "last.ckpt") for name in ("lost", "fitted")
    )
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-12)


def test_a_storage_that_can_not_be_opened_is_refused_in_one_line(jobs):
    assert jobs.stored.returncode == 2
    assert jobs.stored.stderr.splitlines()[-1] == (
        "dpframe: strategy.storage=nowhere://bucket/runs can't be opened: Unrecognized filesystem "
        "type in URI: nowhere://bucket/runs; fix that, or use a directory that all nodes share"
    )


def test_the_kit_finds_the_strategy_exact(jobs):
    assert jobs.verified.returncode == 0, jobs.verified.stdout
    assert re.fullmatch(r"(\d+) of \1 checks passed", jobs.verified.stdout.splitlines()[-1])


def test_a_sweep_runs_over_the_cluster_by_hydras_launcher(jobs):
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="it is not installed")
    assert jobs.swept.returncode == 0, jobs.swept.stderr
    runs = json.loads((jobs.folder / "swept" / "sweep.json").read_text())["runs"]
    assert [run["status"] for run in runs] == ["finished", "finished"]
    rates = {word for run in runs for word in run["overrides"] if "optimizer.lr" in word}
    assert rates == {"task.optimizer.lr=0.01", "task.optimizer.lr=0.02"}


def test_optuna_searches_over_the_cluster(jobs):
    if not jobs.searched:
        pytest.skip("dpframe[sweep] is not installed")
    assert jobs.searched[0].returncode == 0, jobs.searched[0].stderr
    runs = json.loads((jobs.folder / "searched" / "sweep.json").read_text())["runs"]
    assert [run["status"] for run in runs] == ["finished"] * 3
    assert (jobs.folder / "searched" / "study.db").exists()


def test_more_than_the_cluster_has_is_refused_in_one_line(jobs):
    there = "the Ray cluster has CPU 8, GPU 0 on 2 nodes"
    assert jobs.refused == [
        f"trainer.gpus=9 needs 9 workers of CPU 1 each, and {there}, so room for 8; use "
        "trainer.gpus=8, or add nodes",
        f"trainer.gpus=2 needs 2 workers of CPU 5 each, and {there}, so room for 0; set "
        "strategy.resources to less, or add nodes",
        f"trainer.accelerator=cuda but {there}; use trainer.accelerator=auto, or cpu to rehearse",
    ]


# ---- by the commands of docs/clusters.md


@contextmanager
def ray_start(*words: str, **variables: str) -> Iterator[str]:
    """What `ray start WORDS` prints; `--block` makes it end its processes with itself."""
    command = [RAY, "start", *words, "--block", "--num-cpus=1"]
    process = subprocess.Popen(
        [*command, f"--object-store-memory={100 << 20}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**variables),
    )
    assert process.stdout
    printed = ""
    try:
        while "will now block forever" not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        yield printed
    finally:
        process.terminate()
        process.communicate()


RAY = str(Path(sys.executable).parent / "ray")


@contextmanager
def with_token(home: Path) -> Iterator[dict[str, str]]:
    """The variables of a user who has one."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        own = {"HOME": str(home), "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token"}
        command = [RAY, "get-auth-token", "--generate"]
        subprocess.run(command, env=environment(**own), check=True, capture_output=True)
        yield own


def test_the_commands_of_the_page_make_a_cluster_that_asks_for_a_token(tmp_path):
    if find_spec("ray") is None:  # an import would set variables
        pytest.skip("dpframe[ray] is not installed")
    with (
        with_token(tmp_path) as own,
        ray_start("--head", "--port=0", "--include-dashboard=false", **own) as printed,
    ):
        (address,) = re.findall(r"ray start --address='(.+)'", printed)
        with ray_start(f"--address={address}", **own):
            job = done(TWO, tmp_path, environment(**own, RAY_ADDRESS=address))
    assert job.returncode == 0, job.stderr
    assert "strategy   Ray on 2 x cpu" in job.stdout


def test_ray_job_submit_takes_the_command(tmp_path):
    if find_spec("ray") is None or find_spec("aiohttp_cors") is None:
        pytest.skip("ray[default], which has the server of jobs, is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [*BOSTON, "strategy=ray", "trainer.gpus=1", f"hydra.run.dir={tmp_path}/run"]
    submit = [RAY, "job", "submit", f"--address=http://127.0.0.1:{port}", "--"]
    head = ["--head", "--port=0", f"--dashboard-port={port}"]
    with with_token(tmp_path) as own, ray_start(*head, **own):
        said = "please try again later"  # of the server, before its node's agent is there
        while said.endswith("please try again later"):
            job = subprocess.run(
                [*submit, sys.executable, "-m", "dpframe", *words],
                env=environment(**own),
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            said = job.stderr.rstrip(".\n")
    assert job.returncode == 0, job.stdout + job.stderr
    assert "epoch 2/2" in job.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["strategy"], summary["status"]) == ("Ray", "finished")


# ---- without a cluster


def test_a_rank_whose_group_ray_has_ended_is_not_the_one_that_failed(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    sent: list[bytes] = []
    messages = SimpleNamespace(send_bytes=sent.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for is_ended in (False, True):
        if is_ended:
            dist.destroy_process_group()
        monkeypatch.setattr(signals, "_current", Parent(messages))
        Ray(2).abort(ValueError("Default process group has not been initialized"))
        kind, fault = pickle.loads(sent.pop())
        assert (kind, fault.rank, fault.is_consequence) == ("failed", 3, is_ended)
        assert not sent


def test_gpus_that_are_named_and_torchruns_ranks_are_refused(monkeypatch):
    with pytest.raises(UserError, match="names GPUs, and under strategy=ray Ray chooses"):
        Ray([0, 1])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun has started this one"):
        Ray(2).launch(print)


def test_without_ray_there_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"strategy=ray needs Ray Train .*dpframe\[ray\]"):
        Ray(2).launch(print)


def test_a_cluster_that_is_not_there_is_refused_at_once(monkeypatch):
    pytest.importorskip("ray.train", reason="dpframe[ray] is not installed")
    for address, why in [("127.0.0.1:9", "Connection refused"), ("ray://x:1", ".*; use HOST:6379")]:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError, match=f"RAY_ADDRESS={address} can't be reached: {why}"):
            Ray(2).launch(print)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_ray_starts_ends_the_start(monkeypatch, number):
    """Ray takes SIGTERM over meanwhile, and exits by codes of its own."""

    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        signal.raise_signal(number)

    fake = SimpleNamespace(init=init, is_initialized=lambda: False, shutdown=lambda: None)
    fake.train = SimpleNamespace()
    for name in ("ray", "ray.train", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, name, fake)
    stop = Interruption()
    stop.open()
    try:
        with pytest.raises(Interrupted) as ended:
            Ray(2).launch(print)
    finally:
        stop.close()
    assert ended.value.number == stop.number == number


def test_where_ray_writes_comes_from_the_command_line_alone(tmp_path):
    write(tmp_path, {"mine/strategy/mine.yaml": "defaults: [ray]\nstorage: elsewhere\n"})
    words = ["--config-dir", "mine", *BOSTON, "strategy=mine"]
    (refused,) = attempts([words], tmp_path)
    assert refused.code == 2
    assert "a config file sets strategy.storage, which only you can" in refused.err
