"""No orphans: ranks and data workers end with the process that started them, however it ended."""

import ctypes
import multiprocessing
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
END_SECONDS = 1.0


def die_with_parent() -> None:
    """Called first thing in a child. Elsewhere than on Linux, a child ends when it notices."""
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def end_children() -> None:
    """Data workers that SIGTERM does not end: stopped ones, and those that never leave C code.

    Python asks by SIGTERM on its way out, and then waits for ever.
    """
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.terminate()
    deadline = time.monotonic() + END_SECONDS
    for child in children:
        child.join(max(0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
