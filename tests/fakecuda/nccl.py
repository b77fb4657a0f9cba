"""`backend="nccl"` is gloo on copies, which keeps NCCL's rules; see nccl.cpp."""

from typing import Any

import torch.distributed as dist

from fakecuda import gpus

NAME = "fakenccl"


def install() -> None:
    gpus.library.define_nccl()
    dist.Backend.register_backend(NAME, make, devices=["cuda"])
    original = dist.init_process_group

    def init_process_group(backend: str | None = None, *arguments: Any, **options: Any) -> None:
        named = backend.replace("nccl", NAME) if backend else f"cpu:gloo,cuda:{NAME}"
        original(named, *arguments, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group


def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, size, timeout)
    return gpus.library.NCCL(gloo, store)
