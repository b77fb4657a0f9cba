"""Several machines by torchrun: two of its agents on this one, a rank each, as on two."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import forked
import injector
import pytest
from command import ROOT, environment
from injector import fail_at
from small import is_same
from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch

TESTS = Path(__file__).resolve().parent
WORDS = ("strategy=ddp", "logger=none")


def torchrun() -> None:
    """Its own agent, whose rank is a fork of it."""
    config, _, words = run.config_from_args(run.parse_args(None))
    config.start_method = "fork"
    elastic_launch(config, rank)(*words[words.index("dpframe") + 1 :])


def rank(*words: str) -> None:
    sys.argv[1:] = words
    forked.dpframe()


def real_torchrun() -> None:
    """Its rank is a new interpreter, in a session of its own."""
    run.main()


class Agent:
    """A process of torchrun, and what it and its rank say."""

    def __init__(self, job: forked.Job) -> None:
        self.job = job
        self.wait, self.said = job.wait, job.said

    def send_signal(self, number: int) -> None:
        os.kill(self.job.pid, number)

    def lose(self) -> None:
        """As a machine that has no power any more."""
        pid = self.job.pid
        self.send_signal(signal.SIGSTOP)
        (rank,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (int(rank), pid):
            os.kill(process, signal.SIGKILL)

    def last(self) -> str:
        """The line that its rank has said last, before torchrun's own."""
        lines = [line for line in self.said().splitlines() if line.startswith("dpframe: ")]
        return lines[-1] if lines else ""


@contextmanager
def agents(
    folder: Path,
    *words: str,
    options: tuple[str, ...] = (),
    program: Callable[[], None] = torchrun,
    line: list[str] | None = None,
    **variables: str,
) -> Iterator[list[Agent]]:
    """`line` is another one than the injected recipe's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", PYTHONPATH=f"{ROOT}:{TESTS}")
    own = ["-m", "dpframe", *(line or injector.words(folder, *WORDS, *words))]
    with ExitStack() as stack:
        both = []
        for number in range(2):
            given["MACHINE"] = str(number)
            agent = ["--nnodes=2", "--nproc-per-node=1", "--local-addr=127.0.0.1"]
            agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
            settings = f"is_host={1 - number},keep_alive_interval=1,last_call_timeout=2"
            agent += [f"--rdzv-conf={settings}", *options, *own]
            job = forked.started(agent, folder, program=program, **given, **variables)
            both.append(Agent(stack.enter_context(job)))
        try:
            yield both
        finally:
            for agent in both:
                if agent.job.code is None:
                    agent.send_signal(signal.SIGTERM)  # it ends its rank
                agent.wait()


def ended(folder: Path, **variables: str) -> list[str]:
    """What both ranks of a job that fails have said last, the first one's first."""
    with agents(folder, **variables) as both:
        assert [agent.wait() for agent in both] == [1, 1], both[0].said() + both[1].said()
        return sorted(agent.last() for agent in both)


HOST = socket.gethostname()


def test_both_agents_end_with_the_rank_that_failed_first(tmp_path):
    assert ended(tmp_path, **fail_at(1, 3, "raise")) == [
        f"dpframe: rank 0 on {HOST} ended after rank 1 on {HOST} had failed: ValueError: broken in "
        "rank 1",
        f"dpframe: rank 1 on {HOST} has failed",
    ]


def test_a_mistake_of_the_users_is_its_line_on_both(tmp_path):
    assert ended(tmp_path, **fail_at(1, 3, "refuse")) == [
        f"dpframe: rank 0 on {HOST} ended after rank 1 on {HOST} had failed: UserError: the data "
        "is wrong; fix it",
        "dpframe: the data is wrong; fix it",
    ]


def test_a_rank_that_is_killed_ends_both(tmp_path):
    """Its own agent names the signal."""
    with agents(tmp_path, **fail_at(1, 3, "kill")) as both:
        assert [agent.wait() for agent in both] == [1, 1]
        killed, other = sorted(both, key=Agent.last)
        assert "SIGKILL" in killed.said() and killed.last() == ""
        assert other.last() == f"dpframe: rank 0 on {HOST} ended after another one was gone"


@pytest.mark.parametrize(("number", "program"), [(0, torchrun), (1, real_torchrun)])
def test_ctrl_c_on_either_agent_ends_both_with_one_checkpoint(tmp_path, number, program):
    with agents(tmp_path, "trainer.max_epochs=1000", program=program) as both:
        for agent in both:
            agent.job.wait_for("training-0", "training-1")
        both[number].send_signal(signal.SIGINT)
        assert [agent.wait() for agent in both] == [1, 1]
        lines = sorted(agent.last() for agent in both)
    steps = injector.last(tmp_path)["progress"]["global_step"]
    line = f"interrupted by SIGINT after step {steps}; go on with resume=run"
    assert lines == ["", f"dpframe: {line}"]
    assert json.loads((tmp_path / "run/summary.json").read_text())["reason"] == line


def test_a_job_that_is_restarted_goes_on_from_its_last_checkpoint(tmp_path, undisturbed):
    with agents(tmp_path, options=("--max-restarts=1",), **fail_at(1, 12, "kill")) as both:
        assert [agent.wait() for agent in both] == [0, 0], both[0].said() + both[1].said()
    assert "they go on from run/checkpoints, step 8" in (tmp_path / "run/run.log").read_text()
    assert is_same(injector.weights(tmp_path), undisturbed("strategy=ddp", "trainer.gpus=2"))


def test_a_machine_that_is_lost_leaves_the_other_one_to_go_on(tmp_path):
    """The first one starts again, alone."""
    folder, hurry = tmp_path / "run", tmp_path / "hurry"
    options = ("--nnodes=1:2", "--max-restarts=3")
    with agents(tmp_path, options=options, STEP_SECONDS="0.2", HURRY=str(hurry)) as both:
        while not (is_of_both(folder) and (folder / "checkpoints/last.ckpt").exists()):
            assert [agent.job.code for agent in both] == [None, None], both[0].said()
            time.sleep(0.01)
        both[1].lose()
        hurry.touch()
        assert both[0].wait() == 0, both[0].said()
    assert not is_of_both(folder)
    assert "they go on from run/checkpoints, step " in (folder / "run.log").read_text()


def is_of_both(folder: Path) -> bool:
    note = folder / ".hydra/torchrun"
    return note.exists() and len(note.read_text().splitlines()) == 2
