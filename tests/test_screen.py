"""No reader, no terminal, no disk, no unicode: none of it ends a run or shows a traceback."""

import logging
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from command import attempts, environment, write
from small import trainer

from dpframe.callbacks.progress import Progress
from dpframe.cli.logs import logging_to


def test_a_run_and_the_streams_it_may_find(tmp_path):
    run = f"{sys.executable} -m dpframe recipe=boston trainer.max_epochs=3"
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
    command = f"{sys.executable} -m dpframe"
    piped = shell(f"{command} --help | head -1; echo ${{PIPESTATUS[0]}}", tmp_path)
    assert piped.stderr == "" and piped.stdout.splitlines()[-1] in ("0", "141")
    for ascii_only in ("PYTHONIOENCODING=ascii", "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"):
        done = shell(f"{ascii_only} {command} --help", tmp_path)
        assert done.returncode == 0 and "[key=value ?]" in done.stdout
        refused = shell(f"{ascii_only} {command} recipe=$'\\xff'", tmp_path)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1


def test_on_a_full_device_the_exit_code_alone_tells_what_happened(tmp_path):
    command = f"{sys.executable} -m dpframe"
    refused = shell(f"{command} recipe=boton > /dev/full 2>&1", tmp_path)
    assert refused.returncode == 2, "the line has no place to go"
    asked = shell(f"{command} --help > /dev/full", tmp_path)
    said = "dpframe: the output can't be written: No space left on device\n"
    assert (asked.returncode, asked.stderr) == (1, said)


def shell(line, directory):
    words = ["bash", "-c", line]
    return subprocess.run(words, capture_output=True, text=True, cwd=directory, env=environment())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see torch being imported")
def test_ctrl_c_while_torch_is_imported_is_130_without_a_traceback(tmp_path):
    with training(tmp_path) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while "libtorch" not in maps.read_text():
            time.sleep(0.01)
        assert_interrupted(process, "dpframe: interrupted by SIGINT\n")


def test_ctrl_c_while_training_is_130_without_a_traceback(tmp_path):
    with training(tmp_path) as process:
        assert any(line.startswith("epoch 3/") for line in process.stdout)
        assert_interrupted(
            process,
            r"dpframe: interrupted by SIGINT after step \d+; "
            r"go on with resume=outputs/boston/\S+\n",
        )


@contextmanager
def training(directory):
    words = [sys.executable, "-m", "dpframe", "recipe=boston", "trainer.max_epochs=1000000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=directory, env=environment(), **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def assert_interrupted(process, said):
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(said, err), err


# Clears the screen, hides the cursor's way, sets the title, turns the writing direction.
STEERING = "\x1b[2J \x9b2K \x1b]0;mine\x07 \r \u202e \u2066 \x08"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def test_no_file_steers_the_terminal(tmp_path):
    """By its comments, its name, its keys or its values, in help, in errors or in a config."""
    name = STEERING.replace("/", "")
    text = yaml.safe_dump(STEERING)
    recipe = "# @package _global_\n"
    for n, more in enumerate(
        (
            f"recipe: {text}",
            f"defaults: [boston, _self_]\nrecipe: {text}",
            f"defaults: [boston, _self_]\ntrainer: {{max_epochs: {text}}}",
            f"defaults: [boston, _self_]\n{text.strip()}: 1\n",
            f"defaults: [boston, _self_]\ntask: {{_target_: {text}}}",
            f"defaults: [boston, _self_]\nlogger: {{csv: {{file: {text}}}}}",
            f"defaults: [boston, _self_]\nvars: {{x: {text}}}\ntask: {{net: 3}}",
            f"defaults: [boston, {text}]",
            f"{STEERING}: [",
        )
    ):
        write(tmp_path / "mine", {f"recipe/r{n}.yaml": recipe + more.replace("\n}", "}")})
    write(tmp_path / "mine", {f"recipe/{name}.yaml": f"# {STEERING}\n", f"{name}/a.yaml": "x: 1"})
    start = ["--config-dir=mine"]
    lines = [[*start, f"recipe=r{n}", "trainer.max_epochs=1"] for n in range(9)]
    lines += [["-m", *line] for line in lines[:3]]
    lines += [[*start, "--help"], [*start, "recipe=none"], [*start, "recipe=r6", "-c", "job"]]
    lines += [[*start, "recipe=r6", "-c", "job", "-p", "vars.x"], [*start, "recipe=boston", "-i"]]
    for line, attempt in zip(lines, attempts(lines, tmp_path), strict=True):
        found = STEERS.search(attempt.out + attempt.err)
        assert not found, (line, found, attempt)
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
