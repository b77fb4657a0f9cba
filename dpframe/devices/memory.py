"""The memory of devices: what is in use, the most that tensors took, and whether it ran out."""

import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch

from dpframe.devices import cgroup
from dpframe.errors import OutOfMemory

UNTYPED = (  # what torch has no type for
    "can't allocate memory",
    "not enough memory",
    "error: out of memory",  # of a kernel
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL's
)


def ran_out(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in UNTYPED)


@contextmanager
def explain(device: torch.device, doing: str, todo: str) -> Iterator[None]:
    """Turns a lack of memory inside into one line, which says what to do."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        failure = OutOfMemory(f"{full([device], doing)}; {todo}")
        failure.details = "".join(traceback.format_exception(error))
        raise failure from error


def full(devices: Sequence[torch.device], doing: str) -> str:
    """`cuda:1 is out of memory in training: 78.9 of 79.1 GiB are in use, …`."""
    device, facts = devices[0], ""
    with suppress(RuntimeError):  # a device that can't even tell
        device = fullest(devices)
        facts = described(device)
    return f"{device} is out of memory in {doing}{': ' * bool(facts)}{facts}"


def peak(device: torch.device) -> int | None:
    """The most bytes that tensors of this process have taken; None on the CPU, which does not
    count them."""
    most = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return None if device.type == "cpu" or most is None else int(most(device))


def peaks(strategy: Any) -> list[int] | None:
    """On each of the devices of all processes, in the main one; every process calls it."""
    here = [peak(device) for device in strategy.local_devices]
    return None if None in here else list(chain(*strategy.collectives.gather(here)))


def begin_peak(device: torch.device) -> None:
    """From here on `peak` is counted again."""
    begin = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if begin is not None:
        begin(device)


def free(device: torch.device) -> int | None:
    """The bytes that are free on a device; None where that is unknown."""
    if device.type == "cpu":
        return free_of_machine()
    module = torch.get_device_module(device)
    if device.type == "mps":  # memory of the machine's: as much of it as Apple recommends
        return module.recommended_max_memory() - module.driver_allocated_memory()
    return module.mem_get_info(device)[0] if hasattr(module, "mem_get_info") else None


def fullest(devices: Iterable[torch.device]) -> torch.device:
    """The one with the fewest free bytes."""
    return min(devices, key=lambda device: free(device) or 0)


def described(device: torch.device) -> str:
    """`76.2 of 79.1 GiB are in use, 70.5 GiB by this process`; "" where that is unknown."""
    gib = 2**30
    if device.type == "cpu":
        import resource  # not on Windows

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        own = most * (1 if sys.platform == "darwin" else 1024)
        return f"this process took {own / gib:.1f} of {machine() / gib:.1f} GiB"
    if not hasattr(torch.get_device_module(device), "mem_get_info"):
        return ""
    free, total = torch.get_device_module(device).mem_get_info(device)
    return (
        f"{(total - free) / gib:.1f} of {total / gib:.1f} GiB are in use, at most "
        f"{(peak(device) or 0) / gib:.1f} GiB by this process's tensors"
    )


def machine() -> int:
    """The bytes of this machine's memory, or of those that its container allows."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, cgroup.memory_limit() or whole)


def free_of_machine() -> int | None:
    """The bytes that programs can still get, as far as their container allows."""
    try:
        lines = (cgroup.ROOT / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    left = cgroup.memory_left()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min([*free, *([] if left is None else [left])], default=None)
