"""Completes the command line in a shell: Hydra's words, for `dpframe` and `python -m dpframe`.

The words come from files that anybody may have written: the scripts never let a shell evaluate
them, and a word that a shell would evaluate once it is in the command line is not offered.
"""

import io
import os
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import fields
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin

from dpframe.config import modes
from dpframe.config.schema import CONFIG_NAME
from dpframe.config.search import Configs
from dpframe.errors import UserError, suggestion
from dpframe.trainer.settings import CHOICES as SETTINGS
from dpframe.trainer.settings import TrainerSettings

CHOICES = {
    "mode": modes.names(),
    "sweep.mode": ("min", "max"),
    "checkpoint": ("best", "last", "none"),
    "resume": ("last",),
    **{f"trainer.{key}": values for key, values in SETTINGS.items()},
    **{f"trainer.{f.name}": ("true", "false") for f in fields(TrainerSettings) if f.type is bool},
}
FILES = ("checkpoint", "resume", "sweep.resume")
WORD = re.compile(r"[\w./:=+~@,%^-]+")

# Python's -P: completion does not import what is in the current directory.
# In zsh, a function for bash has neither bash's arrays nor its arithmetic in ${…:…}.
BASH = """\
_dpframe_complete()
{
    local call choice
    call=("$1")
    case "$1" in
        dpframe|*/dpframe) ;;
        *) [[ "$COMP_LINE" == *" -m dpframe "* ]] || return; call=("$1" -P -m dpframe) ;;
    esac
    COMPREPLY=()
    while IFS= read -r choice; do
        [[ "$choice" == "$2"* ]] && COMPREPLY+=("$choice")
    done < <(COMP_LINE="${COMP_LINE:0:$COMP_POINT}" "${call[@]}" -sc query=bash 2> /dev/null)
}
[ -n "$ZSH_VERSION" ] || COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _dpframe_complete dpframe python python3"""
ZSH = f"""\
(( $+functions[compdef] )) || {{ autoload -U compinit && compinit; }}
autoload -U bashcompinit && bashcompinit
{BASH}"""
FISH = """\
function _dpframe_is_called
    set -l words (commandline -cpo)
    test "$words[2..3]" = "-m dpframe"
end
function _dpframe_complete
    set -l words (commandline -cpo)
    set -l call $words[1]
    _dpframe_is_called; and set call $call -P -m dpframe
    set -lx COMP_LINE (commandline -cp)
    $call -sc query=fish 2> /dev/null
end
complete -c dpframe -f -a '(_dpframe_complete)'
complete -c python -n _dpframe_is_called -f -a '(_dpframe_complete)'
complete -c python3 -n _dpframe_is_called -f -a '(_dpframe_complete)'"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def complete(words: Sequence[str]) -> str:
    """The script of `install=bash`; for `query=bash`, the words that may come next, a line each."""
    verb, _, shell = " ".join(words).partition("=")
    if verb == "query":
        return _query()
    if verb != "install" or shell not in SCRIPTS:
        near = suggestion(shell, SCRIPTS)
        raise UserError(f"--shell-completion {' '.join(words)}: use install=SHELL; {near}")
    return f"{SCRIPTS[shell]}\n"


def _query() -> str:
    """No words, silently, if something is wrong with the line."""
    output = io.StringIO()
    with suppress(Exception, SystemExit), redirect_stdout(output), redirect_stderr(io.StringIO()):
        line = re.sub(r"^\s*\S+(\s+-m\s+dpframe\b)?", "dpframe", os.environ.get("COMP_LINE", ""))
        # The user's folder, which Hydra's query would not understand.
        option = re.search(r"\s(?:--config-dir|-cd)[ =](\S+)(?=\s)", line)
        config_dir = os.path.expanduser(option[1]) if option else None
        words = (line.replace(option[0], "", 1) if option else line).split(" ")
        if not any(re.match(r"~?recipe\b", word) for word in words[1:-1]):
            words.insert(1, "~recipe")  # else nothing composes before a recipe is chosen
        if choices := _choices(words[-1]):
            return "".join(f"{word}\n" for word in choices if WORD.fullmatch(word))
        os.environ["COMP_LINE"] = " ".join(words)
        configs = Configs(config_dir)
        kinds: Any = Plugins.instance().discover(CompletionPlugin)
        fish = next(kind for kind in kinds if kind.provides() == "fish")
        fish(configs).query(CONFIG_NAME)  # a word a line
    return "".join(f"{word}\n" for word in output.getvalue().splitlines() if WORD.fullmatch(word))


def _choices(typed: str) -> list[str]:
    """The values of a key that has only some, and the files where it names one."""
    key, equals, begun = typed.partition("=")
    values = list(CHOICES.get(key, ())) if equals else []
    values += _files(begun) if key in FILES and equals else []
    return sorted(f"{key}={value}" for value in values if value.startswith(begun))


def _files(begun: str) -> list[str]:
    """What is in the folder that the word has come to; hidden files only if they are meant."""
    folder, name = os.path.split(begun)
    with suppress(OSError), os.scandir(os.path.expanduser(folder) or ".") as entries:
        shown = (entry for entry in entries if name.startswith(".") or entry.name[0] != ".")
        return [os.path.join(folder, entry.name) + "/" * entry.is_dir() for entry in shown]
    return []
