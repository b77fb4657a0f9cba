"""Completes the command line of `dpframe` in a shell: Hydra's words.

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
from dpframe.config.help import topics
from dpframe.config.keys import has, may_take
from dpframe.config.loader import ConfigLoader
from dpframe.config.schema import CONFIG_NAME, OFF, PARTS, SWITCHED, WHOLE
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
WORD = re.compile(r"[\w./:=+~@,%^[\]-]+")
LIST = re.compile(r"([\w/]+)=\[((?:[^,\]]*,)*)([^,\]]*)")  # one that is not closed
KNOWN = [key for key in dict.fromkeys(WHOLE.values()) if key.partition(".")[0] in PARTS]

# In zsh, a function for bash has neither bash's arrays nor its arithmetic in ${…:…}.
BASH = """\
_dpframe_complete()
{
    local choice
    COMPREPLY=()
    while IFS= read -r choice; do
        [[ "$choice" == "$2"* ]] && COMPREPLY+=("$choice")
    done < <(COMP_LINE="${COMP_LINE:0:$COMP_POINT}" "$1" -sc query=bash 2> /dev/null)
}
[ -n "$ZSH_VERSION" ] || COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _dpframe_complete dpframe"""
ZSH = f"""\
(( $+functions[compdef] )) || {{ autoload -U compinit && compinit; }}
autoload -U bashcompinit && bashcompinit
{BASH}"""
FISH = """\
function _dpframe_complete
    set -l words (commandline -cpo)
    set -lx COMP_LINE (commandline -cp)
    $words[1] -sc query=fish 2> /dev/null
end
complete -c dpframe -f -a '(_dpframe_complete)'"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def complete(words: Sequence[str], options: Sequence[str] = ()) -> str:
    """The script of `install=bash`; for `query=bash`, the words that may come next, a line each.
    `options` are the command's, e.g. --help."""
    verb, _, shell = " ".join(words).partition("=")
    if verb == "query":
        return _query(options)
    if verb != "install" or shell not in SCRIPTS:
        near = suggestion(shell, SCRIPTS)
        raise UserError(f"--shell-completion {' '.join(words)}: use install=SHELL; {near}")
    return f"{SCRIPTS[shell]}\n"


def _query(options: Sequence[str]) -> str:
    """No words, silently, if something is wrong with the line."""
    found: list[str] = []
    with suppress(Exception, SystemExit), redirect_stderr(io.StringIO()):
        line = re.sub(r"^\s*\S+", "dpframe", os.environ.get("COMP_LINE", ""))
        # The user's folder, which Hydra's query would not understand.
        option = re.search(r"\s(?:--config-dir|-cd)[ =](\S+)(?=\s)", line)
        config_dir = os.path.expanduser(option[1]) if option else None
        words = (line.replace(option[0], "", 1) if option else line).split(" ")
        found = _words(words[1:-1], words[-1], options, config_dir)
    return "".join(f"{word}\n" for word in found if WORD.fullmatch(word))


def _words(
    before: list[str], typed: str, options: Sequence[str], config_dir: str | None
) -> list[str]:
    """What the word that is `typed` may become."""
    if typed.startswith("--"):
        return [option for option in options if option.startswith(typed)]
    if choices := _choices(typed):
        return choices
    configs = ConfigLoader(config_dir)
    if {"--help", "-h"} & {*before}:
        return [topic for topic in topics(configs) if topic.startswith(typed)]
    if part := LIST.fullmatch(typed):
        group, chosen, begun = part.groups()
        others = [option for option in configs.options(group) if option not in chosen.split(",")]
        return [f"{group}=[{chosen}{option}" for option in others if option.startswith(begun)]
    if (switches := _switches(before, typed, configs)) and "=" in typed:
        return switches
    of_classes = _of_classes(before, typed, configs)
    return sorted({*_of_hydra(before, typed, configs), *of_classes, *switches})


def _of_hydra(before: list[str], typed: str, configs: ConfigLoader) -> list[str]:
    if not any(re.match(r"~?recipe\b", word) for word in before):
        before = ["~recipe", *before]  # else nothing composes before a recipe is chosen
    os.environ["COMP_LINE"] = " ".join(["dpframe", *before, typed])
    kinds: Any = Plugins.instance().discover(CompletionPlugin)
    fish = next(kind for kind in kinds if kind.provides() == "fish")
    with redirect_stdout(io.StringIO()) as output:
        fish(configs).query(CONFIG_NAME)  # a word a line
    return output.getvalue().splitlines()


def _of_classes(before: list[str], typed: str, configs: ConfigLoader) -> list[str]:
    """Arguments that no file sets, but classes of such parts mostly take. To ask a class would be
    to import it, and torch with it."""
    known = [key for key in KNOWN if key.startswith(typed) and typed.count(".") == key.count(".")]
    config: dict[str, Any] = {}
    with suppress(UserError):  # without a recipe there are no classes
        config = configs.base(before) if known else {}
    return [f"{key}=" for key in known if not has(config, key) and may_take(config, key)]


def _switches(before: list[str], typed: str, configs: ConfigLoader) -> list[str]:
    """A callback or a logger is switched off, also one that is there by another option alone."""
    key, equals, begun = typed.partition("=")
    group, _, name = key.partition(".")
    if group not in SWITCHED or not name:
        return []
    parts = configs.parts(group)
    if not equals:
        return [f"{group}.{part}=" for part in parts if part.startswith(name)]
    with suppress(UserError):
        parts += configs.base(before)[group]
    return [f"{key}={off}" for off in OFF if name in parts and off.startswith(begun)]


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
