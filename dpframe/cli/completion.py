"""Completes the command line in a shell: Hydra's words, for `dpframe` and `python -m dpframe`."""

import argparse
import os
import re
import sys
from collections.abc import Sequence

from hydra._internal.hydra import Hydra
from hydra.plugins.completion_plugin import CompletionPlugin

from dpframe.cli.compose import CONFIG_NAME, explained, hydra_over
from dpframe.errors import UserError, suggestion

VERBS = ("install", "uninstall", "query")

# Hydra's own bash script completes `python FILE.py` and installed commands, not `python -m`.
BASH = """\
_dpframe_complete()
{
    local command="$1" choices
    if [ "$1" != dpframe ] && [ "${1##*/}" != dpframe ]; then
        [[ "$COMP_LINE" == *" -m dpframe "* ]] || return
        command="$1 -m dpframe"
    fi
    choices=$(COMP_LINE="${COMP_LINE:0:COMP_POINT}" $command -sc query=bash 2> /dev/null)
    COMPREPLY=($(compgen -W "$choices" -- "${COMP_WORDS[COMP_CWORD]}"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _dpframe_complete dpframe python python3"""
BASH_OFF = """\
complete -r dpframe python python3
unset -f _dpframe_complete"""


def complete(arguments: argparse.Namespace) -> None:
    verb, _, shell = "".join(arguments.overrides[:1]).partition("=")
    if verb not in VERBS or not shell or len(arguments.overrides) != 1:
        given = " ".join(arguments.overrides) or "nothing"
        raise UserError(f"--shell-completion {given}: say install=bash, uninstall=bash or =zsh …")
    if verb == "query":
        _query(shell)
        return
    with hydra_over(arguments.config_dir) as hydra, explained([]):
        _script(verb, _plugin(hydra, shell), shell)


def _script(verb: str, plugin: CompletionPlugin, shell: str) -> None:
    if shell in ("bash", "zsh"):  # zsh reads it after `autoload -U bashcompinit; bashcompinit`
        print(BASH if verb == "install" else BASH_OFF)
        return
    sys.argv[0] = "dpframe"  # what Hydra's scripts call: `__main__.py` is nothing to call
    getattr(plugin, verb)()


def _plugin(hydra: Hydra, shell: str) -> CompletionPlugin:
    plugins = Hydra.get_shell_to_plugin_map(hydra.config_loader)
    if shell not in plugins:
        known = [name for name, found in plugins.items() if found]
        raise UserError(
            f"--shell-completion: no completion for {shell}; {suggestion(shell, known)}"
        )
    return plugins[shell][0]


def _query(shell: str) -> None:
    """Prints the words that may come next. Whatever is wrong with the line: none, and no noise."""
    sys.stderr = None  # type: ignore[assignment]  # argparse's, about an option not yet whole
    try:
        line = re.sub(r"^\s*\S+(\s+-m\s+dpframe\b)?", "dpframe", os.environ.get("COMP_LINE", ""))
        config_dir, words = _config_dir(line.split(" "))
        if not any(re.match(r"~?recipe\b", word) for word in words[1:-1]):
            words.insert(1, "~recipe")  # else nothing composes before a recipe is chosen
        os.environ["COMP_LINE"] = " ".join(words)
        with hydra_over(config_dir) as hydra:
            _plugin(hydra, shell).query(config_name=CONFIG_NAME)
    except (Exception, SystemExit):
        return
    finally:
        sys.stderr = sys.__stderr__


def _config_dir(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The user's folder, and the line without it, which Hydra's query would not understand."""
    line = " ".join(words)
    found = re.search(r"\s(?:--config-dir|-cd)[ =](\S+)(?=\s)", line)
    if found is None:
        return None, list(words)
    return os.path.expanduser(found[1]), line.replace(found[0], "", 1).split(" ")
