"""Lines of the command, one after the other in this process, with what each prints.

Run as a program it is a new interpreter, and also says which heavy modules were imported.
"""

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple


class Attempt(NamedTuple):
    code: int
    out: str
    err: str
    files: list[str]  # in the current directory, afterwards


def attempted(lines: list[list[str]]) -> list[Attempt]:
    return [_attempted(line) for line in lines]


def _attempted(line: list[str]) -> Attempt:
    from dpframe.cli import main

    code: Any = None
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(line)
        except SystemExit as left:
            code = left.code
    return Attempt(code, out.getvalue(), err.getvalue(), sorted(os.listdir()))


def refusals(lines: list[list[str]], config_dir: str | None) -> list[str]:
    """What is said of each line as it is composed, "" if nothing. One search path serves all, as in
    a sweep: what a hint needs is composed once."""
    from dpframe.config.compose import compose, from_hydra
    from dpframe.config.loader import ConfigLoader
    from dpframe.errors import UserError

    said, configs = [], ConfigLoader(config_dir)
    for line in lines:
        try:
            from_hydra(compose(configs, line), line)
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said


if __name__ == "__main__":
    del sys.path[0]  # as the console script has it
    given, composed, heavy = json.load(sys.stdin)
    done = attempted(given), [refusals(*each) for each in composed]
    json.dump([*done, [name for name in heavy if name in sys.modules]], sys.stdout)
