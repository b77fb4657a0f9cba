"""Memory that a step on the CPU has freed is kept for the next one, which needs as much again.

The C library gives large blocks back to the system, which hands them out anew page by page, each
cleared: of LeNet's step on 256 images that is 4,500 pages, and a tenth of the time.
"""

import ctypes
import os
import sys

KEPT_BYTES = 512 << 20  # at most
LARGEST_BYTES = 64 << 20  # of a block; a larger one is given back as ever
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed() -> bool:
    """Not where the user chose a way; False, too, where the C library knows of none."""
    if sys.platform != "linux" or any(name in os.environ for name in CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    mallopt(TRIM_THRESHOLD, KEPT_BYTES)
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_BYTES))
