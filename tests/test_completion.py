"""Tab completion, as each shell does it: by the functions that the install scripts define."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import CONFS, environment, write

from dpframe.cli.completion import complete
from dpframe.config.modes import names
from dpframe.errors import UserError

BOSTON = "# @package _global_\ndefaults:\n  - boston\n  - _self_\n"
RECIPES = sorted(f"recipe={path.stem}" for conf in CONFS for path in conf.glob("recipe/*.yaml"))
TYPED = {
    "recipe=": " ".join(RECIPES),
    "recipe=bo": "recipe=boston",
    "trainer.max_s": "trainer.max_seconds= trainer.max_skipped_steps= trainer.max_steps=",
    "recipe=boston task.optimizer.l": "task.optimizer.lr=",
    "recipe=boston strategy=c": "strategy=cpu",
    "--config-dir mine recipe=o": "recipe=ours",
    "recipe=bosten trainer.max_": "",
    "recipe=boston 'x y": "",
    "--hlp": "",
    "--ver": "--version",
    "recipe=boston --cf": "--cfg",
    "--help trainer.max_s": "trainer.max_seconds trainer.max_skipped_steps trainer.max_steps",
    "recipe=boston logger=[tensorboard,c": "logger=[tensorboard,csv",
    "recipe=boston task.optimizer.we": "task.optimizer.weight_decay=",
    "recipe=shapes task.optimizer.we": "",
}
HERE = ("best", "dpframe", "last", "mine/", "none")  # three words, and what is there
CHOSEN = {
    "recipe=boston mode=": " ".join(sorted(f"mode={mode}" for mode in names())),
    "mode=te": "mode=test",
    "mode=test checkpoint=": " ".join(f"checkpoint={word}" for word in HERE),
    "mode=test checkpoint=mine/r": "checkpoint=mine/recipe/",
    "recipe=boston task/schedule=w": "task/schedule=warmup_cosine task/schedule=wsd",
    "recipe=boston task/schedule=wsd task.schedule.d": "task.schedule.decay=",
    "recipe=boston callbacks.ea": "callbacks.early_stopping=",
    "recipe=boston callbacks.progress=": "callbacks.progress=false callbacks.progress=null",
    "recipe=boston logger.wandb=f": "logger.wandb=false",
    "trainer.deterministic=": "trainer.deterministic=false trainer.deterministic=true",
}
# Of them, what other shells and names of the command are asked: a word, one after others, a path.
OTHERWISE = ("recipe=bo", "recipe=boston task.optimizer.l", "mode=test checkpoint=mine/r")
# What each shell runs when a key is pressed, with the line up to the cursor in $1 or $argv.
SHELLS = {
    "bash": """
eval "$({command} -sc install=bash)"
complete -p dpframe > /dev/null || exit 1
complete_line() {{
    COMP_LINE="$1" COMP_POINT=${{#1}} COMP_WORDS=($1)
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)) COMPREPLY=()
    _dpframe_complete "${{COMP_WORDS[0]}}" "${{COMP_WORDS[COMP_CWORD]}}"
    echo "${{COMPREPLY[*]}}"
}}
""",
    "zsh": """
eval "$({command} -sc install=zsh)"
[[ -n $_comps[dpframe] ]] || exit 1
complete_line() {{
    local -a words COMPREPLY; words=( ${{=1}} )
    local CURRENT=$#words COMP_LINE="$1" COMP_POINT=$(( 1 + $#1 ))
    echo $(compgen -F _dpframe_complete -- $words[-1])
}}
""",
    "fish": """
{command} -sc install=fish | source
function complete_line
    echo (complete -C $argv[1] | sort)
end
""",
}


def test_each_shell_has_a_script_of_its_own_and_another_name_is_refused():
    scripts = [complete([f"install={shell}"]) for shell in SHELLS]
    assert len(set(scripts)) == 3 and all("-sc query=" in script for script in scripts)
    with pytest.raises(UserError, match="install=bsh.*did you mean bash"):
        complete(["install=bsh"])


def completed(shell: str, command: str, typed: list[str], place: Path) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    write(place, {"dpframe": f'#!/bin/sh\nexec {sys.executable} -m dpframe "$@"\n'})
    (place / "dpframe").chmod(0o755)
    lines = [f"complete_line {quoted(f'{command} {words}')}" for words in typed]
    text = "\n".join([SHELLS[shell].format(command=command), *lines])
    env = environment(PATH=f"{place}:{os.environ['PATH']}", HOME=str(place))
    words = [shell, "-f", "-c", text] if shell == "zsh" else [shell, "-c", text]
    done = subprocess.run(words, capture_output=True, text=True, cwd=place, env=env)
    assert done.stderr == ""
    return done.stdout.splitlines()


def quoted(line: str) -> str:
    return '"' + line.replace('"', '\\"') + '"'


@pytest.mark.parametrize(
    "shell, command",
    [("bash", "dpframe"), ("bash", "./dpframe"), ("zsh", "dpframe"), ("fish", "dpframe")],
)
def test_a_shell_completes(shell, command, tmp_path):
    """All that is asked for in one of them; each press of a key starts an interpreter."""
    write(tmp_path / "mine", {"recipe/ours.yaml": BOSTON})
    typed = TYPED | CHOSEN
    if (shell, command) != ("bash", "dpframe"):
        typed = {words: typed[words] for words in OTHERWISE}
    assert completed(shell, command, list(typed), tmp_path) == list(typed.values())


@pytest.mark.parametrize(
    "shell, command", [("bash", "dpframe"), ("zsh", "./dpframe"), ("fish", "./dpframe")]
)
def test_no_name_of_a_file_or_a_key_is_evaluated(shell, command, tmp_path):
    """Neither when the key is pressed, nor when the line that it has completed is entered."""
    evil = ["$(touch pwned)", "`touch pwned`", "x;touch pwned", "x${IFS}", "'x", "\x1b[2Jx"]
    keys = "".join(f'  "{key}": 1\n'.replace("\x1b", "\\e") for key in [*evil, "fine"])
    write(tmp_path / "mine", {"recipe/ours.yaml": f"{BOSTON}vars:\n{keys}"})
    write(tmp_path / "mine", {f"strategy/c{name}.yaml": "x: 1" for name in evil})
    write(tmp_path / "data", dict.fromkeys([*evil, "rows.csv"], ""))
    typed = ["recipe=boston checkpoint=./data/", "--config-dir mine recipe=ours vars."]
    typed += ["--config-dir mine recipe=ours strategy=c"]
    found = completed(shell, command, typed, tmp_path)
    assert found == ["checkpoint=./data/rows.csv", "vars.fine=", "strategy=cpu"]
    assert not list(tmp_path.rglob("pwned"))
