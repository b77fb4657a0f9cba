"""Real processes: how ranks start, how torchrun's join, and how each kind of fault ends the job."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import faulty
import forked
import pytest
import torch
from conftest import descendants, remaining

from dpframe import UserError, checkpoint
from dpframe.strategies import launch, ranks
from dpframe.strategies.ddp import DDP

TESTS = Path(__file__).resolve().parent
FAULT_SECONDS = 10
GRACE = ("data.workers=2", "trainer.grace_seconds=0.5")
BOSTON = ["recipe=boston", "trainer.max_epochs=2", "logger=none"]

# Faults


def faulty_words(folder: Path, *overrides: str) -> list[str]:
    (folder / "recipe").mkdir(exist_ok=True)
    (folder / "recipe" / "faulty.yaml").write_text(faulty.CONFIG)
    given = ["recipe=faulty", "strategy=ddp", "callbacks=none", "logger=none", *overrides]
    return [f"--config-dir={folder}", *given]


def environment(**more: str) -> dict[str, str]:
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def broken(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    """A job that ends within 10 seconds of its fault, with nothing of it left then."""
    before = set(descendants())
    done = forked.run(faulty_words(folder, *overrides), folder)
    left = set(descendants()) - before
    noted = [float(path.read_text()) for path in folder.glob("fault-*")]
    assert noted, done.stderr
    assert time.time() - min(noted) < FAULT_SECONDS
    assert not left
    return done


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_has_its_traceback_last_on_stderr(tmp_path, rank):
    done = broken(tmp_path, "trainer.gpus=2", f"task.fault=raise {rank}")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == f"ValueError: broken in rank {rank}"
    assert f"rank {rank} failed:" in lines
    assert lines.index(f"rank {rank} failed:") < lines.index("Traceback (most recent call last):")
    assert done.stderr.count("Traceback") == 1
    assert reason(tmp_path) == lines[lines.index(f"rank {rank} failed:") - 1 :]


def reason(folder: Path) -> list[str]:
    """What run.log ends with."""
    (log,) = folder.glob("outputs/*/*/run.log")
    said = " [parent] ERROR dpframe: "
    return [line.partition(said)[2] for line in log.read_text().splitlines() if said in line]


def test_one_traceback_is_shown_where_every_rank_raises(tmp_path):
    done = broken(tmp_path, "trainer.gpus=2", "task.fault=raise all")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ValueError: broken in rank ")
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("fault", "workers", "said"),
    [
        ("kill 0", 2, "killed by SIGKILL"),
        ("kill 1", 0, "killed by SIGKILL"),
        ("leave 1", 0, "left with exit code 7"),
    ],
)
def test_a_rank_that_is_killed_is_named(tmp_path, fault, workers, said):
    done = broken(tmp_path, "trainer.gpus=2", f"task.fault={fault}", f"data.workers={workers}")
    assert done.returncode == 1
    *_, name, last = done.stderr.splitlines()
    assert name == f"rank {fault[-1]} failed:"
    assert last.startswith(said)
    assert "Traceback" not in done.stderr
    assert reason(tmp_path)[-2:] == [name, last]


@pytest.mark.parametrize("rank", ["1", "all"])
def test_what_a_user_did_wrong_is_one_line_and_exit_code_2(tmp_path, rank):
    done = broken(
        tmp_path, "trainer.gpus=2", "trainer.accelerator=cpu", f"task.fault=refuse {rank}"
    )
    assert (done.returncode, done.stderr) == (2, "dpframe: the data is wrong; mend it\n")
    assert not (tmp_path / "outputs").exists()


def test_the_exception_of_a_data_worker_ends_the_job_with_the_workers_traceback(tmp_path):
    done = broken(tmp_path, "trainer.gpus=2", "data.fault=worker 1", "data.workers=2")
    assert done.returncode == 1
    last = ["LookupError: row 60 is broken", "while reading row 60 of Rows"]
    assert done.stderr.splitlines()[-2:] == last
    assert "Original Traceback" in done.stderr


def test_a_rank_that_hangs_ends_the_job_after_the_timeout(tmp_path):
    done = broken(tmp_path, "trainer.gpus=2", "task.fault=hang 1", "strategy.timeout_seconds=3")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1].endswith("in _work")
    stack = lines[lines.index("rank 1 hung; its stack:") :]
    assert "faulty.py" in stack[2] and stack[2].endswith("in fail")
    assert re.match("rank 0 ended after it: .*Timed out waiting 3000ms", lines[-len(stack) - 1])


TWO_RANKS = ("trainer.gpus=2",)
ALONE = ("strategy=cpu",)
AT_THE_END = ("callbacks=none", "+callbacks.end._target_=faulty.HangsAtTheEnd")
HANGS = {  # what hangs, who says so, the exit code, and where
    "alone": (ALONE, "hang all", "it", 1, "fail"),
    "alone in C": (ALONE, "spin all", "it", -signal.SIGKILL, "spin"),
    "all ranks": (TWO_RANKS, "hang all", "rank [01]", 1, "fail"),
    "a rank in C": (TWO_RANKS, "spin 1", "rank 1", 1, "spin"),
    "the main rank at its end": (
        (*TWO_RANKS, *AT_THE_END, "+callbacks.end.rank='0'"), "", "rank 0", 1, "on_fit_end"
    ),
}  # fmt: skip


def test_a_run_that_makes_no_progress_shows_its_stacks_and_ends(tmp_path):
    """All at once: each of them waits for most of the time."""
    jobs = {}
    with ExitStack() as stack:
        for name, (setting, fault, *_) in HANGS.items():
            folder = tmp_path / name.replace(" ", "-")
            folder.mkdir()
            words = [*setting, f"task.fault={fault}", "trainer.hang_seconds=4"]
            if setting is not ALONE:
                words.append("strategy.timeout_seconds=60")
            jobs[name] = stack.enter_context(forked.started(faulty_words(folder, *words), folder))
        for name, job in jobs.items():
            _, _, who, code, where = HANGS[name]
            assert job.wait() == code, f"{name}: {job.said()}"
            said = job.said()
            assert re.fullmatch(
                r"dpframe: no step, batch or checkpoint came for trainer\.hang_seconds=4; "
                rf"{who} hangs in {where} \(faulty\.py, line \d+\).*; fix that, raise "
                r"trainer\.hang_seconds, or set it to null",
                said.splitlines()[-1],
            ), f"{name}: {said}"
            assert said.count(f"in {where}\n") == (2 if name == "all ranks" else 1), (
                f"{name}: {said}"
            )


@contextmanager
def hanging(folder: Path, fault: str) -> Iterator[forked.Job]:
    """A job of two ranks, each with two data workers, that all wait."""
    words = faulty_words(folder, "trainer.gpus=2", f"task.fault={fault} all", *GRACE)
    with forked.started(words, folder) as job:
        job.wait_for("fault-0", "fault-1")
        yield job


@pytest.mark.parametrize(
    ("number", "code", "fault"),
    [
        (signal.SIGKILL, -9, "ignore"),
        (signal.SIGTERM, 143, "hang"),
    ],
)
def test_a_signal_to_the_parent_leaves_no_rank_and_no_worker(tmp_path, number, code, fault):
    before = set(descendants())
    with hanging(tmp_path, fault) as job:
        assert len(set(descendants()) - before) >= 1 + 2 + 4
        started = time.monotonic()
        os.kill(job.pid, number)
        assert job.wait(FAULT_SECONDS) == code, job.said()
        assert not remaining(lambda: set(descendants()) - before, named=str)
        assert time.monotonic() - started < FAULT_SECONDS


# Starting


def kind_of_process() -> str:
    import multiprocessing

    return type(multiprocessing.current_process()).__name__


STARTS = """
import sys, threading
import torch
from dpframe.strategies import launch
from dpframe.strategies.ddp import DDP
from test_ranks import kind_of_process

if __name__ == "__main__":
    if sys.argv[1] != "unknown":
        launch.allow_fork()
    if sys.argv[1] == "thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if sys.argv[1] == "computed":
        torch.set_num_threads(4)
        torch.ones(512, 512) @ torch.ones(512, 512)
        torch.ones(2**20).add_(1)
    print(DDP(2, "cpu").launch(kind_of_process), flush=True)
"""


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("fresh", "ForkProcess"),
        ("unknown", "SpawnProcess"),
        ("thread", "SpawnProcess"),
        ("computed", "SpawnProcess"),
    ],
)
def test_ranks_are_forked_only_where_nothing_was_computed(tmp_path, state, said):
    (tmp_path / "starts.py").write_text(STARTS)
    done = subprocess.run(
        [sys.executable, "starts.py", state],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == said, done.stderr


def value_of_the_rank(value: int) -> tuple[str, int]:
    return os.environ["RANK"], value


def test_launch_returns_the_value_of_the_main_process_and_puts_everything_back():
    """Environment, signal handlers and threads: conftest's `nothing_leaks` looks at them."""
    assert DDP(2, "cpu").launch(value_of_the_rank, 5) == ("0", 5)


def listening(pid: int) -> list[str]:
    """The addresses at which a process waits for others, as /proc has them."""
    sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                found.append(address.partition(":")[0])
    return found


def listening_of_the_job() -> list[list[str]]:
    strategy = DDP(2, "cpu")
    strategy.setup()
    try:
        strategy.reduce(torch.ones(1))
        return strategy.gather(listening(os.getpid())) + [listening(os.getppid())]
    finally:
        strategy.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_of_one_machine_listens_on_its_loopback_alone(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    *of_ranks, of_parent = DDP(2, "cpu").launch(listening_of_the_job)
    assert of_parent == ["0100007F"]  # 127.0.0.1
    assert all(set(one) <= {"0100007F"} for one in of_ranks), of_ranks


def test_a_network_that_the_user_has_chosen_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert launch.environment_of(0, 2, 1)["GLOO_SOCKET_IFNAME"] == "eth7"


# torchrun


def run_in(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
    )


def last_weights(folder: Path) -> dict[str, Any]:
    (run,) = folder.glob("outputs/boston/*")  # one directory for all ranks
    return checkpoint.load(run / "checkpoints" / "last.ckpt")["task"]


def test_torchrun_gives_the_weights_of_our_own_launch_in_one_directory(tmp_path):
    folders = {name: tmp_path / name for name in ("ours", "torchrun", "cpu")}
    for folder in folders.values():
        folder.mkdir()
    given = [*BOSTON, "trainer.precision='64'"]
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "-m", "dpframe"]
    done = [
        run_in(folders["ours"], "dpframe", *given, "strategy=ddp", "trainer.gpus=2"),
        run_in(folders["torchrun"], *torchrun, *given, "strategy=ddp"),
        run_in(folders["cpu"], "dpframe", *given, "strategy=cpu"),
    ]
    assert [one.returncode for one in done] == [0, 0, 0], [one.stderr for one in done]
    ours, theirs, single = (last_weights(folder) for folder in folders.values())
    assert ours.keys() == theirs.keys() == single.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        torch.testing.assert_close(tensor, single[name], rtol=1e-12, atol=1e-14)


def test_a_wrong_config_under_torchrun_is_told_once(tmp_path):
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "-m", "dpframe"]
    done = run_in(tmp_path, *torchrun, *BOSTON, "strategy=ddp", "trainer.max_epoch=3")
    assert done.returncode != 0
    assert done.stderr.count("dpframe: ") == 1
    assert not (tmp_path / "outputs").exists()


def test_the_other_ranks_of_torchrun_let_the_main_one_speak_first(monkeypatch):
    from dpframe.cli import main as command

    events: list[str] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: events.append(f"waits {seconds}"))
    monkeypatch.setattr(sys.stderr, "write", events.append)
    monkeypatch.delitem(sys.modules, "dpframe.cli.run", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert sys.modules[command.__module__]._say(UserError("wrong")) == 2
    assert "".join(events) == "dpframe: wrong\nwaits 5dpframe: wrong\n"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "the environment contradicts itself: RANK=5"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "finds RANK=x WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "contradicts itself"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "contradicts itself"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "no MASTER_ADDR"),
    ],
)
def test_ranks_that_contradict_themselves_are_refused(monkeypatch, variables, said):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said) as error:
        ranks.this_rank()
    assert "\n" not in str(error.value)


def test_a_contradiction_is_one_line_of_the_command(tmp_path):
    done = run_in(tmp_path, "dpframe", *BOSTON, "strategy=ddp", RANK="5", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr.startswith("dpframe: the environment ")
    assert done.stderr.count("\n") == 1
    done = run_in(tmp_path, "dpframe", *BOSTON, "trainer.max_epoch=3", RANK="x")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
