"""Exit codes: what the command ends with is what docs/reliability.md says."""

import re
import signal

from command import ROOT
from forked import server

from dpframe.cli.exit import leave_after
from dpframe.errors import Failure, Interrupted, UserError
from dpframe.launch.signals import SIGNALS

ENDS: dict[str, object] = {
    "done": 0,
    "a run of a sweep has failed": 1,
    "a bug": KeyError("a bug"),
    "a failure": Failure("the disk is full"),
    "a mistake": UserError("there is no such key"),
    "a reader that left": BrokenPipeError(),
    **{signal.Signals(number).name: Interrupted(number) for number in SIGNALS},
}


def leave(end: object) -> None:
    def work() -> int:
        if isinstance(end, BaseException):
            raise end
        assert isinstance(end, int)
        return end

    leave_after(work)


def codes() -> dict[str, int]:
    """What the command ends with, by the reason."""
    processes = {why: server().Process(target=leave, args=(end,)) for why, end in ENDS.items()}
    for process in processes.values():
        process.start()
    for process in processes.values():
        process.join()
    return {why: int(process.exitcode or 0) for why, process in processes.items()}


def shown() -> dict[int, str]:
    """The rows of the table by their codes."""
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text, flags=re.M)[1]
    assert section.startswith("Exit codes\n")
    return {int(code): row for code, row in re.findall(r"^\| (\d+) \|(.*)$", section, re.M)}


def test_the_command_ends_with_the_codes_of_the_table_and_with_no_others():
    found, table = codes(), shown()
    assert set(found.values()) == set(table)
    wanted = {"done": 0, "a run of a sweep has failed": 1, "a bug": 1, "a failure": 1}
    assert wanted.items() <= found.items() and found["a mistake"] == 2
    for code, row in table.items():
        assert code < 128 or signal.Signals(code - 128).name in row, row
