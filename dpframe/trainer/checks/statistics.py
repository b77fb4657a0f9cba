"""What a step keeps of its rows in buffers: it has to be the same for each share of a batch."""

import torch
from torch import nn
from torch.linalg import vector_norm

ALIKE = 1e-4  # of the sum of what is kept
BufferSums = dict[str, tuple[float, float]]
"""Of a module's buffers, and of their sizes, by its name."""


def sums_of_buffers(task: nn.Module) -> BufferSums:
    sums: BufferSums = {}
    for name, buffer in task.named_buffers():
        if buffer.layout is not torch.strided:
            buffer = (buffer.coalesce() if buffer.is_sparse else buffer).values()
        if buffer.is_complex():
            buffer = buffer.real + buffer.imag
        if buffer.is_floating_point():  # -inf in masks; sums of it and inf would be NaN
            buffer = buffer.nan_to_num(0.0, 1.0, -1.0)
        total = float(buffer.sum())
        size = float(vector_norm(buffer, 1)) if buffer.is_floating_point() else abs(total)
        module = name.rpartition(".")[0]
        known = sums.get(module, (0.0, 0.0))
        sums[module] = known[0] + total, known[1] + size
    return sums


def unlike(whole: BufferSums, share: BufferSums) -> set[str]:
    """The modules that keep something else of a share than of all rows."""
    return {
        name
        for name in {**whole, **share}
        if name not in whole or name not in share or not _is_alike(whole[name], share[name])
    }


def _is_alike(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one == other or abs(one[0] - other[0]) <= ALIKE * max(one[1], other[1])
