"""Real processes: how ranks start, how torchrun's join, and how each kind of fault ends the job."""

import gc
import json
import logging
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forked
import pytest
import test_torchrun
import torch
import torch.distributed as dist
from command import ROOT, cold_dpframe, environment, output, write
from conftest import descendants, remaining
from forked import on
from injector import fail_at, run, started
from small import Listed, Rows, fitted, is_same

from dpframe import UserError, checkpoint
from dpframe.errors import Interrupted
from dpframe.launch import local, watchdog
from dpframe.launch.environment import read_rank
from dpframe.launch.rank_errors import RankFailed
from dpframe.launch.signals import Interruption
from dpframe.strategies import processes
from dpframe.strategies.ddp import DDP

TWO = ("strategy=ddp", "trainer.gpus=2", "logger=none")
BOSTON = ["recipe=boston", "trainer.max_epochs=2", "logger=none"]

# Faults


def broken(
    folder: Path, *overrides: str, rank: int | str, kind: str
) -> tuple[list[str], list[str]]:
    """What a job of two ranks whose third step fails says, and what its run.log ends with. The
    fault ends it, no timeout: those are of 30 minutes, and `run` waits for 200 s. Nothing of it is
    left then: data workers end with their rank, one by one."""
    before = set(descendants())
    done = run(folder, *TWO, *overrides, **fail_at(rank, 3, kind))
    assert not remaining(lambda: set(descendants()) - before, named=str)
    assert done.returncode == (2 if kind == "refuse" else 1), done.stderr
    return told_and_logged(folder, done.stderr, kind)


def told_and_logged(folder: Path, stderr: str, kind: str) -> tuple[list[str], list[str]]:
    log, parent = folder / "run/run.log", " [parent] ERROR dpframe: "
    logged = log.read_text().splitlines() if log.exists() else []
    lines = told(stderr)
    assert kind == "refuse" or log.exists() == (lines != stderr.splitlines())
    return lines, [s.partition(parent)[2] for s in logged if parent in s]


def told(stderr: str) -> list[str]:
    """What a job said, but for its last line where its directory is left."""
    lines = stderr.splitlines()
    return lines[:-1] if lines[-1].startswith("dpframe: the run is in run; ") else lines


FOLD = r"  … \d+ frames of dpframe \(HYDRA_FULL_ERROR=1 shows them\)"


@pytest.mark.parametrize("rank", [0, 1, "all"])
def test_a_rank_that_raises_has_its_traceback_last_on_stderr(tmp_path, rank):
    lines, log = broken(tmp_path, rank=rank, kind="raise")
    (failed,) = [line for line in lines if re.fullmatch(r"rank \d failed:", line)]
    peer, _, traceback = log[:3]
    assert lines[:3] == log[:3] == [peer, failed, traceback]
    assert re.fullmatch(FOLD, lines[3]) and lines[4:] == log[4 - len(lines) :]
    assert peer.startswith(f"rank {1 - int(failed[5])} ended after it: ")
    assert traceback == "Traceback (most recent call last):" and log.count(traceback) == 1
    assert lines[-1] == f"ValueError: broken in {failed.removesuffix(' failed:')}"
    assert rank in ("all", int(failed[5]))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_told_at_once_while_its_peer_waits_in_nccl(
    tmp_path, monkeypatch, rank
):
    """NCCL lets go of a group when all ranks do so; fake GPUs play that by this switch."""
    monkeypatch.setenv("FAKENCCL_STRICT", "1")
    lines, _ = broken(tmp_path, "trainer.accelerator=cuda", rank=rank, kind="raise")
    assert f"rank {rank} failed:" in lines
    assert lines[-1] == f"ValueError: broken in rank {rank}"


@pytest.mark.parametrize("rank, workers", [(0, 2), (1, 0)])
def test_a_rank_that_is_killed_is_named(tmp_path, rank, workers):
    lines, log = broken(tmp_path, f"data.workers={workers}", rank=rank, kind="kill")
    peer, failed, last = lines
    assert peer.startswith(f"rank {1 - rank} ended after it: ")
    assert failed == f"rank {rank} failed:" and last.startswith("killed by SIGKILL (pid ")
    assert log == lines


def test_a_rank_that_leaves_with_0_before_its_work_is_done_has_failed(tmp_path):
    lines, log = broken(tmp_path, rank=0, kind="exit0")
    assert lines[-2] == "rank 0 failed:" and log == lines
    assert re.fullmatch(r"left with exit code 0 before its work was done \(pid \d+\)", lines[-1])


@pytest.mark.parametrize("rank", [1, "all"])
def test_what_a_user_did_wrong_is_one_line_and_exit_code_2(tmp_path, rank):
    lines, _ = broken(tmp_path, rank=rank, kind="refuse")
    assert lines == ["dpframe: the data is wrong; fix it"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())  # steps were made
    assert (summary["status"], summary["reason"]) == ("failed", "the data is wrong; fix it")


UNCHECKED = "trainer.share_check=off"  # which reads rows before the workers do


def test_the_exception_of_a_data_worker_ends_the_job_with_the_workers_traceback(tmp_path):
    lines, _ = broken(tmp_path, "data.workers=2", UNCHECKED, rank=1, kind="raise-data")
    assert "ValueError: broken in rank 1" in lines
    assert any("Original Traceback" in line for line in lines)


TIMEOUT = 4
HANGING = {"hang": "in _fail", "data": "in _received", "collective": "in _fail"}


def test_the_stack_of_a_rank_that_hangs_is_last(tmp_path):
    """All at once: each of them waits for most of the time."""
    before, jobs = set(descendants()), {}
    with ExitStack() as stack:
        for kind in HANGING:
            workers = f"data.workers={int(kind == 'data')}"
            given = f"strategy.timeout_seconds={TIMEOUT}", workers, UNCHECKED
            job = started(tmp_path / kind, *TWO, *given, **fail_at(1, 3, kind))
            jobs[kind] = stack.enter_context(job)
        for kind, job in jobs.items():
            assert job.wait() == 1, f"{kind}: {job.said()}"
            check_stack(kind, told_and_logged(job.folder, job.said(), kind)[0])
    assert not remaining(lambda: set(descendants()) - before, named=str)


def check_stack(kind: str, lines: list[str]) -> None:
    text = "\n".join(lines)
    assert lines[0].startswith("rank 0 ended after it: "), text
    assert f"Timed out waiting {TIMEOUT}000ms" in text
    if kind == "collective":  # it has timed out there
        assert lines[1:3] == [
            "the ranks waited for each other in different collectives", "rank 1 failed:"
        ]  # fmt: skip
        assert re.search(r"injector.py\", line \d+, in _fail\n    dist.barrier\(\)\n", text)
        assert text.count("Traceback") == 1
    else:
        assert lines[1] == "rank 1 hung; its stack:" and lines[-1].endswith("in _run_rank")
        assert any(line.endswith(HANGING[kind]) for line in lines), text
        assert "Traceback" not in text


def never_comes() -> None:
    time.sleep(600)


def waits_for_a_rank_that_never_comes() -> None:
    """As NCCL does it: a watchdog ends the rank that waits."""
    if os.environ["RANK"] == "1":
        never_comes()
    time.sleep(1)
    os.abort()


def as_on_gpus() -> None:
    """But forked, as there are none."""
    with patch.object(local, "choose_start_method", lambda uses_gpus: "fork"):
        local.launch(
            waits_for_a_rank_that_never_comes, (), count=2, uses_gpus=True, timeout_seconds=600
        )


def test_the_rank_that_did_not_come_is_named_where_a_watchdog_ends_those_that_waited():
    with pytest.raises(RankFailed) as caught:
        forked.fresh(as_on_gpus)
    first, heading, *stack = str(caught.value).splitlines()
    assert re.fullmatch(r"rank 0 ended after it: killed by SIGABRT \(pid \d+\)", first)
    assert heading == "rank 1 hung; its stack:"
    assert any(line.endswith("in never_comes") for line in stack)


def ended_unread(number: int) -> Any:
    """What a job is whose ranks end after the parent has read them, before it looks again."""
    begin, begun = os.pipe()

    def end_all(job: Any) -> bool:
        os.write(begun, b"12")
        for rank in job.ranks:
            rank.process.join()
        return False

    def rank() -> int:
        os.read(begin, 1)
        if number:
            os.kill(os.getpid(), number)
        return 3

    with patch.object(local._Job, "_hangs", end_all):
        return local.launch(rank, (), count=2, uses_gpus=False, timeout_seconds=60.0)


def test_what_ranks_say_is_read_when_all_of_them_end_at_once():
    assert forked.fresh(ended_unread, 0) == 3
    with pytest.raises(RankFailed, match="rank 0 failed:\nkilled by SIGKILL"):
        forked.fresh(ended_unread, signal.SIGKILL)


def test_nccls_watchdog_ends_a_rank_soon_after_its_timeout(monkeypatch):
    assert local.make_environment(0, 2, 1)[local.DUMP_WAIT] == "500"
    monkeypatch.setenv(local.DUMP_WAIT, "15000")
    assert local.make_environment(0, 2, 1)[local.DUMP_WAIT] == "15000"


def waits_in_a_collective() -> None:
    strategy = DDP(2, accelerator="cuda", timeout_seconds=TIMEOUT)
    strategy.setup()
    if strategy.rank == 1:
        never_comes()
    strategy.collectives.sum(torch.ones(1)).item()


@pytest.mark.gpu(2)
def test_a_rank_that_comes_to_no_collective_of_gpus_is_named_in_time():
    with pytest.raises(RankFailed, match=r"(?s)^rank 0 ended .*\nrank 1 hung; its stack:\n"):
        DDP(2, accelerator="cuda", timeout_seconds=TIMEOUT).launch(waits_in_a_collective)


ALONE = ("strategy=cpu", "logger=none")
AT_THE_END = (*TWO, "+callbacks.end._target_=injector.HangsAtTheEnd")
NO_SIGN = (
    "dpframe: no step, batch or checkpoint came for trainer.hang_seconds=4; fix that, raise it, or "
    "set it to null"
)
HANGS = {  # what hangs, what is said first and last, who hung, and where
    "alone": (ALONE, "hang all", r"Timeout \(0:00:04\)!", ".*", "", "_fail"),
    "alone in C": (ALONE, "spin all", r"Timeout \(0:00:04\)!", ".*", "", "_fail"),
    "all ranks": (TWO, "hang all", "rank [01] hung as well; .*", NO_SIGN, "[01]", "_fail"),
    "a rank in C": (TWO, "spin 1", "rank [01] .*", NO_SIGN, "1", "_fail"),
    "the main rank at its end": (AT_THE_END, "none none", ".*", NO_SIGN, "0", "on_fit_end"),
}


def test_a_run_that_makes_no_progress_shows_its_stacks_and_ends(tmp_path):
    """All at once: each of them waits for most of the time."""
    jobs = {}
    with ExitStack() as stack:
        for name, (setting, fault, *_) in HANGS.items():
            words = tmp_path / name.replace(" ", "-"), *setting, "trainer.hang_seconds=4"
            jobs[name] = stack.enter_context(started(*words, INJECTED=f"{fault} 3"))
        for name, job in jobs.items():
            _, _, first, last, who, where = HANGS[name]
            assert job.wait() == 1, f"{name}: {job.said()}"
            lines = told(job.said())
            assert re.fullmatch(first, lines[0]) and re.fullmatch(last, lines[-1]), lines
            at = [line for line in lines if line.endswith(f" in {where}") and "injector.py" in line]
            assert len(at) == (2 if name == "all ranks" else 1), lines
            if who:
                (hung,) = [line for line in lines if line.endswith(" hung; its stack:")]
                assert re.fullmatch(f"rank {who} hung; its stack:", hung)


@pytest.mark.parametrize(
    "number, code, kind", [(signal.SIGKILL, -9, "ignore"), (signal.SIGTERM, 143, "hang")]
)
def test_a_signal_to_the_parent_leaves_no_rank_and_no_worker(tmp_path, number, code, kind):
    before = set(descendants())
    grace = ("data.workers=2", "trainer.grace_seconds=0.5")
    with started(tmp_path, *TWO, *grace, **fail_at("all", 3, kind)) as job:
        job.wait_for("fired-0", "fired-1")
        assert len(set(descendants()) - before) >= 1 + 2 + 4
        os.kill(job.pid, number)
        assert job.wait() == code, job.said()
        assert not remaining(lambda: set(descendants()) - before, named=str)


# Starting


def start_methods() -> list[str]:
    """Of a process that has computed nothing, beside a thread, and once it has computed."""
    methods, over = [local.choose_start_method(uses_gpus=False)], threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    methods.append(local.choose_start_method(uses_gpus=False))
    over.set()
    thread.join()
    torch.set_num_threads(4)
    torch.ones(512, 512) @ torch.ones(512, 512)
    torch.ones(2**20).add_(1)
    return [*methods, local.choose_start_method(uses_gpus=False)]


def test_ranks_are_forked_only_where_nothing_was_computed():
    assert forked.fresh(start_methods) == ["fork", "spawn", "spawn"]
    code = "from dpframe.launch import local; print(local.choose_start_method(uses_gpus=False))"
    assert output(sys.executable, "-c", code, cwd=ROOT) == "spawn\n"  # nobody has allowed it


def value_of_the_rank(value: int) -> tuple[str, int]:
    return os.environ["RANK"], value


def collected(strategy: DDP) -> list[tuple[int, int]]:
    return strategy.collectives.gather((gc.get_freeze_count(), len(gc.get_objects())))


def test_a_collection_in_a_rank_looks_at_nothing_that_its_parent_had():
    for left_out, looked_at in forked.on(DDP(2, "cpu"), collected):
        assert left_out > 100_000 > looked_at


def test_launch_returns_the_value_of_the_main_process_and_puts_everything_back():
    """Environment, signal handlers and threads: conftest's `nothing_leaks` looks at them."""
    assert DDP(2, "cpu").launch(value_of_the_rank, 5) == ("0", 5)


def raises_in_one() -> None:
    if os.environ["RANK"] == "0":
        raise ValueError("broken")
    time.sleep(60)  # or less: it is ended


def test_a_rank_that_sleeps_does_not_keep_a_job_whose_other_rank_has_failed():
    with pytest.raises(RankFailed, match=r"(?s)rank 1 ended .*ValueError: broken$"):
        forked.fresh(DDP(2, "cpu").launch, raises_in_one)


def waits_for_a_rank_that_has_ended(strategy: DDP) -> None:
    if strategy.rank == 0:
        dist.new_group(timeout=timedelta(minutes=10))


def test_a_rank_that_waits_for_one_that_has_ended_is_told_with_its_stack():
    with pytest.raises(RankFailed) as caught:
        on(DDP(2, "cpu"), waits_for_a_rank_that_has_ended)
    heading, *stack, advice = str(caught.value).splitlines()
    assert heading == "rank 0 hung; its stack:"
    assert any(line.endswith("in waits_for_a_rank_that_has_ended") for line in stack)
    assert advice == (
        "dpframe: rank 1 has ended, and rank 0 waits for it in a collective; every rank has to "
        "come to the same ones"
    )


def works_on_alone(strategy: DDP) -> str:
    """For longer than ranks are looked at that wait for one that has ended."""
    if strategy.rank == 0:
        for _ in range(5):
            time.sleep(2 * local.LOOK_SECONDS)
    return "written"


def looking_often() -> None:
    local.LOOK_SECONDS = 0.1


def test_a_main_rank_that_works_on_alone_is_left_at_it():
    assert on(DDP(2, "cpu"), works_on_alone, enter=looking_often) == "written"


def joins_alone() -> None:
    """Rank 0 waits in C code, where Python hears no signal."""
    if os.environ["RANK"] == "1":
        time.sleep(600)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    Path("joining").touch()
    DDP(2, "cpu").setup()


def starts_ranks() -> None:
    Interruption().open()
    local.allow_fork()
    try:
        DDP(2, "cpu").launch(joins_alone)
    except Interrupted as error:
        print(error)


def test_a_signal_while_ranks_join_each_other_ends_them_at_once(tmp_path):
    """Before training they have nothing to save: `trainer.grace_seconds` (30) is for that."""
    with forked.started([], tmp_path, program=starts_ranks) as job:
        job.wait_for("joining")
        os.kill(job.pid, signal.SIGTERM)
        job.wait()
        assert job.printed() == "interrupted by SIGTERM\n"


def trained_by_workers(strategy: DDP) -> dict[str, Any]:
    data = Rows()
    data.train, data.workers = Listed(data.train), 1
    return fitted(data=data, strategy=strategy).task.state_dict()


def stop_first_forks(log: Path) -> None:
    forked.stop_forks(0)
    watchdog.BEGIN_SECONDS = (0.2, 100.0)
    logging.getLogger("dpframe").addHandler(logging.FileHandler(log))


def test_ranks_and_their_workers_that_do_not_begin_are_started_again(tmp_path):
    """The first fork of each process hangs."""
    whole = forked.on(DDP(2, "cpu"), trained_by_workers)
    enter = partial(stop_first_forks, tmp_path / "log")
    assert is_same(forked.on(DDP(2, "cpu"), trained_by_workers, enter=enter), whole)
    log = (tmp_path / "log").read_text()
    late = r"\(pid \d+\) has not begun in 0\.2 s; "
    assert re.search(rf"^rank 0 {late}it is started again$", log, re.M)
    worker = rf"^data worker 0 {late}all data workers are started again$"
    assert len(re.findall(worker, log, re.M)) == 2


def added_up(strategy: DDP) -> float:
    return strategy.collectives.sum(torch.ones(1)).item()


def added_up_with_files(more: int) -> float:
    """A sum of the ranks, where a process may open so many files more than this one has."""
    limit = len(os.listdir("/dev/fd")) + more
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    return forked.launched(DDP(2, "cpu"), added_up)


def test_ranks_that_may_not_open_enough_files_are_refused_before_they_start():
    """With a few less than half of these, their store would leave them waiting."""
    assert forked.fresh(added_up_with_files, 32) == 2.0
    with pytest.raises(UserError) as caught:
        forked.fresh(added_up_with_files, 16)
    assert re.fullmatch(
        r"2 ranks need up to \d+ open files in a process, and it may open \d+; ulimit -n 1024",
        str(caught.value),
    )


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


def listening_of_the_job(strategy: DDP) -> list[list[str]]:
    strategy.collectives.sum(torch.ones(1))
    return strategy.collectives.gather(listening(os.getpid())) + [listening(os.getppid())]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_of_one_machine_listens_on_its_loopback_alone(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    *of_ranks, of_parent = forked.on(DDP(2, "cpu"), listening_of_the_job)
    assert of_parent == ["0100007F"]  # 127.0.0.1
    assert all(set(one) <= {"0100007F"} for one in of_ranks), of_ranks


def test_a_network_that_the_user_has_chosen_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert local.make_environment(0, 2, 1)["GLOO_SOCKET_IFNAME"] == "eth7"


# torchrun


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "dpframe"]
    return subprocess.run(
        [*command, *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )


def torchrun_forked(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Its agent and its ranks are forks."""
    meets = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]  # as --standalone says
    line = [*meets, "--nproc-per-node=2", "-m", "dpframe", *words]
    with forked.started(line, folder, program=test_torchrun.torchrun, **environment()) as job:
        return subprocess.CompletedProcess(line, job.wait(), job.printed(), job.said())


def last_weights(folder: Path) -> dict[str, Any]:
    (run,) = folder.glob("outputs/boston/*")  # one directory for all ranks
    return checkpoint.load(run / "checkpoints" / "last.ckpt")["task"]


@pytest.mark.parametrize(("strategy", "start"), [("ddp", torchrun), ("fsdp", torchrun_forked)])
def test_torchrun_gives_the_weights_of_our_own_launch_in_one_directory(tmp_path, strategy, start):
    folders = {name: tmp_path / name for name in ("ours", "torchrun", "cpu")}
    for folder in folders.values():
        folder.mkdir()
    given = [*BOSTON, "trainer.precision='64'"]
    done = [
        forked.run([*given, f"strategy={strategy}", "trainer.gpus=2"], folders["ours"]),
        start(folders["torchrun"], *given, f"strategy={strategy}"),
        forked.run([*given, "strategy=cpu"], folders["cpu"]),
    ]
    assert [one.returncode for one in done] == [0, 0, 0], [one.stderr for one in done]
    ours, theirs, single = (last_weights(folder) for folder in folders.values())
    assert ours.keys() == theirs.keys() == single.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        torch.testing.assert_close(tensor, single[name], rtol=1e-12, atol=1e-14)


TELLS = """
import atexit
import os
import threading
from pathlib import Path
from dpframe import Callback

if "RANK" not in os.environ:  # this process can't be forked
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def tell():
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    Path("threads-" + os.environ["RANK"]).write_text("".join(names))

class Tells(Callback):
    def on_fit_start(self, trainer):
        atexit.register(tell)

class Fails(Callback):
    def on_fit_end(self, trainer):
        raise KeyError
"""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
TOLD = ("+callbacks.tells._target_=tells.Tells",)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
@pytest.mark.parametrize(
    "words, variables, code",
    [
        (["strategy=ddp"], ALONE, 0),
        (["strategy=fsdp", "+callbacks.fails._target_=tells.Fails"], ALONE, 1),
        (["strategy=fsdp", "trainer.gpus=2"], {}, 0),
    ],
    ids=["ddp", "failed", "spawned"],
)
def test_the_threads_of_a_ranks_group_end_before_its_interpreter(tmp_path, words, variables, code):
    """One of gloo's that lets go of a tensor would wait for an interpreter that is gone, which
    aborts the process: `terminate called without an active exception`."""
    write(tmp_path, {"tells.py": TELLS})
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = cold_dpframe(*BOSTON, *words, *TOLD, cwd=tmp_path, **variables, **path)
    assert done.returncode == code, done.stderr
    told = list(tmp_path.glob("threads-*"))
    assert len(told) == (1 if variables else 2)
    for each in told:
        names = each.read_text().split()
        assert not [name for name in names if name.startswith(("gloo_", "pt_"))]


def test_a_torch_without_distributed_nn_needs_no_guard_against_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.nn", None)  # as if it were not there
    assert "Processes" in runpy.run_path(processes.__file__)


def test_a_wrong_config_under_torchrun_is_told_once(tmp_path):
    done = torchrun(tmp_path, *BOSTON, "strategy=ddp", "trainer.max_epoch=3")
    assert done.returncode != 0
    assert done.stderr.count("dpframe: ") == 1
    assert not (tmp_path / "outputs").exists()


def test_the_other_ranks_of_torchrun_let_the_main_one_speak_first(monkeypatch):
    from dpframe.cli.exit import say

    events: list[str] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: events.append(f"waits {seconds}"))
    monkeypatch.setattr(sys.stderr, "write", events.append)
    monkeypatch.delitem(sys.modules, "dpframe.modes.run", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert say(UserError("wrong")) == 2
    assert "".join(events) == "dpframe: wrong\nwaits 5dpframe: wrong\n"


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "5"},
        {"RANK": "x"},
        {"RANK": "1", "LOCAL_RANK": "2"},
        {"WORLD_SIZE": "0"},
        {"MASTER_ADDR": ""},
    ],
)
def test_ranks_that_contradict_themselves_are_refused(monkeypatch, variables):
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (whole | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match="^the environment .* fits no rank of strategy=ddp; start this"
    ) as error:
        read_rank()
    for name, value in variables.items():
        assert f" {name}={value or '(unset)'}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_contradiction_is_one_line_of_the_command(tmp_path):
    for words, variables in (
        (["strategy=ddp"], {"RANK": "5", "WORLD_SIZE": "2"}),
        (["trainer.max_epoch=3"], {"RANK": "x"}),
    ):
        done = forked.run([*BOSTON, *words], tmp_path, **variables)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
