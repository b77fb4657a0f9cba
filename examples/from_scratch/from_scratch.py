"""Data parallelism from scratch: the numbers of `strategy=ddp`, by `send` and `recv` alone.

Read it from the top. dpframe starts the ranks, gives each its share of every batch, and scales a
share's loss by rows here / rows of the whole batch. What is left is what the ranks tell each other.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpframe import UserError
from dpframe.plugin import GroupCollectives, Processes


class Ring(GroupCollectives):
    """What all ranks do together: each sends to the next one, and receives from the one before."""

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            values = tensor.detach().contiguous()
            if self.is_main:
                for other in range(1, self.world_size):
                    dist.send(values, other)
            else:
                dist.recv(values, 0)
                tensor.copy_(values)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on all of them: a ring all-reduce.

        The vector is cut into as many parts as there are ranks. A rank sends each part about twice,
        so that it sends as much among a hundred ranks as among two.
        """
        rank, ranks = self.rank, self.world_size
        vector = tensor.flatten()
        size = -(-len(vector) // ranks)
        padded = nn.functional.pad(vector, (0, size * ranks - len(vector)))
        parts = padded.view(ranks, size)
        for step in range(ranks - 1):  # each part goes around, and every rank adds its own
            parts[(rank - step - 1) % ranks] += self.exchange(parts[(rank - step) % ranks])
        for step in range(ranks - 1):  # each sum goes around, and every rank copies it
            parts[(rank - step) % ranks] = self.exchange(parts[(rank - step + 1) % ranks])
        return padded[: len(vector)].view_as(tensor)

    def exchange(self, part: Tensor) -> Tensor:
        """Sends a part to the next rank of the ring, and returns the previous one's."""
        received = torch.empty_like(part)
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        if self.rank % 2 == 0:  # if all ranks sent first, nobody would listen
            dist.send(part, after)
            dist.recv(received, before)
        else:
            dist.recv(received, before)
            dist.send(part, after)
        return received

    def sum_numbers(self, numbers: list[float]) -> list[float]:
        return self.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()


class FromScratch(Processes):
    collectives_type = Ring
    weights: dict[str, nn.Parameter] = {}
    buffers: tuple[Tensor, ...] = ()

    def setup(self) -> None:
        super().setup()
        self.gradient_divisor = 1  # gradients are added up below, not averaged

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        if training:  # every rank begins with the main one's weights
            self.weights = dict(module.named_parameters())
            self.buffers = tuple(module.buffers())
            self.collectives.broadcast_tensors([*self.weights.values(), *self.buffers])
        return module

    @torch.no_grad()
    def check_gradients(self) -> None:
        """After the backward, once an update: adds up all ranks' gradients, in one vector. The
        optimizer then makes the same step on every rank: no weight is sent again."""
        trained = {name: w for name, w in self.weights.items() if w.requires_grad}
        for name, weight in trained.items():
            if weight.grad is None or weight.grad.is_sparse:
                raise UserError(
                    f"{name.removeprefix('task.')} has no dense gradient in this step, and "
                    "strategy=from_scratch adds up all of them; use strategy=ddp"
                )
        for dtype in dict.fromkeys(weight.dtype for weight in trained.values()):
            gradients = [w.grad for w in trained.values() if w.dtype == dtype]
            total = self.collectives.sum(torch.cat([gradient.flatten() for gradient in gradients]))
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, part in zip(gradients, total.split(sizes), strict=True):
                gradient.copy_(part.view_as(gradient))

    def sync_weights(self, for_reading: bool) -> None:
        """Buffers, e.g. running statistics, are of each rank's own rows: the main one's count."""
        self.collectives.broadcast_tensors(self.buffers)
