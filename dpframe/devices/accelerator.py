"""What devices can do, e.g. copy beside their computation, which are in use; the CPU's cores."""

import os

import torch

from dpframe.devices import cgroup


def has_streams(device: torch.device) -> bool:
    """Whether copies to it from pinned memory can run beside its computation; not so on MPS."""
    return hasattr(torch.get_device_module(device), "Stream")


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"  # Apple's Metal has floats of 32 bits at most


def cores() -> int:
    """The CPU cores that this process may use, together with others of its container."""
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(count, int(cgroup.cpu_limit() or count)))


def processes_here() -> int:
    """The ranks of this job on this machine, which share its memory and its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def in_use() -> list[torch.device]:
    """All devices of the accelerator, once torch has begun to use it."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    is_begun = getattr(module, "is_initialized", torch.accelerator.is_available)
    if not is_begun():
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
