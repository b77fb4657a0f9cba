"""`run.log` has every rank's lines; the screen has the main one's."""

import subprocess
import sys
from pathlib import Path

TALKATIVE = """
import logging
import dpframe

class Talkative(dpframe.Callback):
    def on_fit_start(self, trainer):
        logging.getLogger("mine").info("hello from rank %s", trainer.strategy.rank)
"""
RECIPE = """
# @package _global_
defaults:
  - boston
  - _self_
callbacks:
  talkative: {_target_: talkative.Talkative}
"""


def test_run_log_has_the_lines_of_every_rank_and_the_screen_the_main_ones(tmp_path: Path) -> None:
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "dpframe", "--config-dir=.", "recipe=mine", "strategy=ddp"]
    done = subprocess.run(
        [*command, "trainer.gpus=2", "trainer.max_epochs=2", "hydra.run.dir=run"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert sum("[rank 0] INFO mine: hello from rank 0" in line for line in lines) == 1
    assert sum("[rank 1] INFO mine: hello from rank 1" in line for line in lines) == 1
    assert sum("epoch 2/2" in line for line in lines) == 1
    assert "hello from rank 0" in done.stdout
    assert "hello from rank 1" not in done.stdout + done.stderr
