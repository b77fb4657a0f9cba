"""The command: reads its arguments and runs one job or a sweep."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from dpframe.cli.exit import collect_garbage, leave_after
from dpframe.errors import UserError, nearest
from dpframe.launch.signals import raise_if_signaled
from dpframe.modes import output

# Keys of the config, known before it is read.
KEYS = {"recipe", "strategy", "trainer", "task", "data", "callbacks", "logger", "experiment"}
KEYS |= {"mode", "checkpoint", "resume", "seed"}


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def options(self) -> list[str]:
        return re.findall(r"--[a-z-]+", self.format_usage())

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            given, _, value = unknown.split()[0].partition("=")
            options = self.options()
            if near := nearest(given, options, cutoff=0.85):
                hint = f"did you mean {near}?"
            elif meant := _meant(given.lstrip("-").replace("-", "_"), value or "VALUE"):
                hint = f"write {meant}, without dashes"
            else:
                near = nearest(given, options, cutoff=0.7)
                hint = f"did you mean {near}?" if near else "write KEY=VALUE, or see dpframe --help"
            message = f"there is no option {given}; {hint}"
        raise UserError(message)


def _meant(flag: str, value: str) -> str:
    """What to type for a flag of other programs, e.g. trainer.max_epochs=3 for `epochs`, or ''."""
    from dpframe.config.schema import FLAGS, WHOLE

    head, _, last = flag.rpartition(".")
    if head.split(".")[0] in KEYS and last not in WHOLE:
        key = flag
    else:
        key = FLAGS.get(flag) or WHOLE.get(last) or flag * (flag in KEYS)
    return key if "=" in key else f"{key}={value}" * bool(key)


def parser() -> Parser:
    """The command's arguments, which config/help.py explains."""
    parser = Parser(prog="dpframe", add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("overrides", nargs="*")
    for option, letter in (("help", "h"), ("run", "r"), ("multirun", "m")):
        add(f"--{option}", f"-{letter}", action="store_true")
    for option in ("version", "resolve"):
        add(f"--{option}", action="store_true")
    add("--shell-completion", "-sc", action="store_true")
    add("--cfg", "-c", choices=("job", "hydra", "all"))
    add("--config-dir", "-cd", action="append")
    return parser


def main(given: Sequence[str] | None = None) -> NoReturn:
    leave_after(lambda: _command(sys.argv[1:] if given is None else given))


def _command(given: Sequence[str]) -> int:
    if given[:1] == ["runs"]:
        from dpframe.cli.runs import runs

        print(runs(given[1:], Parser(prog="dpframe runs", add_help=False, allow_abbrev=False)))
        return 0
    arguments = parser().parse_intermixed_args(given)
    arguments.config_dir = _only(arguments.config_dir)
    if arguments.resolve and arguments.cfg != "job":  # hydra's own has what is set by a sweep alone
        raise UserError("--resolve goes with --cfg job")
    if arguments.version:
        from dpframe import __version__

        print(f"dpframe {__version__}")
    elif arguments.overrides[:1] == ["new"]:
        from dpframe.cli.new import HELP, new

        print(HELP if arguments.help else new(arguments.overrides[1:]))
    elif arguments.overrides[:1] == ["schema"]:
        from dpframe.cli.schema import HELP, schema

        print(HELP if arguments.help else schema(arguments.overrides[1:], arguments.config_dir))
    elif arguments.shell_completion:
        from dpframe.cli.completion import complete

        print(complete(arguments.overrides, parser().options()), end="")
    elif arguments.help or arguments.cfg:
        from dpframe.config.help import shown_for

        print(shown_for(arguments))
    elif arguments.multirun or _is_sweep(arguments.overrides):
        from dpframe.cli.sweep import sweep

        with output.goes_on_unread():
            return sweep(arguments.overrides, arguments.config_dir)
    else:
        _run(arguments)
    return 0


def _only(folders: Sequence[str] | None) -> str | None:
    if folders is None:
        return None
    if len(folders) > 1:
        raise UserError(
            f"--config-dir is there twice, {' and '.join(folders)}; keep one, and add the other by "
            f"hydra.searchpath=[file://{os.path.abspath(folders[-1])}]"
        )
    return folders[0]


def _is_sweep(overrides: Sequence[str]) -> bool:
    from dpframe.config.overrides import value_of

    return "hydra.mode=MULTIRUN" in overrides or value_of("sweep.resume", overrides) is not None


def _run(arguments: argparse.Namespace) -> None:
    from dpframe.config.compose import composed
    from dpframe.config.overrides import value_of
    from dpframe.config.schema import OF_ITS_TABLE, OF_THE_SWEEP

    job = composed(arguments.overrides, config_dir=arguments.config_dir)
    for key in (*OF_THE_SWEEP, *OF_ITS_TABLE):
        if (value := value_of(key, arguments.overrides)) is not None:
            raise UserError(f"{key}={value} is of a sweep; add -m, or leave it out")
    raise_if_signaled()
    from dpframe.modes.run import run  # imports torch: only now that the config is known to be good

    collect_garbage()
    raise_if_signaled()
    run(job)
