"""Tab completion, as bash does it: by the function that the install script defines."""

import os
import shutil
import subprocess
import sys

import pytest
from command import environment, write

BOSTON = "# @package _global_\ndefaults:\n  - boston\n  - _self_\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("command", ["python -m dpframe", "./dpframe"])
def test_bash_completes(command, tmp_path):
    write(tmp_path / "mine", {"recipe/ours.yaml": BOSTON})
    script = f'#!/bin/sh\nexec {sys.executable} -m dpframe "$@"\n'
    write(tmp_path, {"dpframe": script, "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n'})
    for name in ("dpframe", "python"):
        (tmp_path / name).chmod(0o755)
    typed = {
        "recipe=": "recipe=boston recipe=lenet recipe=shapes",
        "recipe=bo": "recipe=boston",
        "trainer.max_s": "trainer.max_seconds= trainer.max_steps=",
        "recipe=boston task.optimizer.l": "task.optimizer.lr=",
        "recipe=boston strategy=c": "strategy=cpu",
        "--config-dir mine recipe=o": "recipe=ours",
        "recipe=bosten trainer.max_": "",
        "recipe=boston 'x y": "",
        "--hlp": "",
    }
    lines = "\n".join(f'complete_line "{command} {words}"' for words in typed)
    bash = f"""
eval "$({command} -sc install=bash)"
complete_line() {{
    COMP_LINE="$1" COMP_POINT=${{#1}} COMP_WORDS=($1)
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)) COMPREPLY=()
    _dpframe_complete "${{COMP_WORDS[0]}}"
    echo "${{COMPREPLY[*]}}"
}}
complete -p dpframe python > /dev/null || exit 1
{lines}
"""
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "-c", bash], capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert done.stdout.splitlines() == list(typed.values())
    assert done.stderr == ""
