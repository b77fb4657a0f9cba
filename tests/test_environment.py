"""What srun and mpirun tell a process, as it was recorded: which of them are ranks, and which."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from command import ROOT, environment, write

from dpframe import UserError, checkpoint
from dpframe.launch.environment import find_interface, read_rank, read_variables
from dpframe.strategies.ddp import DDP

RUN = ["recipe=boston", "trainer.max_epochs=2", "trainer.precision='64'", "callbacks.progress=null"]
TASK = {  # the second of two on the first node, of three: `srun -N2 -n3`
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1360330753",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# Open MPI starts a daemon on each node by srun, whose variables its ranks inherit.
UNDER_SLURM = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
UNDER_SLURM |= {"SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    "given, expected",
    [
        (TASK, ("1", "3", "1", "2", "gpu01")),
        (TASK | {"SLURM_NODEID": "1", "SLURM_PROCID": "2"}, ("2", "3", "1", "1", "gpu01")),
        (TASK | {"MASTER_ADDR": "10.0.0.7"}, ("1", "3", "1", "2", "10.0.0.7")),
        (TASK | {"WORLD_SIZE": "8"}, ("1", "3", "1", "2", "gpu01")),  # exported by a script
        (OPEN_MPI | UNDER_SLURM, ("3", "4", "1", "2", "n1")),
        (OPEN_MPI | {"MASTER_ADDR": "head"}, ("3", "4", "1", "2", "head")),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("3", "4", "1", "4", "127.0.0.1")),
        (MPICH, ("1", "2", "1", "2", "127.0.0.1")),
    ],
)
def test_a_rank_of_srun_or_mpirun_is_what_torchrun_would_call_it(given, expected):
    found = read_variables(given)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert tuple(found[name] for name in names) == expected
    assert 1024 < int(found["MASTER_PORT"]) < 32768


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        TASK | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        TASK | {"SLURM_NTASKS": "4"},  # the script of a job that a task has submitted
        TASK | {"SLURM_PTY_PORT": "37609"},
        TASK | {"RANK": "0", "WORLD_SIZE": "8"},  # srun torchrun
        MPICH | {"PMI_SIZE": "1"},
    ],
)
def test_a_process_without_peers_of_srun_or_mpirun_is_no_rank(given):
    assert read_variables(given) == {}


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("a[01-04,07],b3", "a01"),
        ("r[0-1]n[3,5]", "r0n3"),
        ("b,a[1-2]", "b"),
    ],
)
def test_the_first_node_is_that_of_scontrol(nodes, first):
    assert read_variables(TASK | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_jobs_and_steps_on_one_machine_meet_at_ports_of_their_own():
    jobs = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job, step in PLACES]
    assert len({read_variables(TASK | job)["MASTER_PORT"] for job in jobs}) == len(PLACES)


PLACES = [(job, step) for job in range(100, 108) for step in range(2)]


def test_ranks_whose_peers_are_nowhere_are_refused_with_what_to_add(monkeypatch):
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    for name, value in read_variables(OPEN_MPI).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="^mpirun does not tell .* add -x MASTER_ADDR=HOST -x"):
        read_rank()


def test_another_number_of_gpus_than_of_tasks_is_refused_by_the_launchers_words(monkeypatch):
    for name, value in (TASK | read_variables(TASK)).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        DDP(4, "cpu").setup()
    assert str(error.value) == (
        "trainer.gpus=4 but srun has started 2 of the ranks on this machine; leave trainer.gpus "
        "out, or use --ntasks-per-node=4"
    )


def test_a_port_that_is_taken_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        task = TASK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"} | address
        done = forked.run([*RUN, "strategy=ddp"], tmp_path, **task)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "REHEARSAL" not in line]
    assert line.startswith("dpframe: rank 0 on ") and "Address already in use; export" in line


def meets_twice() -> None:
    for seconds in (600, 300):
        with DDP(accelerator="cpu", timeout_seconds=seconds) as strategy:
            print(strategy.collectives.sum_numbers([1.0]))


def two_tasks(job: str) -> dict[str, str]:
    """Of ``srun -n2`` on this machine; the job's number decides the port where they meet."""
    two = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    return TASK | two | {"SLURM_JOB_ID": job, "MASTER_ADDR": "127.0.0.1"}


def test_a_second_group_of_srun_may_have_another_timeout(tmp_path):
    two = two_tasks(job="8")
    tasks = [two | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    with (
        forked.started([], tmp_path, program=meets_twice, **tasks[0]) as main,
        forked.started([], tmp_path, program=meets_twice, **tasks[1]) as other,
    ):
        for job in (main, other):
            assert job.wait() == 0, job.said()
            assert job.printed() == "[2.0]\n[2.0]\n"


@pytest.mark.whole
def test_a_mode_of_one_process_is_refused_under_srun(tmp_path):
    task = TASK | {"SLURM_PROCID": "0"}
    for mode in ("tune", "verify"):
        done = forked.run([*RUN, f"mode={mode}"], tmp_path, **task)
        assert done.returncode == 2 and "start it without srun" in done.stderr, done.stderr


SLOW = {
    "mine/callbacks/slow.yaml": "defaults: [default]\nslow:\n  _target_: slow.Slow\n",
    "slow.py": """
import os
import time
from pathlib import Path
from dpframe import Callback

class Slow(Callback):
    def on_step_end(self, trainer, *rest):
        Path(f"training-{trainer.strategy.rank}").touch()
        time.sleep(0.05)

replace = os.replace

def slowly(part, whole):  # as the save of a large model on a slow disk
    time.sleep(1 if str(whole).endswith("last.ckpt") else 0)
    replace(part, whole)

os.replace = slowly
""",
}


def test_on_a_signal_the_other_ranks_wait_for_the_main_one_to_save(tmp_path):
    """Slurm ends all tasks when the first one leaves."""
    write(tmp_path, SLOW)
    words = ["--config-dir", "mine", *RUN, "callbacks=slow", "strategy=ddp", "hydra.run.dir=run"]
    two = two_tasks(job="9") | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    tasks = [two | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    more = ["trainer.max_epochs=100"]
    with (
        forked.started([*words, *more], tmp_path, **tasks[0]) as main,
        forked.started([*words, *more], tmp_path, **tasks[1]) as other,
    ):
        other.wait_for("training-0", "training-1")
        for job in (main, other):
            os.kill(job.pid, signal.SIGUSR1)
        assert other.wait() == 138, other.said()
        other_ended = time.time()
        assert main.wait() == 138, main.said()
        assert "go on with resume=run" in main.said()
    renamed = (tmp_path / "run" / "checkpoints" / "last.ckpt").stat().st_ctime
    assert renamed <= other_ended


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpirun.mpich"])
def test_mpirun_gives_the_curve_of_one_process(tmp_path, mpirun):
    if shutil.which(mpirun) is None:
        pytest.skip(f"needs {mpirun}: apt-get install {mpirun.partition('.')[2]}")
    more = ["--allow-run-as-root", "--oversubscribe"] if mpirun.endswith("openmpi") else []
    command = [mpirun, *more, "-np", "2", sys.executable, "-m", "dpframe", *RUN]
    done = subprocess.run(
        [*command, "strategy=ddp", "hydra.run.dir=mpi"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    forked.run([*RUN, "strategy=cpu", "hydra.run.dir=cpu"], tmp_path)
    theirs, single = (weights(tmp_path / name) for name in ("mpi", "cpu"))
    for name, tensor in single.items():
        assert (tensor - theirs[name]).abs().max() <= 1e-12, name
    summary = json.loads((tmp_path / "mpi" / "summary.json").read_text())
    assert (summary["strategy"], summary["replicas"]) == ("DDP", 2)


def weights(run: Path):
    return checkpoint.load(run / "checkpoints" / "last.ckpt")["task"]


def test_ranks_talk_through_the_interface_that_leads_to_the_first_one(monkeypatch):
    assert find_interface("127.0.0.1", 1) == find_interface("localhost", 1) == "lo"
    assert find_interface("192.0.2.1", 1) in (None, *dict(socket.if_nameindex()).values())
    own = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: own)
    assert find_interface("node1", 1) is None  # as Debian's /etc/hosts has a machine's own name
