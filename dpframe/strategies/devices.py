"""Which devices a job gets: what was asked for, what there is, and the rehearsal on the CPU."""

import os
import sys

import torch

from dpframe.errors import UserError

Gpus = int | list[int] | None
REHEARSED_REPLICAS = 2  # where neither a count nor a CUDA device says how many


def choose(
    gpus: Gpus, accelerator: str, *, default: int | None, max_per_core: int
) -> list[torch.device]:
    """One device a replica. `default` is how many where `gpus` is null; None: all there are."""
    available = 0 if accelerator == "cpu" else torch.cuda.device_count()
    if accelerator == "cuda" and not available:
        raise UserError(
            "trainer.accelerator=cuda but this machine has no CUDA device; "
            "use trainer.accelerator=auto to rehearse on the CPU"
        )
    count = len(gpus) if isinstance(gpus, list) else gpus or default or available
    if not available:
        count = count or REHEARSED_REPLICAS
        _refuse_crowd(count, max_per_core)
        return [torch.device("cpu")] * count
    cards = gpus if isinstance(gpus, list) else range(count)
    if max(cards) >= available:
        raise UserError(
            f"trainer.gpus={gpus} but this machine has {available} CUDA "
            f"device{'s' if available > 1 else ''}; use trainer.gpus={available}, or "
            "trainer.accelerator=cpu to rehearse"
        )
    return [torch.device("cuda", index) for index in cards]


def announce(devices: list[torch.device], accelerator: str, *, kind: str) -> None:
    """The loud line of a job that would have taken GPUs and runs on the CPU."""
    if accelerator == "auto" and devices[0].type == "cpu":
        count = len(devices)
        print(
            f"*** REHEARSAL ON THE CPU: this machine has no CUDA device, so {count} {kind} "
            f"stand in for {count} GPU{'s' if count > 1 else ''} ***",
            file=sys.stderr,
            flush=True,
        )


def use_threads(count: int) -> None:
    """No call where nothing changes: torch's makes matrix products within its own parallel loops,
    e.g. those of attention, a third slower, even with the number that there was."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _refuse_crowd(count: int, max_per_core: int) -> None:
    limit = max_per_core * cores()
    if count > limit:
        raise UserError(
            f"trainer.gpus={count} asks for {count} replicas on {cores()} CPU cores, at most "
            f"{limit} are sane; use fewer, or raise trainer.max_replicas_per_core={max_per_core}"
        )
