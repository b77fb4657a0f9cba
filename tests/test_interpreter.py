"""A function in an interpreter of its own: its prints, its errors, and how it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import environment

from dpframe import UserError
from dpframe.errors import Interrupted
from dpframe.launch import interpreter, signals


def call(function: Callable[..., Any], *args: Any) -> Any:
    """By a pickle that no pipe takes at once, as a real model's."""
    return interpreter.call(without_ballast, function, args, bytes(4 * 2**20))


def without_ballast(function: Callable[..., Any], args: tuple, ballast: bytes) -> Any:
    return function(*args)


def test_what_no_pipe_takes_at_once_arrives_and_comes_back():
    content = os.urandom(2**20)
    assert interpreter.call(bytes, content) == content


def told(text: str) -> int:
    print(text)
    print("aside", file=sys.stderr)
    raise UserError(f"{text}, but not this")


def test_what_it_prints_is_printed_here_and_what_it_raises_is_raised_here(capsys):
    with pytest.raises(UserError, match="^ärger, but not this$"):
        call(told, "ärger")
    assert capsys.readouterr() == ("ärger\n", "aside\n")


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__("its pickle lacks an argument")


def odd() -> None:
    raise Odd(1, 2)


def test_what_can_not_be_sent_back_is_told_as_text():
    with pytest.raises(RuntimeError, match="Odd: its pickle lacks an argument"):
        call(odd)


def waits(folder: Path) -> None:
    stop = signals.current()
    assert stop is not None
    stop.begin()
    (folder / "pid").write_text(str(os.getpid()))
    while stop.number is None:
        time.sleep(0.01)
    raise Interrupted(stop.number, " after step 3")


def test_ctrl_c_is_its_own_to_end_by(tmp_path, capsys):
    def interrupt():
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="^interrupted by SIGINT after step 3$"):
        call(waits, tmp_path)
    thread.join()
    assert capsys.readouterr().err == ""  # Python shows the exception


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's kernel ends it")
def test_it_ends_with_the_program_that_has_called_it(tmp_path):
    code = "import pathlib, test_interpreter; "
    code += f"test_interpreter.call(test_interpreter.waits, pathlib.Path({str(tmp_path)!r}))"
    paths = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    program = subprocess.Popen([sys.executable, "-c", code], env=environment(PYTHONPATH=paths))
    while not (tmp_path / "pid").exists():
        time.sleep(0.01)
    program.kill()
    program.wait()  # and `nothing_leaks` looks for the other


def test_what_no_process_can_get_is_refused_in_one_line():
    with pytest.raises(UserError, match="^another process can't get all of this: .*lock"):
        interpreter.pack(threading.Lock())
