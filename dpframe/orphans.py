"""No orphans: ranks and data workers end with the process that started them, however it ended."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

PR_SET_PDEATHSIG = 1
SOCKETS = "dpframe-sockets-"
LONGEST = 50  # of 107 bytes of a socket's path, what is left for the folder of temporary files
FRESH_SECONDS = 60.0  # a directory is locked right after it is made

_sockets: int | None = None  # keeps the lock
END_SECONDS = 1.0


def die_with_parent() -> None:
    """Called first thing in a child. Elsewhere than on Linux, a child ends when it notices."""
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def share_sockets() -> None:
    """One directory for the sockets by which data workers hand over what they read.

    Left to itself, multiprocessing makes one in every worker, which stays where the worker is
    killed, and which a long TMPDIR makes too long for a socket. Children inherit this one. It is
    removed at the end of this process, or by the next one, should this one be killed.
    """
    global _sockets
    is_child = multiprocessing.parent_process() is not None
    if _sockets is not None or is_child or sys.platform == "win32":
        return
    import fcntl

    folders = [tempfile.gettempdir(), "/tmp", "/dev/shm"]
    folder = next((name for name in folders if len(os.fsencode(name)) <= LONGEST), folders[0])
    with suppress(OSError):  # else it is as multiprocessing has it
        _sweep_sockets(Path(folder))
        own = tempfile.mkdtemp(prefix=SOCKETS, dir=folder)
        last = -101  # after multiprocessing's own directory in there
        util.Finalize(None, shutil.rmtree, args=(own, True), exitpriority=last)
        _sockets = os.open(own, os.O_RDONLY)
        fcntl.flock(_sockets, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go of when all of us have ended
        before, tempfile.tempdir = tempfile.tempdir, own
        try:
            util.get_temp_dir()
        finally:
            tempfile.tempdir = before


def _sweep_sockets(folder: Path) -> None:
    import fcntl

    for path in folder.glob(f"{SOCKETS}*"):
        with suppress(OSError):  # another user's, or it is in use
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime > FRESH_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


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
