"""What a run prints: `run.log` has every rank's lines, the screen the main one's; and neither a
missing reader, terminal, disk nor unicode ends a run or shows a traceback."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import yaml
from command import attempts, environment, write
from forked import run
from small import trainer

from dpframe.callbacks.progress import Progress
from dpframe.modes.output import logging_to

OWN = """
import logging
import dpframe
from dpframe.errors import Failure

class Talkative(dpframe.Callback):
    def on_fit_start(self, trainer):
        logging.getLogger("mine").info("hello from rank %s", trainer.strategy.rank)

class Refuses(dpframe.Callback):
    def __init__(self, step):
        self.step = step
    def on_batch_start(self, trainer, batch):
        if trainer.global_step == self.step and trainer.strategy.rank == 1:
            raise dpframe.UserError("it is over")

class Ends(dpframe.Callback):
    def __init__(self, how):
        self.how = how
    def on_step_end(self, trainer):
        if trainer.global_step == 2:
            raise {"failure": Failure, "refusal": dpframe.UserError, "bug": ValueError}[self.how](
                "it is over\\nfor good"
            )
"""


def test_run_log_has_the_lines_of_every_rank_and_the_screen_the_main_ones(tmp_path: Path) -> None:
    write(tmp_path, {"own.py": OWN})
    words = ["recipe=boston", "+callbacks.own._target_=own.Talkative", "strategy=ddp"]
    words += ["trainer.gpus=2", "trainer.max_epochs=2", "hydra.run.dir=run"]
    done = run(words, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert sum("[rank 0] INFO mine: hello from rank 0" in line for line in lines) == 1
    assert sum("[rank 1] INFO mine: hello from rank 1" in line for line in lines) == 1
    assert sum("epoch 2/2" in line for line in lines) == 1
    assert "hello from rank 0" in done.stdout
    assert "hello from rank 1" not in done.stdout + done.stderr


def test_a_run_that_failed_keeps_its_directory_with_the_reason_in_its_log(tmp_path: Path) -> None:
    write(tmp_path, {"own.py": OWN})
    kinds = {"failure": 1, "refusal": 2, "bug": 1}
    ends = "+callbacks.ends={{_target_: own.Ends, how: {}}}"
    lines = [["recipe=boston", f"hydra.run.dir={how}", ends.format(how)] for how in kinds]
    for code, done in zip(kinds.values(), attempts(lines, tmp_path), strict=True):
        assert done.code == code, done.err
        assert "it is over" not in done.out
    ended = {how: (tmp_path / how / "run.log").read_text() for how in kinds}
    start = r"(?m)^\S+ \S+ \[rank 0\] ERROR dpframe: "
    for how in ("failure", "refusal"):
        assert re.split(start, ended[how])[1:] == ["it is over\n", "for good\n"]
    *traceback, message, rest, of = re.split(start, ended["bug"])[1:]
    assert traceback[0] == "Traceback (most recent call last):\n"
    assert (message, rest) == ("ValueError: it is over\n", "for good\n")
    assert re.fullmatch(r"ValueError in on_\w+ of the callback Ends\n", of)
    reasons = {how: json.loads((tmp_path / how / "summary.json").read_text()) for how in ended}
    assert {how: (it["status"], it["reason"]) for how, it in reasons.items()} == {
        "failure": ("failed", "it is over\nfor good"),
        "refusal": ("failed", "it is over\nfor good"),
        "bug": ("failed", "ValueError: it is over\nfor good"),
    }


def test_a_refusal_by_any_rank_before_the_first_step_alone_removes_the_run(tmp_path: Path) -> None:
    write(tmp_path, {"own.py": OWN})
    words = ["recipe=boston", "strategy=ddp", "trainer.gpus=2"]
    for step, is_kept in ((0, False), (2, True)):
        ends = f"+callbacks.ends={{_target_: own.Refuses, step: {step}}}"
        folder = f"hydra.run.dir=after-{step}"
        done = run([*words, ends, folder], tmp_path, PYTHONPATH=str(tmp_path))
        assert done.returncode == 2 and "it is over" in done.stderr
        assert (tmp_path / f"after-{step}").exists() is is_kept
    summary = json.loads((tmp_path / "after-2/summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", "it is over")


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


COMMAND = f"{sys.executable} -m dpframe"


def test_a_run_and_the_streams_it_may_find(tmp_path):
    run = f"{COMMAND} recipe=boston trainer.max_epochs=3"
    lines = [
        f"{run} < /dev/null | head -1",
        f"{run} <&- >&- 2>&-",
        f"{run} strategy=ddp trainer.gpus=2 > /dev/full 2>&1",
    ]
    for line in lines:
        done = shell(f"set -o pipefail; {line}", tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), line
    summaries = list(tmp_path.glob("outputs/boston/*/summary.json"))
    assert len(summaries) == len(lines), "the reader left, the run went on"


def test_help_over_a_pipe_and_without_unicode(tmp_path):
    piped = shell(f"{COMMAND} --help | head -1; echo ${{PIPESTATUS[0]}}", tmp_path)
    assert piped.stderr == "" and piped.stdout.splitlines()[-1] in ("0", "141")
    for ascii_only in ("PYTHONIOENCODING=ascii", "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"):
        done = shell(f"{ascii_only} {COMMAND} --help", tmp_path)
        assert done.returncode == 0 and "[key=value ?]" in done.stdout
        refused = shell(f"{ascii_only} {COMMAND} recipe=$'\\xff'", tmp_path)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1


def test_on_a_full_device_the_exit_code_alone_tells_what_happened(tmp_path):
    refused = shell(f"{COMMAND} recipe=boton > /dev/full 2>&1", tmp_path)
    assert refused.returncode == 2, "the line has no place to go"
    asked = shell(f"{COMMAND} --help > /dev/full", tmp_path)
    said = "dpframe: the output can't be written: No space left on device\n"
    assert (asked.returncode, asked.stderr) == (1, said)


def shell(line, directory):
    words = ["bash", "-c", line]
    return subprocess.run(words, capture_output=True, text=True, cwd=directory, env=environment())


# Clears the screen, hides the cursor's way, sets the title, turns the writing direction.
STEERING = "\x1b[2J \x9b2K \x1b]0;mine\x07 \r \u202e \u2066 \x08"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def test_no_file_steers_the_terminal(tmp_path):
    """By its comments, its name, its keys or its values, in help, in errors or in a config."""
    text = yaml.safe_dump(STEERING).strip()
    recipes = [
        f"recipe: {text}",
        f"defaults: [boston, _self_]\nrecipe: {text}",
        f"defaults: [boston, _self_]\ntrainer: {{max_epochs: {text}}}",
        f"defaults: [boston, _self_]\n{text}: 1\n",
        f"defaults: [boston, _self_]\ntask: {{_target_: {text}}}",
        f"defaults: [boston, _self_]\nlogger: {{csv: {{file: {text}}}}}",
        f"defaults: [boston, _self_]\nvars: {{x: {text}}}\ntask: {{net: 3}}",
        f"defaults: [boston, {text}]",
        f"{STEERING}: [",
    ]
    files = {f"recipe/r{n}.yaml": f"# @package _global_\n{x}" for n, x in enumerate(recipes)}
    files |= {f"recipe/{STEERING}.yaml": f"# {STEERING}\n", f"{STEERING}/a.yaml": "x: 1"}
    write(tmp_path / "mine", files)
    lines = [[f"recipe=r{n}", "trainer.max_epochs=1"] for n in range(len(recipes))]
    lines += [["-m", *line] for line in lines[:3]]
    lines += [["--help"], ["recipe=none"], ["recipe=r6", "-c", "job"], ["recipe=boston", "-i"]]
    lines += [["recipe=r6", "-c", "job", "-p", "vars.x"]]
    done = attempts([["--config-dir=mine", *line] for line in lines], tmp_path)
    for line, attempt in zip(lines, done, strict=True):
        assert not STEERS.search(attempt.out + attempt.err), (line, attempt)
        assert attempt.out or attempt.err, line


def test_neither_a_run_nor_a_log_steers_the_terminal(tmp_path, capsys):
    made = trainer(callbacks=[Progress(bar=False)], max_epochs=1)
    made.run.recipe = made.run.directory = STEERING
    with logging_to(tmp_path, rank=0):
        made.fit()
        logging.getLogger("dpframe").warning("there is no %s", STEERING)
        logging.getLogger("mine").info("\x1b[32mgreen\x1b[0m")
    shown = capsys.readouterr().out
    coloured = "\x1b[32mgreen\x1b[0m"
    assert coloured in shown and not STEERS.search(shown.replace(coloured, ""))
    assert "\\x1b[2J \\x9b2K" in shown
    assert "\\x1b[2J \\x9b2K" in (tmp_path / "run.log").read_text()
