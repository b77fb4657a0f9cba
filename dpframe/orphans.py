"""No orphans: ranks and data workers end with the process that started them, however it ended."""

import ctypes
import multiprocessing
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Called first thing in a child. Elsewhere than on Linux, a child ends when it notices."""
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before we could ask
        os.kill(os.getpid(), signal.SIGKILL)
