"""A signal ends a run at the end of a step, with a checkpoint from which it goes on to the bit."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe, Process
from pathlib import Path
from typing import Any

import pytest
from command import environment
from forked import on, server
from injector import STEPS, fail_at, last, run, started, weights, words
from small import Hooks, is_same, trainer

from dpframe.errors import Interrupted
from dpframe.launch import signals
from dpframe.launch.rank import Parent
from dpframe.launch.signals import Interruption
from dpframe.launch.watchdog import is_stopped
from dpframe.strategies.ddp import DDP

TWO = ("strategy=ddp", "trainer.gpus=2", "logger=none")
ONE = ("strategy=cpu", "logger=none")
WORKERS = ("data.workers=1",)
SLOW = {"STEP_SECONDS": "0.5"}  # a run that no signal ends takes ten seconds
GO_ON = "dpframe --config-dir . resume=run"
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
USR1 = signal.SIGUSR1  # Slurm's, to every process of a job
USR2 = signal.SIGUSR2  # submitit's


def send(job, number: int, target: str) -> None:
    if target == "group":
        os.killpg(job.pid, number)
    else:
        pid = job.pid if target == "parent" else job.ranks()[int(target)]
        os.kill(pid, number)


# What runs, the signal and who gets it, and whether the run is gone on with: the two ranks without
# workers are, after the validation that is broken off below.
CASES = [
    (TWO, TERM, "parent", False),
    ((*TWO, "trainer.max_restarts=3"), TERM, "1", False),
    ((*TWO, "callbacks.checkpoint.every_n_steps=1"), INT, "group", False),  # while it saves
    ((*TWO, *WORKERS), TERM, "group", True),
    ((*ONE, *WORKERS), INT, "group", True),
    (ONE, HUP, "parent", False),
    ((*TWO, *WORKERS), USR1, "group", False),
    ((*TWO, *WORKERS), USR2, "group", False),
]


def test_a_signal_ends_a_run_that_resumes_to_the_same_weights(tmp_path, undisturbed):
    """All of them at once: they do nothing for most of the time."""
    folders = [tmp_path / str(number) for number in range(len(CASES))]
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(started(folder, *setting, **SLOW))
            for folder, (setting, *_) in zip(folders, CASES, strict=True)
        ]
        send_in_training(jobs)
        ends = [job.ended() for job in jobs]
    for folder, case, end in zip(folders, CASES, ends, strict=True):
        setting, number, _, goes_on = case
        step = last(folder)["progress"]["global_step"]
        assert 3 <= step < STEPS, case
        name = signal.Signals(number).name
        reason = f"interrupted by {name} after step {step}; go on with {GO_ON}"
        assert end == (128 + number, [f"dpframe: {reason}"]), case
        summary = json.loads((folder / "run/summary.json").read_text())
        found = summary["status"], summary["reason"], summary["steps"]
        assert found == ("interrupted", reason, step), case
        if goes_on:
            assert run(folder, *setting, "resume=run").returncode == 0, case
            assert is_same(weights(folder), undisturbed(*setting)), case


def send_in_training(jobs: list[Any]) -> None:
    """Each job's signal, once all of its ranks are in their third step."""
    waiting = list(zip(jobs, CASES, strict=True))
    while waiting:
        for job, (setting, number, target, _) in tuple(waiting):
            assert job.code is None, job.said()
            ranks = (0, 1) if "strategy=ddp" in setting else (0,)
            if all((job.folder / f"training-{rank}").exists() for rank in ranks):
                send(job, number, target)
                waiting.remove((job, (setting, number, target, _)))
        time.sleep(0.01)


@pytest.mark.parametrize("setting", [TWO, ONE], ids=["two ranks", "one process"])
def test_a_validation_is_broken_off_and_made_again(tmp_path, undisturbed, setting):
    ranks = ("0", "1") if setting is TWO else ("0",)
    first = "trainer.sanity_batches=0", "trainer.share_check=off"  # it begins with that of step 8
    with started(tmp_path, *setting, *first, VALIDATION_SECONDS="0.5") as job:
        job.wait_for(*(f"validating-{rank}" for rank in ranks))
        send(job, TERM, "group")
        code, said = job.ended()
    assert (code, last(tmp_path)["progress"]["global_step"]) == (143, 8)
    assert f"after step 8; go on with {GO_ON}" in said[-1]
    if setting is TWO:
        assert run(tmp_path, *setting, "resume=run").returncode == 0
        assert is_same(weights(tmp_path), undisturbed(*setting))


def test_a_signal_during_the_imports_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "dpframe", *words(tmp_path, *ONE)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while "libtorch_cpu" not in maps.read_text():
            assert process.poll() is None
        process.send_signal(TERM)
        said = process.communicate(timeout=200)[1]
    assert (process.returncode, said.count("\n")) == (143, 1)
    assert said.startswith("dpframe: interrupted by SIGTERM")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", [TWO, ONE], ids=["two ranks", "one process"])
def test_a_start_up_that_is_stuck_ends_too(tmp_path, setting):
    with started(tmp_path, *setting, SETUP_SECONDS="600") as job:
        job.wait_for("starting-0")
        send(job, INT, "parent")
        code, said = job.ended()
    assert (code, said) == (130, ["dpframe: interrupted by SIGINT"])
    assert not (tmp_path / "run").exists()


def test_a_second_signal_ends_a_stuck_rank_at_once(tmp_path):
    with started(tmp_path, *TWO, **fail_at(1, 3, "sleep")) as job:
        job.wait_for("fired")
        send(job, TERM, "group")
        time.sleep(2 * signals.ECHO_SECONDS)
        assert job.code is None
        send(job, TERM, "group")
        code, said = job.ended()
    assert code == 143
    assert said == ["dpframe: interrupted by SIGTERM, twice; ended at once"]


@pytest.mark.parametrize(
    "setting, kind", [(ONE, "sleep"), (ONE, "lock"), (TWO, "sleep"), (TWO, "spin")]
)
def test_what_is_stuck_ends_when_the_grace_period_is_over(tmp_path, setting, kind):
    """In C, where Python calls no handler, too; one that keeps its GIL is ended by its parent."""
    grace = "trainer.grace_seconds=0.1"
    with started(tmp_path, *setting, grace, **fail_at(0, 3, kind)) as job:
        job.wait_for("fired")
        send(job, TERM, "parent")
        outcome = job.ended()
    assert outcome == (143, [f"dpframe: interrupted by SIGTERM, not done in {grace}, so killed"])


LIMITS = ("trainer.hang_seconds=4", "trainer.data_timeout_seconds=4")
STOPPED_SECONDS = 5  # longer than both


def test_ctrl_z_stops_all_processes_of_a_job_and_fg_after_its_limits_goes_on(tmp_path):
    """Both jobs at once."""
    slow = {"STEP_SECONDS": "0.1", "HURRY": "continued"}
    with ExitStack() as stack:
        jobs = []
        for setting in ((*ONE, *WORKERS), (*TWO, *WORKERS)):
            words = (tmp_path / str(len(jobs)), *setting, *LIMITS, "trainer.max_epochs=6")
            jobs.append(stack.enter_context(started(*words, **slow)))
        jobs[0].wait_for("training-0")
        jobs[1].wait_for("training-0", "training-1")
        for job in jobs:
            os.killpg(job.pid, signal.SIGTSTP)
        for job in jobs:
            while not all(map(is_stopped, processes_of(job.pid))):
                assert job.code is None, job.said()
                time.sleep(0.01)
        time.sleep(STOPPED_SECONDS)
        for job in jobs:
            assert all(map(is_stopped, processes_of(job.pid)))
            (job.folder / "continued").touch()
            os.killpg(job.pid, signal.SIGCONT)
        for job in jobs:
            assert job.ended() == (0, [])
            assert last(job.folder)["progress"]["global_step"] == 48


def processes_of(group: int) -> list[int]:
    """The ranks and data workers, too."""
    found = subprocess.run(["pgrep", "-g", str(group)], capture_output=True, text=True, check=True)
    return [int(word) for word in found.stdout.split()]


def steps_where_one_rank_knows(strategy: DDP) -> list[int]:
    """The last step of each rank, where rank 1 alone has seen a signal, in its second step."""
    stop = Interruption()

    def see(trainer) -> None:
        if trainer.global_step == 2 and strategy.rank == 1:
            stop.remember(TERM)

    callbacks = [Hooks(on_step_end=see)]
    made = trainer(strategy=strategy, callbacks=callbacks, interruption=stop, max_epochs=10**6)
    with pytest.raises(Interrupted, match="SIGTERM"):
        made.fit()
    return strategy.collectives.gather(made.global_step)


def test_the_ranks_agree_on_a_signal_that_one_of_them_has_seen():
    first, second = on(DDP(2, "cpu", timeout_seconds=100), steps_where_one_rank_knows)
    assert first == second >= 2


def leave_a_cycle(strategy: DDP, folder: str) -> None:
    """That notes, when it is collected, whether a data worker of its rank still runs."""

    class Cycle:
        def __del__(self) -> None:
            Path(folder, str(strategy.rank)).write_text(str(worker.is_alive()))

    worker = Process(target=time.sleep, args=(600,), daemon=True)
    worker.start()
    gc.disable()
    cycle = Cycle()
    cycle.itself = cycle


def test_a_rank_ends_its_data_workers_before_a_dataloader_that_would_wait_for_them(tmp_path):
    on(DDP(2, "cpu"), leave_a_cycle, str(tmp_path))
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["False", "False"]


# Within this process


def state() -> Any:
    """What an interruption changes in this process."""
    handled = (*signals.SIGNALS, signal.SIGTSTP)
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    handlers = [signal.getsignal(number) for number in handled]
    return handlers, wakeup, os.listdir("/proc/self/fd")


@contextmanager
def opened() -> Iterator[Interruption]:
    stop = Interruption()
    stop.open()
    try:
        yield stop
    finally:
        stop.close()


def test_an_interruption_puts_everything_back():
    before = state()
    with opened() as stop:
        assert signals.current() is stop
        with stop.watched(60):
            assert state() != before
        stop.begin()
        signal.raise_signal(TERM)
        assert stop.number == TERM
    assert signals.current() is None
    assert state() == before


def test_an_ignored_signal_stays_ignored_as_nohup_wants_it():
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with opened():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handler)


def test_nothing_is_installed_outside_the_main_thread():
    thread = threading.Thread(target=Interruption().open)
    thread.start()
    thread.join()
    assert signals.current() is None


def end_with_a_closed_pipe() -> None:
    ours, theirs = os.pipe()
    os.close(theirs)
    signals.end_with(ours)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's kernel ends it")
def test_a_process_ends_whose_parent_has_ended_before_the_kernel_was_asked():
    process = server().Process(target=end_with_a_closed_pipe)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_the_same_signal_at_once_again_is_no_second_one():
    with opened() as stop:
        stop.begin()
        for _ in range(3):  # a second one would end this process
            signal.raise_signal(TERM)
        assert stop.number == TERM


def test_once_the_ranks_have_ended_a_signal_waits_for_nobody():
    with opened() as stop:
        DDP(2, "cpu").launch(os.getpid)
        assert not stop.has_begun


def test_a_rank_leaves_the_second_signal_to_its_parent(monkeypatch):
    """A terminal's Ctrl-C reaches it, and a moment later the same signal by its parent."""
    ended: list[tuple[int, str]] = []
    twice = (INT, ", twice; ended at once")
    ours, theirs = Pipe()
    for stop, expected in ((Parent(theirs), []), (Interruption(), [twice])):
        monkeypatch.setattr(stop, "_end", lambda *how: ended.append(how))
        stop.begin()
        stop._note(INT, None)
        with monkeypatch.context() as later:
            now = time.monotonic() + 1.0
            later.setattr(time, "monotonic", lambda now=now: now)
            stop._note(INT, None)
        assert ended == expected
