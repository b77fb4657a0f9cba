"""`run.log` has every rank's lines; the screen has the main one's."""

import logging
import re
import subprocess
import sys
from pathlib import Path

from command import attempts

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


ENDS = """
import dpframe
from dpframe.errors import Failure

class Ends(dpframe.Callback):
    def __init__(self, how):
        self.how = how
    def on_step_end(self, trainer):
        if trainer.global_step == 2:
            raise {"failure": Failure, "refusal": dpframe.UserError, "bug": ValueError}[self.how](
                "it is over\\nfor good"
            )
"""


def test_a_run_that_failed_keeps_its_directory_with_the_reason_in_its_log(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    kinds = {"failure": 1, "refusal": 2, "bug": 1}
    ends = "+callbacks.ends={{_target_: ends.Ends, how: {}}}"
    lines = [["recipe=boston", f"hydra.run.dir={how}", ends.format(how)] for how in kinds]
    for code, done in zip(kinds.values(), attempts(lines, tmp_path), strict=True):
        assert done.code == code, done.err
        assert "it is over" not in done.out
    assert not (tmp_path / "refusal").exists()
    ended = {how: (tmp_path / how / "run.log").read_text() for how in ("failure", "bug")}
    start = r"(?m)^\S+ \S+ \[rank 0\] ERROR dpframe: "
    assert re.split(start, ended["failure"])[1:] == ["it is over\n", "for good\n"]
    *traceback, message, rest = re.split(start, ended["bug"])[1:]
    assert traceback[0] == "Traceback (most recent call last):\n"
    assert (message, rest) == ("ValueError: it is over\n", "for good\n")
    assert not list(tmp_path.glob("*/summary.json"))


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
