"""A process that has ended well leaves out torch's C++ destructors, which take 0.1 s."""

import ctypes
import sys


def shorten() -> None:
    """From after Python's own end, which is as ever: files are flushed, and the process is over.

    Not with CUDA, where profilers may wait for the very last, nor where the C library has no such
    call.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized():
        return
    library = ctypes.CDLL(None)
    if all(hasattr(library, name) for name in ("on_exit", "_exit", "fcloseall")):
        library.on_exit(library._exit, None)  # with the exit code; the last to be named comes first
        library.on_exit(library.fcloseall, None)
