"""`run.log` has every rank's lines; the screen has the main one's."""

import logging
import re
import subprocess
import sys
from pathlib import Path

from dpframe.cli.logs import logging_to

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


def test_each_line_of_a_message_says_whose_it_is(tmp_path: Path, capsys) -> None:
    with logging_to(tmp_path, rank=0):
        logging.getLogger("mine").info("one %s\n\n  three", "a\nb")
        logging.getLogger("mine").warning("")
    start, end = r"^\S+ \S+ \[rank 0\] ", "$"
    lines = (tmp_path / "run.log").read_text().splitlines()
    wanted = ["INFO mine: one a", "INFO mine: b", "INFO mine: ", "INFO mine:   three"]
    for line, text in zip(lines, [*wanted, "WARNING mine: "], strict=True):
        assert re.search(start + text + end, line), line
    assert capsys.readouterr().out == "one a\nb\n\n  three\nwarning: \n"
