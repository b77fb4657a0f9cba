"""Collectives over the process group of torch.distributed."""

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpframe.launch import environment
from dpframe.launch.rank import has_parent
from dpframe.strategies.collectives import Collectives

FOREVER = timedelta(days=10_000)
LONGEST_PAUSE = 0.1  # seconds
LAUNCHER_SECONDS = 3  # for torchrun and its like to end the other ranks when one has failed


class GroupCollectives(Collectives):
    """Over the processes of `group`; None: over all. `device` is this process's own."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`rank` and `world_size` are those in the group."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.group = group

    def sum(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device)
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def sum_numbers(self, numbers: list[float]) -> list[float]:
        sums = torch.tensor(numbers, dtype=torch.float64)
        # On the host, with GPUs too: it runs ahead of the device.
        dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def sum_in_order(
        self, add: Callable[[list[Tensor]], Tensor], vectors: list[Tensor], counts: list[int]
    ) -> Tensor:
        """Each rank adds up one part of all the vectors. So a rank sends as much as in an
        all-reduce, for each vector that it has."""
        length, ranks = len(vectors[0]), self.world_size
        size = -(-length // ranks)
        padded = nn.functional.pad(torch.stack(vectors), (0, size * ranks - length))
        mine = padded.view(len(vectors), ranks, size).transpose(0, 1).contiguous()
        parts = mine.new_empty(sum(counts), size)
        sizes = [n * size for n in counts], [len(vectors) * size] * ranks
        dist.all_to_all_single(parts.view(-1), mine.view(-1), *sizes, group=self.group)
        total = parts.new_empty(ranks * size)
        dist.all_gather(list(total.chunk(ranks)), add(list(parts)), group=self.group)
        return total[:length]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    def broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def once(self, work: Callable[[], object], *, on_each_machine: bool = True) -> None:
        """A process that waits ends with the one that fails or is killed, as in any collective."""
        is_first = environment.read_rank().local_rank == 0 if on_each_machine else self.is_main
        group = dist.new_group(timeout=FOREVER, backend="gloo")
        try:
            if is_first:
                work()
            _wait(dist.all_reduce(torch.zeros(1), group=group, async_op=True))
        finally:
            dist.destroy_process_group(group)

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            values = tensor.contiguous()
            dist.broadcast(values, group=self.group, group_src=0)
            tensor.copy_(values)


def _wait(work: Any) -> None:
    """Asks now and then: within `work.wait()` Python would call no handler of a signal."""
    seconds = 0.001
    while not work.is_completed():
        time.sleep(seconds)
        seconds = min(2 * seconds, LONGEST_PAUSE)
    try:
        work.wait()
    except RuntimeError:  # another process has failed, which is to be seen last
        if not has_parent():
            time.sleep(LAUNCHER_SECONDS)
        raise


class GatherRows(torch.autograd.Function):
    """All ranks' rows, `size` of each but for the last. Backward, the sum of what all ranks' losses
    give to this rank's rows. Like all gradients these are then averaged over the ranks, and the
    losses are scaled by as much, so the result is the single process's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, total: int, group: Any) -> Tensor:
        ctx.group = group
        ctx.first, ctx.count = dist.get_rank(group) * size, len(x)
        padded = torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])])
        ranks = dist.get_world_size(group)
        gathered = x.new_empty(ranks * size, *x.shape[1:])
        # As bytes, which every backend can send, whatever the type.
        dist.all_gather(list(_bytes(gathered).chunk(ranks)), _bytes(padded), group=group)
        return gathered[:total].clone() if total < len(gathered) else gathered

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.first : ctx.first + ctx.count], None, None, None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
