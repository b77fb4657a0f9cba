"""Several machines, made up of namespaces: one job, one voice, the numbers of one machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import forked
import injector
import pytest
import torch
from command import ROOT, attempts
from nodes.hosts import Host, hosts, why_not
from small import is_same

from dpframe import checkpoint
from dpframe.checkpoint import seal
from dpframe.strategies import network
from dpframe.strategies.nodes import numbered

TESTS = Path(__file__).resolve().parent
NODES = ("strategy=ddp", "trainer.nodes=2", "trainer.rendezvous=10.77.0.1:29500")
WHERE = "dpframe: the run is in run; nothing was saved"  # a failed job's last line
BOSTON = ("recipe=boston", "trainer.max_epochs=2", "trainer.precision='64'", "logger=none")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Host]]:
    if reason := why_not():
        pytest.skip(reason)
    with hosts(tmp_path, 2) as made:
        yield made


class Ended:
    def __init__(self, job: forked.Job) -> None:
        self.code, self.printed, self.said = job.code, job.printed(), job.said()
        lines = self.said.splitlines()  # torch warns that a host without DNS has no name
        self.lines = [line for line in lines if "REHEARSAL" not in line and "[c10d]" not in line]


def run(two: list[Host], *words: str, **variables: str) -> list[Ended]:
    """The same command on both."""
    with ExitStack() as running:
        jobs = [running.enter_context(host.started(words, **variables)) for host in two]
        for job in jobs:
            job.wait()
        return [Ended(job) for job in jobs]


def files_of(host: Host) -> set[str]:
    return {str(p.relative_to(host.disk)) for p in host.disk.rglob("*") if p.is_file()}


def last(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("outputs/boston/*/checkpoints/last.ckpt")
    return checkpoint.load(path)["task"]


def test_two_nodes_have_the_numbers_of_one_machine_and_the_first_one_alone_writes(two, tmp_path):
    one, other = run(two, *NODES, *BOSTON, "trainer.gpus=2")
    assert (one.code, other.code) == (0, 0), one.said + other.said
    assert "DDP on 4 x cpu: 4 replicas = 2 nodes x 2\n" in one.printed
    assert other.printed == "" and one.lines == other.lines == []
    assert files_of(two[1]) == set()
    alone = forked.run([*BOSTON, "strategy=cpu"], tmp_path)
    assert alone.returncode == 0, alone.stderr
    theirs, ours = last(two[0].disk), last(tmp_path)
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-12, atol=1e-14)


def injected(two: list[Host], *words: str) -> list[str]:
    for host in two:
        injector.words(host.disk)
    given = [f"--config-dir={two[0].local}", "recipe=injected", "hydra.run.dir=run", *NODES]
    return [*given, "trainer.gpus=1", "logger=none", *words]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_speaks_last_on_both_nodes_with_its_nodes_name(two, rank):
    one, other = run(two, *injected(two), **injector.fail_at(rank, 3, "raise"))
    assert (one.code, other.code) == (1, 1)
    assert one.lines.pop() == WHERE  # the disk of the other node has no run
    for ended in (one, other):
        assert ended.lines[-1] == f"ValueError: broken in rank {rank}"
        assert f"rank {rank} on node{rank + 1} failed:" in ended.lines
        (peer,) = [line for line in ended.lines if " ended after it: " in line]
        assert peer.startswith(f"rank {1 - rank} on node{2 - rank} ended after it: ")
    assert "ValueError: broken in rank" in (two[0].disk / "run" / "run.log").read_text()
    assert not (two[1].disk / "run").exists()


@contextmanager
def as_by_torchrun(
    hosts: list[Host], words: list[str], **variables: str
) -> Iterator[list[forked.Job]]:
    """A rank on each, of which no parent watches all."""
    own = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": str(len(hosts))}
    own |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **variables}
    with ExitStack() as running:
        yield [
            running.enter_context(host.started(words, RANK=str(rank), **own))
            for rank, host in enumerate(hosts)
        ]


def launched(
    two: list[Host], *words: str, **variables: str
) -> AbstractContextManager[list[forked.Job]]:
    given = [word for word in injected(two, *words) if word not in NODES]
    return as_by_torchrun(two, ["strategy=ddp", *given], **variables)


def test_all_nodes_of_a_launcher_end_with_the_rank_that_failed_first(two):
    with launched(two, **injector.fail_at(1, 3, "raise")) as jobs:
        one, other = (Ended(job) for job in jobs if job.wait())
    assert (one.code, other.code) == (1, 1)
    assert other.lines[-2:] == [
        "ValueError: broken in rank 1",
        "dpframe: rank 1 on node2 has failed",
    ]
    assert one.lines[-1] == (
        "dpframe: rank 0 on node1 ended after rank 1 on node2 had failed: ValueError: broken in "
        "rank 1"
    )


def test_a_rank_of_a_launcher_that_hangs_is_named_with_its_node(two):
    words = ["trainer.hang_seconds=4", "strategy.timeout_seconds=10"]
    with launched(two, *words, **injector.fail_at(1, 3, "hang")) as (_, job):
        assert job.wait() == 1
        assert "; rank 1 on node2 hangs in _fail (injector.py" in Ended(job).lines[-1]


def test_ranks_of_a_launcher_end_when_their_network_is_cut(two):
    """Those who can't reach the store, too."""
    with launched(two, "trainer.max_epochs=1000", "strategy.timeout_seconds=6") as jobs:
        for number, job in enumerate(jobs):
            job.wait_for(f"training-{number}")
        two[1].cut()
        for number, job in enumerate(jobs):
            assert job.wait() == 1
            last = f"dpframe: rank {number} on node{number + 1} ended after another one was gone"
            assert Ended(job).lines[-1] == last


def test_a_rank_that_hangs_is_named_with_its_node_and_its_stack(two):
    words = injected(two, "trainer.hang_seconds=4")
    for ended in run(two, *words, **injector.fail_at(1, 3, "hang")):
        assert ended.code == 1
        assert "rank 1 on node2 hung; its stack:" in ended.lines
        (line,) = [line for line in ended.lines[-2:] if line.startswith("dpframe: no step")]
        assert "rank 1 hangs in _fail (injector.py" in line
        assert ended.lines[-1] in (line, WHERE)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_killed_is_named(two, rank):
    words = injected(two, "trainer.max_epochs=1000")
    with two[0].started(words) as first, two[1].started(words) as second:
        first.wait_for("training-0")
        second.wait_for("training-1")
        jobs = [first, second]
        os.killpg(jobs[rank].pid, signal.SIGKILL)
        left = jobs[1 - rank]
        assert left.wait() == 1
        line = ("node1 lost the rendezvous", "node2 left without a word: it is down")[rank]
        if rank == 0:
            line = "node2 lost the rendezvous 10.77.0.1:29500: that machine is down, or the network"
        assert Ended(left).lines[-1].startswith(f"dpframe: {line}"), Ended(left).lines


def test_a_network_that_is_cut_is_told_on_both_sides(two):
    words = injected(two, "trainer.max_epochs=1000", "strategy.timeout_seconds=6")
    with two[0].started(words) as first, two[1].started(words) as second:
        first.wait_for("training-0")
        second.wait_for("training-1")
        two[1].cut()
        assert (first.wait(), second.wait()) == (1, 1)
        (*_, one), (*_, other) = Ended(first).lines, Ended(second).lines
        assert one.startswith("dpframe: node2 was not heard of for 6 s: it is down or stopped")
        assert other.startswith("dpframe: node2 lost the rendezvous 10.77.0.1:29500: that machine")


def test_a_network_that_is_cut_for_a_moment_changes_nothing(two):
    whole = run(two, *injected(two, "hydra.run.dir=whole"))
    words = injected(two)
    with (
        two[0].started(words, STEP_SECONDS="0.1") as first,
        two[1].started(words, STEP_SECONDS="0.1") as second,
    ):
        second.wait_for("training-1")
        two[1].cut()
        time.sleep(2)  # of silence
        two[1].mend()
        assert (first.wait(), second.wait()) == (0, 0)
    assert [ended.code for ended in whole] == [0, 0]
    kept = [two[0].disk / name / "checkpoints/last.ckpt" for name in ("whole", "run")]
    assert is_same(*(checkpoint.load(path)["task"] for path in kept))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_on_one_node_ends_all_with_one_checkpoint(two, rank):
    words = injected(two, "trainer.max_epochs=1000")
    with two[0].started(words) as first, two[1].started(words) as second:
        first.wait_for("training-0")
        second.wait_for("training-1")
        os.kill((first, second)[rank].pid, signal.SIGTERM)
        assert (first.wait(), second.wait()) == (143, 143)
        assert "dpframe: interrupted by SIGTERM after step" in Ended(first).lines[-1]
    assert (two[0].disk / "run/checkpoints/last.ckpt").exists()


def test_a_job_goes_on_when_a_lost_node_is_back(two):
    words = injected(two, "trainer.max_restarts=1")
    whole = run(two, *injected(two, "hydra.run.dir=whole"))
    with two[0].started(words, STEP_SECONDS="0.2") as first:
        with two[1].started(words, STEP_SECONDS="0.2") as second:
            while not (two[0].disk / "run/checkpoints/last.ckpt").exists():
                assert first.code is None, first.said()
            os.killpg(second.pid, signal.SIGKILL)
        with two[1].started(words) as again:
            assert (first.wait(), again.wait()) == (0, 0), first.said()
        assert "\nrestart 1 of 1 from run/checkpoints/last.ckpt, step " in first.said()
    assert [ended.code for ended in whole] == [0, 0]
    kept = [two[0].disk / name / "checkpoints/last.ckpt" for name in ("whole", "run")]
    assert is_same(*(checkpoint.load(path)["task"] for path in kept))


SHARES = "trainer.logical_replicas=2"
ELASTIC = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d")
ELASTIC += ("--rdzv-endpoint=node1:29500", "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1")


def logged(host: Host) -> str:
    return "".join(path.read_text() for path in host.disk.rglob("run.log"))


def test_torchruns_elastic_nodes_go_on_from_the_last_checkpoint_without_resume(two, undisturbed):
    """The second one is lost and comes back, with what its disk had. By logical shares they end
    with the bits of one process that nothing happened to."""
    words = [word for word in injected(two) if word not in NODES[1:]]
    given = [*ELASTIC, "-m", "dpframe", *words, SHARES]
    run = two[0].disk / "run"
    with one_lost(two, run, given) as (jobs, own):
        jobs.append(two[1].torchrun(*given, **own))
        while not (is_of_both(run) or is_of_both(two[1].disk / run.name)):  # the first one's disk
            assert jobs[0].poll() is jobs[2].poll() is None, said(two)
        Path(own["HURRY"]).touch()
        assert [jobs[0].wait(200), jobs[2].wait(200)] == [0, 0], said(two)
    kept = [p for host in two for p in host.disk.glob("run/checkpoints/last.ckpt")]
    newest = max(kept, key=seal.step_of)
    assert seal.step_of(newest) == injector.STEPS
    assert is_same(checkpoint.load(newest)["task"], undisturbed("strategy=cpu", SHARES))
    starts = "".join(map(logged, two)).count("they go on from run/checkpoints, step ")
    assert starts >= 2  # of one rank alone, then of two


def test_torchruns_elastic_nodes_go_on_with_parts_of_their_common_disk(two, tmp_path):
    """The first one goes on alone, with the parts of both."""
    run = two[0].shared / "run"
    words = [*BOSTON, "trainer.max_epochs=50", "callbacks.checkpoint.seconds_between=0"]
    words += [f"hydra.run.dir={run}", "+callbacks.slow._target_=injector.Pauses"]
    given = [*ELASTIC, "-m", "dpframe", "strategy=fsdp", *words]
    with one_lost(two, run, given) as (jobs, own):
        Path(own["HURRY"]).touch()
        assert jobs[0].wait(200) == 0, said(two)
    assert "they go on from" in (run / "run.log").read_text()
    same_as_one_process(run, tmp_path, "trainer.max_epochs=50")


@contextmanager
def one_lost(
    two: list[Host], run: Path, given: list[str]
) -> Iterator[tuple[list[subprocess.Popen], dict[str, str]]]:
    """Both train by torchrun, the second is lost, and the first goes on alone. What runs, and the
    environment that it runs in."""
    path = f"{TESTS.parent}:{TESTS}"
    own = {"PYTHONPATH": path, "STEP_SECONDS": "1", "HURRY": str(two[0].shared / "hurry")}
    own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    jobs = [host.torchrun(*given, **own) for host in two]
    try:
        # The first one begins alone where the second takes its time.
        while not (is_of_both(run) and (run / "checkpoints/last.ckpt").exists()):
            assert jobs[0].poll() is None, said(two)
        two[1].power_off()
        while is_of_both(run):
            assert jobs[0].poll() is None, said(two)
        yield jobs, own
    finally:
        for host in two:
            host.power_off()
        for job in jobs:
            job.wait()


def is_of_both(run: Path) -> bool:
    note = run / ".hydra/torchrun"
    return note.exists() and len(note.read_text().splitlines()) == 2


def said(two: list[Host]) -> str:
    return "".join((host.disk / "said").read_text() for host in two)


REFUSED = {
    "trainer.max_epochs=3": "trainer.max_epochs is 3 on node2, and 2 on node1; type the same",
    "trainer.gpus=2": "the number of ranks (trainer.gpus) is 2 on node2, and 1 on node1; type",
    "trainer.nodes=3": "trainer.nodes=3 here, and 2 on the node that was first at 10.77.0.1:29500",
    "resume=run": "resume= or checkpoint= is typed on node2, and not typed on node1; type the same",
}


@pytest.mark.parametrize(("word", "line"), REFUSED.items(), ids=lambda text: text.split()[0])
def test_nodes_on_which_something_else_is_typed_are_refused_in_one_line(two, word, line):
    given = [*NODES, *BOSTON, "trainer.gpus=1"]
    with two[0].started(given) as first, two[1].started([*given, word]) as second:
        assert second.wait() == 2
        assert Ended(second).lines[-1].startswith(f"dpframe: {line}")
        if "nodes" not in word:
            assert first.wait() == 2
            assert Ended(first).lines == Ended(second).lines
    assert files_of(two[0]) == files_of(two[1]) == set()


ALONE = {
    "trainer.nodes=2": "trainer.nodes=2 but trainer.rendezvous is null; name an address of one",
    "trainer.nodes=0": "trainer.nodes=0 is out of range; use 1 or more",
    "trainer.rendezvous=node1": "trainer.rendezvous=node1 is not HOST:PORT; e.g.",
    "trainer.rendezvous=node1:0": "trainer.rendezvous=node1:0 is not HOST:PORT; e.g.",
    "trainer.rendezvous=no.such.invalid:29500": "trainer.rendezvous=no.such.invalid:29500: no.such",
    "strategy=cpu": "trainer.nodes=2 but CPU runs on one machine; use strategy=ddp, or leave",
    "strategy=data_parallel": "trainer.nodes=2 but DataParallel runs on one machine; use",
    "mode=plan": "trainer.nodes=2 but mode=plan runs on one machine; leave it out",
}


def test_nodes_that_can_not_be_had_are_refused_in_one_line(tmp_path):
    nodes = ["trainer.nodes=2", "trainer.rendezvous=127.0.0.1:29500", "strategy=ddp"]
    lines = [["recipe=boston", *nodes, word] for word in ALONE]
    lines[0] = ["recipe=boston", "trainer.nodes=2"]
    for attempt, line in zip(attempts(lines, tmp_path), ALONE.values(), strict=True):
        said = [each for each in attempt.err.splitlines() if "REHEARSAL" not in each]
        assert attempt.code == 2 and len(said) == 1, said
        assert said[0].startswith(f"dpframe: {line}"), said


def test_a_node_that_never_comes_is_waited_for_as_long_as_asked_for(two):
    given = [*NODES, *BOSTON, "trainer.gpus=1", "strategy.timeout_seconds=1"]
    for host, line in zip(
        two,
        (
            "1 of trainer.nodes=2 came to 10.77.0.1:29500: node1",
            "trainer.rendezvous=10.77.0.1:29500: nothing answers there (Connection refused)",
        ),
        strict=True,
    ):
        with host.started(given) as job:
            assert job.wait() == 2
            after = ", after strategy.timeout_seconds=1; type the same command on every node"
            assert Ended(job).lines == [f"dpframe: {line}{after}"]


def test_a_rendezvous_listens_on_its_address_and_nowhere_else(two):
    with two[0].started([*NODES, *BOSTON, "trainer.gpus=1"]):
        while not (listening := listening_on(two[0])):
            pass
        assert listening == {"10.77.0.1:29500"}


def test_ranks_talk_through_the_interface_that_leads_to_the_rendezvous(two):
    two[0].run(
        "ip link add eth9 type veth peer name eth8",
        "ip addr add 10.88.0.1/24 dev eth9",
        "ip link set eth9 up",
    )
    ways = {"10.77.0.2": "eth0", "node2": "eth0", "10.77.0.1": "eth0", "10.88.0.7": "eth9"}
    ways |= {"127.0.0.1": "lo", "10.99.0.1": None}
    assert two[0].call(interfaces_to, list(ways)) == ways


def interfaces_to(addresses: list[str]) -> dict[str, str | None]:
    return {address: network.interface_to(address, 1) for address in addresses}


def test_two_nodes_on_one_machine_have_two_names():
    assert numbered(["a", "b", "a", "a"]) == ["a", "b", "a (2)", "a (3)"]


def listening_on(host: Host) -> set[str]:
    (table,) = host.run("ss --no-header --listening --tcp --numeric")
    return {line.split()[3] for line in table.splitlines()}


def test_a_run_goes_on_from_the_checkpoint_that_one_node_alone_has(two, tmp_path):
    whole = run(two, *NODES, *BOSTON, "trainer.gpus=1", "hydra.run.dir=whole")
    first = run(two, *NODES, *BOSTON, "trainer.gpus=1", "hydra.run.dir=run", "trainer.max_epochs=1")
    shutil.move(two[0].disk / "run", two[1].disk / "run")  # which has no rendezvous
    second = run(two, *NODES, "resume=run", "trainer.max_epochs=2")
    for ended in (*whole, *first, *second):
        assert ended.code == 0, ended.said
    assert "resumed at epoch 1, step 4" in second[1].printed and second[0].printed == ""
    ours, theirs = (
        checkpoint.load(p / "checkpoints/last.ckpt")
        for p in (two[0].disk / "whole", two[1].disk / "run")
    )
    assert is_same(ours["task"], theirs["task"]) and is_same(ours["optimizer"], theirs["optimizer"])
    assert not (two[0].disk / "run").exists()


def test_fsdp_keeps_parts_within_a_node_and_goes_on_from_the_checkpoint_of_one_node(two, tmp_path):
    """Copies of the parts are between the nodes: what is gathered stays within one."""
    meet = [*NODES[1:], "strategy=fsdp", "strategy.replicate=2", "trainer.gpus=2"]
    meet += ["strategy.checkpoints=whole"]  # which a node has alone
    words = [*meet, *BOSTON, "+callbacks.parts._target_=injector.TellsParts", "hydra.run.dir=run"]
    first = run(two, *words, "trainer.max_epochs=1")
    assert [ended.code for ended in first] == [0, 0], first[0].said
    parts = [(two[rank // 2].disk / f"part-{rank}").read_text() for rank in range(4)]
    assert parts[:2] == parts[2:] and parts[0] != parts[1]
    shutil.move(two[0].disk / "run", two[1].disk / "run")
    second = run(two, *NODES[1:], "resume=run", "trainer.max_epochs=2")
    assert [ended.code for ended in second] == [0, 0], second[0].said
    assert "resumed at epoch 1, step 4" in second[1].printed
    same_as_one_process(two[1].disk / "run", tmp_path)


FSDP = ("strategy=fsdp", *NODES[1:], "trainer.gpus=1")


def test_fsdp_in_parts_goes_on_on_another_number_of_nodes(two, tmp_path):
    """With the numbers of one process; a part that went with its node is one line."""
    folder = two[0].shared
    words = [*FSDP, *BOSTON, "hydra.run.dir=run", "trainer.max_epochs=1"]
    with two[0].started(words, folder) as first, two[1].started(words, folder) as second:
        assert (first.wait(), second.wait()) == (0, 0), first.said()
    parts = list(folder.glob("run/checkpoints/*.parts/*.distcp"))
    assert {path.name for path in parts} == {"__0_0.distcp", "__1_0.distcp"}
    shutil.copytree(folder / "run", folder / "lost")
    for path in folder.glob("lost/checkpoints/*.parts/__1_0.distcp"):
        path.unlink()
    words = ["trainer.nodes=1", "trainer.max_epochs=2"]
    with two[1].started(["resume=run", *words], folder) as job:
        assert job.wait() == 0, job.said()
    with two[1].started(["resume=lost", *words], folder) as job:
        assert job.wait() == 2
        (line,) = Ended(job).lines
    assert "dpframe: resume=lost: no checkpoint in lost/checkpoints is whole: " in line
    assert "/__1_0.distcp: No such file or directory; resume another run" in line
    same_as_one_process(folder / "run", tmp_path)


def test_parts_on_disks_that_nodes_do_not_share_are_refused_in_one_line(two):
    for ended in run(two, *FSDP, *BOSTON):
        assert ended.code == 2
        (line,) = ended.lines
        assert ": strategy.checkpoints=sharded but not all machines see outputs/boston/" in line
        assert line.endswith("use strategy.checkpoints=whole")
    assert files_of(two[0]) == files_of(two[1]) == set()


def test_fsdp_by_a_launcher_goes_on_on_another_number_of_nodes(two, tmp_path):
    run = two[0].shared / "run"
    for on, words in (
        (two, [*BOSTON, f"hydra.run.dir={run}", "trainer.max_epochs=1"]),
        (two[:1], [f"resume={run}", "trainer.max_epochs=2"]),
    ):
        with as_by_torchrun(on, ["strategy=fsdp", *words]) as jobs:
            assert [job.wait() for job in jobs] == [0] * len(on), [job.said() for job in jobs]
    same_as_one_process(run, tmp_path)


def same_as_one_process(run: Path, folder: Path, *words: str) -> None:
    alone = forked.run([*BOSTON, *words, "strategy=cpu"], folder)
    assert alone.returncode == 0, alone.stderr
    theirs, ours = checkpoint.load(run / "checkpoints/last.ckpt")["task"], last(folder)
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-12, atol=1e-14)


def test_mpirun_joins_two_machines_at_the_address_that_it_is_given(two, tmp_path):
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("needs mpirun.openmpi: apt-get install openmpi-bin")
    folder, agent = two[0].shared, two[1].agent(tmp_path / "agent")
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    here = f"--allow-run-as-root --mca plm_rsh_agent {agent} --wdir {folder} -x PYTHONPATH={ROOT}"
    two[0].run(
        f"mpirun.openmpi {here} --hostfile {folder}/hosts -np 4 --npernode 2 -x MASTER_ADDR=node1 "
        f"-x MASTER_PORT=29500 {sys.executable} -m dpframe strategy=ddp hydra.run.dir=run "
        + " ".join(BOSTON)
    )
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["replicas"] == 4
    same_as_one_process(folder / "run", tmp_path)


def test_nodes_with_a_disk_in_common_write_one_directory_whatever_their_clocks_say(two):
    folder = two[0].shared
    given = [*NODES, *BOSTON, "trainer.gpus=1"]
    with (
        two[0].started(given, folder) as first,
        two[1].started([*given, "hydra.run.dir=outputs/boston/tomorrow"], folder) as second,
    ):
        assert (first.wait(), second.wait()) == (0, 0)
    (made,) = (folder / "outputs/boston").iterdir()
    assert made.name != "tomorrow"
    text = (made / "run.log").read_text()
    assert text.count("epoch 2/2") == 1
