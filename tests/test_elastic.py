"""How ranks that torchrun has started again find their job; tests/test_torchrun.py has torchrun."""

from pathlib import Path
from typing import Any

import pytest
from command import write

from dpframe import Strategy, checkpoint
from dpframe.config.compose import Composed, composed
from dpframe.modes import elastic
from dpframe.strategies.collectives import Collectives


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Composed:
    """Of a rank that torchrun has started, with a directory of its own and one of a stranger."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    notes = {"own": f"node9 1 2\n{elastic.agent()}\n", "stranger": "node9 1 2\n"}
    write(tmp_path, {f"{name}/.hydra/torchrun": text for name, text in notes.items()})
    return composed(["recipe=boston", f"hydra.run.dir={tmp_path}/new"])


def test_ranks_go_on_from_the_checkpoint_of_the_torchrun_that_started_them(job, tmp_path):
    saved(tmp_path / "stranger", step=9)
    saved(tmp_path / "own", step=4)
    going_on, line = elastic.find(job, Strategy())
    assert going_on.start == tmp_path / "own/checkpoints/last.ckpt"
    assert going_on.settings.resume and "step 4" in line


def test_ranks_that_failed_before_a_checkpoint_begin_again_in_their_directory(job, tmp_path):
    going_on, line = elastic.find(job, Strategy())
    assert (going_on.run_dir, going_on.is_repeated) == (str(tmp_path / "own"), True)
    assert going_on.start is None and line == ""


def test_the_first_ranks_of_a_torchrun_and_those_of_no_torchrun_begin(job, tmp_path, monkeypatch):
    (tmp_path / "own/.hydra/torchrun").unlink()
    assert elastic.find(job, Strategy()) == (job, "")
    elastic.note(str(tmp_path / "own"), Strategy())
    assert elastic.find(job, Strategy())[0] is not job
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert elastic.find(job, Strategy()) == (job, "")


def test_a_machine_that_is_back_goes_on_with_the_others(job, tmp_path):
    """Whose job it is, any of them knows."""
    saved(tmp_path / "stranger", step=4)
    (tmp_path / "own/.hydra/torchrun").unlink()

    class Second(Collectives):
        def gather(self, value: Any) -> list[Any]:
            return [value, "node9 1 2"]

    strategy = Strategy()
    strategy.collectives = Second()
    going_on, _ = elastic.find(job, strategy)
    assert going_on.start == tmp_path / "stranger/checkpoints/last.ckpt"


def saved(run: Path, *, step: int) -> None:
    state = {"task": {}, "progress": {"global_step": step}}
    checkpoint.save(state, run / "checkpoints" / "last.ckpt")
