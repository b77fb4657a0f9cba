"""How the command ends: errors become one line and an exit code."""

import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from dpframe.errors import Interrupted, UserError, printable
from dpframe.launch import environment
from dpframe.launch.signals import Interruption, end_children
from dpframe.modes import output
from dpframe.util import traces

RANK_0_SECONDS = 5  # how long the other ranks wait for rank 0 to print an error


def leave_after(work: Callable[[], int]) -> NoReturn:
    """Exit codes: 0 done, 1 a failure, 2 a mistake of the user's, 128 + n for signal n."""
    output.open_all()
    environment.complete()
    interruption = Interruption(is_quiet=not _is_main())
    interruption.open()  # before the imports, which take the longest of a start-up
    gc.disable()  # imports make a million objects and no garbage
    try:
        code = work()
        sys.stdout.flush()  # a closed pipe is noticed here, not at exit
    except (UserError, Interrupted) as error:
        code = say(error)
    except BrokenPipeError:  # `dpframe … | head`: the pipe is closed
        code = 141  # as SIGPIPE's
    except Exception as error:
        show_failure(error)
        code = 1
    interruption.close()
    end_children()
    with suppress(UserError, OSError):
        sys.stdout.flush()  # an error while flushing changes no exit code
    if gc.isenabled():  # there was a run
        gc.collect()  # of cycles that hold a process group: its threads have to end before Python
    gc.freeze()  # there is nothing more to collect at exit
    sys.exit(code)


def collect_garbage() -> None:
    """After the imports, whose objects stay: collections skip them."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def say(error: UserError | Interrupted) -> int:
    """Prints one line once: all ranks of a launcher find the same mistake in the config."""
    if isinstance(error, Interrupted) and not _is_main():
        return error.exit_code
    if not _is_main() and "dpframe.modes.run" not in sys.modules:
        # Torchrun ends all ranks when the first one exits: that has to be the one that prints.
        time.sleep(RANK_0_SECONDS)
    line = " ".join(str(error).splitlines())
    print(f"dpframe: {printable(line)}", file=sys.stderr)
    return error.exit_code


def _is_main() -> bool:
    """Whether this is the main one of a launcher's ranks."""
    return os.environ.get("RANK", "0") == "0"


def show_failure(error: Exception) -> None:
    text = traces.shown(error)
    if getattr(error, "has_traceback", False):  # of the rank that failed
        text = "\n".join([str(error).rstrip("\n"), *getattr(error, "__notes__", [])])
    print(printable(text), file=sys.stderr)
