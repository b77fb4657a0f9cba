"""What a device can do: copy beside its computation, compute in 64 bits; and the CPU's cores."""

import os

import torch


def has_streams(device: torch.device) -> bool:
    """Whether copies to it from pinned memory can run beside its computation; not so on MPS."""
    return hasattr(torch.get_device_module(device), "Stream")


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"  # Apple's Metal has floats of 32 bits at most


def cores() -> int:
    """The CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
