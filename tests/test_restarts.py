"""A job whose rank has failed starts itself again."""

import re

import pytest
from injector import fail_at, has_fired, run, weights
from small import is_same
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TWO = ("strategy=ddp", "trainer.gpus=2", "logger=none")
SAVES = ("callbacks.checkpoint.every_n_steps=3",)
TIMEOUT = 3


@pytest.mark.parametrize("rank, kind", [(0, "kill"), (1, "exit0"), (0, "data")])
def test_a_job_restarts_itself_and_ends_with_the_same_weights(tmp_path, undisturbed, rank, kind):
    setting = (*TWO, *SAVES)
    done = run(
        tmp_path,
        *setting,
        "trainer.max_restarts=2",
        f"strategy.timeout_seconds={TIMEOUT}",
        # The share check has its own batches before.
        **fail_at(rank, 26 if kind == "data" else 14, kind, after="run/checkpoints/last.ckpt"),
    )
    assert has_fired(tmp_path)
    assert done.returncode == 0, done.stderr
    # The one that was written last: a kill may come between the two of a save.
    begun = re.search(
        r"^restart 1 of 2 from run/checkpoints/(last|best)\.ckpt, step (3|6|8|9|12)$",
        done.stderr,
        re.M,
    )
    assert begun, done.stderr
    assert "restart 2" not in done.stderr
    log = (tmp_path / "run/run.log").read_text()
    assert re.search(rf"resumed at epoch \d, step {begun[2]}$", log, re.M)
    assert is_same(weights(tmp_path), undisturbed(*setting))


def test_a_job_without_a_checkpoint_begins_again_and_draws_one_curve(tmp_path, undisturbed):
    setting = ("strategy=ddp", "trainer.gpus=2", "trainer.log_every=1")
    done = run(tmp_path, *setting, "trainer.max_restarts=1", **fail_at(1, 6, "raise"))
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1 from the beginning: there is no checkpoint yet" in done.stderr
    assert is_same(weights(tmp_path), undisturbed(*TWO))
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [point.step for point in events.Scalars("step/loss")] == list(range(1, 25))


def test_a_job_that_fails_more_often_than_it_may_ends_with_the_failure(tmp_path):
    given = fail_at(1, 2, "always")
    done = run(tmp_path, *TWO, "trainer.max_restarts=1", **given)
    assert done.returncode == 1
    assert done.stderr.count("restart ") == 1
    *_, broken, last = done.stderr.splitlines()
    assert broken == "ValueError: broken in rank 1"
    assert last.startswith("dpframe: the run is in run; ")


def test_one_process_refuses_to_restart_itself(tmp_path):
    done = run(tmp_path, "strategy=cpu", "trainer.max_restarts=1")
    assert (done.returncode, done.stderr) == (
        2,
        "dpframe: trainer.max_restarts=1 but CPU runs in this process, which can't start itself "
        "again; use strategy=ddp, or trainer.max_restarts=0\n",
    )
