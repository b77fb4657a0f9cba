"""Jobs on a real Slurm of two nodes (tests/slurm/cluster), by the scripts of examples/clusters."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import forked
import pytest
import torch
from command import ROOT, environment

from dpframe import checkpoint

CLUSTER = ROOT / "tests" / "slurm" / "cluster"
EXAMPLES = ROOT / "examples" / "clusters"
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "ip")
RUN = "recipe=boston trainer.precision='64' callbacks.progress=null logger=none"
ONE_A_NODE = "--ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 --time=5"
OVER = 'until [ -z "$(squeue --noheader)" ]; do sleep 0.1; done'


@cache
def lacking() -> str:
    """Why there can be no cluster here; '': nothing."""
    if programs := [name for name in NEEDED if shutil.which(name) is None]:
        return f"needs {', '.join(programs)}: apt-get install slurm-wlm munge iproute2"
    command = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "ip", "link"]
    tried = subprocess.run(command, capture_output=True, text=True)
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.fixture(autouse=True)
def there_may_be_a_cluster():
    if why := lacking():
        pytest.skip(why)


def on_cluster(script: str, folder: Path) -> str:
    """What it prints, in `folder`, with the scripts of the examples there."""
    for example in EXAMPLES.glob("*.sh"):
        shutil.copy(example, folder)
    (folder / "slurm").mkdir()
    python = str(Path(sys.executable).parent)
    variables = environment(PATH=f"{python}:{os.environ['PATH']}")
    done = subprocess.run(
        [str(CLUSTER), str(folder / "slurm"), f"set -e; {script}"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    logs = "".join(path.read_text() for path in sorted(folder.glob("*.out")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout + logs


def weights(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run / "checkpoints" / "last.ckpt")["task"]


def test_ranks_of_srun_and_of_torchrun_on_two_nodes_have_the_numbers_of_one_process(tmp_path):
    given = f"{RUN} trainer.max_epochs=2"
    on_cluster(
        "srun --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --kill-on-bad-exit=1 "
        f"python -m dpframe {given} strategy=ddp hydra.run.dir=srun\n"
        f"sbatch --wait --gpus-per-node=1 --cpus-per-task=1 --output=torchrun.out "
        f"slurm-torchrun.sh {given}",
        tmp_path,
    )
    forked.run([*given.replace("'64'", "64").split(), "hydra.run.dir=cpu"], tmp_path)
    single = weights(tmp_path / "cpu")
    for place, ranks in (("srun", 4), ("outputs/dpframe-2", 2)):
        run = tmp_path / place
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["strategy"], summary["replicas"]) == ("DDP", ranks)
        for name, tensor in weights(run).items():
            torch.testing.assert_close(tensor, single[name], rtol=1e-12, atol=1e-12)


def test_a_job_that_is_signalled_is_requeued_and_ends_with_the_same_bits(tmp_path):
    given = f"{RUN} trainer.max_epochs=100"
    printed = on_cluster(
        f"sbatch {ONE_A_NODE} --output=job.out slurm.sh {given}\n"
        "until [ -e outputs/dpframe-1/checkpoints/last.ckpt ]; do sleep 0.01; done\n"
        "scancel --signal=USR1 1\n"  # as --signal=USR1@120 does
        f"{OVER}",
        tmp_path,
    )
    assert "interrupted by SIGUSR1 after step" in printed
    words = given.replace("'64'", "64").split()
    forked.run([*words, "strategy=ddp", "trainer.gpus=2", "hydra.run.dir=whole"], tmp_path)
    requeued, whole = weights(tmp_path / "outputs" / "dpframe-1"), weights(tmp_path / "whole")
    assert requeued.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, requeued[name]), name


def test_a_mistake_is_told_once_and_a_number_of_gpus_that_is_no_number_of_tasks_is_refused(
    tmp_path,
):
    printed = on_cluster(
        f"! srun -K -N2 -n2 python -m dpframe {RUN} strategy=ddp trainer.max_epoch=2 2>1.out\n"
        f"! srun -K -N2 -n2 python -m dpframe {RUN} strategy=ddp trainer.gpus=2 2>2.out",
        tmp_path,
    )
    assert printed.count("dpframe: trainer.max_epoch=2: there is no key") == 1
    refused = "dpframe: trainer.gpus=2 but srun has started 1 of the ranks on this machine; leave"
    assert refused in printed
    assert not (tmp_path / "outputs").exists()


def test_scripts_and_shells_of_a_job_start_their_own_ranks_or_none(tmp_path):
    """Only the tasks of a step are ranks: the rest would wait for peers for ever."""
    seen = tmp_path / "seen.py"
    seen.write_text(
        "import os; from dpframe.launch.environment import *; print(read_variables(os.environ))"
    )
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{sys.executable} seen.py\n")
    printed = on_cluster(
        f"salloc -Q -N2 -n2 {sys.executable} seen.py\n"
        f"sbatch -Q --wait -N2 -n2 -o sbatch.out job.sh\n"
        f"srun -N1 -n1 --overcommit sbatch -Q --wait -n2 -o nested.out job.sh\n"
        "scontrol show hostnames 'a[01-04,07],b3' | head -n 1\n"
        f"salloc -Q -N2 -n3 srun -n3 {sys.executable} seen.py",
        tmp_path,
    )
    alone, first, *tasks = printed.split("\n")[:5]
    assert (alone, first) == ("{}", "a01")
    ranks = [eval(task) for task in tasks]
    assert sorted(rank["RANK"] for rank in ranks) == ["0", "1", "2"]
    assert sorted(rank["LOCAL_WORLD_SIZE"] for rank in ranks) == ["1", "2", "2"]
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"n1"}
    assert len({rank["MASTER_PORT"] for rank in ranks}) == 1
    assert (tmp_path / "sbatch.out").read_text() == "{}\n"
    assert (tmp_path / "nested.out").read_text() == "{}\n"


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpirun.mpich"])
def test_ranks_of_mpirun_meet_on_the_first_node_of_their_job(tmp_path, mpirun):
    if shutil.which(mpirun) is None:
        pytest.skip(f"needs {mpirun}: apt-get install {mpirun.partition('.')[2]}")
    (tmp_path / "seen.py").write_text(
        "import os; from dpframe.launch.environment import *; print(read_variables(os.environ))"
    )
    root = "--allow-run-as-root" if mpirun.endswith("openmpi") else ""
    command = f"{mpirun} {root} {sys.executable} seen.py"
    printed = on_cluster(f"salloc -Q -N2 --ntasks-per-node=1 {command}", tmp_path)
    ranks = [eval(line) for line in printed.splitlines()]
    assert sorted(rank["RANK"] for rank in ranks) == ["0", "1"]
    assert {rank["LOCAL_WORLD_SIZE"] for rank in ranks} == {"1"}
    (place,) = {(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}
    assert place[0] == "n1" and place[1] != "29500"  # another job's, on a node that they share


def test_a_sweep_by_submitit_is_a_job_for_each_point_and_a_task_for_each_rank(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs dpframe[slurm]")
    printed = on_cluster(
        f"python -m dpframe -m {RUN} strategy=ddp trainer.max_epochs=1 task.optimizer.lr=0.01,0.001"
        " hydra/launcher=submitit_slurm hydra.launcher.tasks_per_node=2 "
        "hydra.launcher.timeout_min=5 hydra.sweep.dir=rates",
        tmp_path,
    )
    assert "sweep: 2 of 2 runs finished" in printed
    runs = json.loads((tmp_path / "rates" / "sweep.json").read_text())["runs"]
    for run in runs:
        summary = json.loads((tmp_path / "rates" / run["directory"] / "summary.json").read_text())
        assert (summary["strategy"], summary["replicas"]) == ("DDP", 2)
