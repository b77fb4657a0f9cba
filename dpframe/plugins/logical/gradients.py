"""What a share leaves in a task, as vectors that can be added up: gradients, and buffers' changes.

There is a vector for each type of weights and of buffers that are floats; the first one has the
other buffers, too.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpframe import Strategy, UserError
from dpframe.plugins.logical.tree import Vectors
from dpframe.strategies.base import FREEZE_ALIKE


class Gradients:
    """Of one batch. Those of earlier batches are kept apart until its own are whole."""

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_parameters())
        self._is_trained = {name: weight.requires_grad for name, weight in named.items()}
        self.weights = [weight for weight in named.values() if weight.requires_grad]
        self._buffers = [torch.view_as_real(b) if b.is_complex() else b for b in module.buffers()]
        self._before = [buffer.clone() for buffer in self._buffers]
        self._counts = [0.0] * len(self.weights)  # from how many of this process's shares
        self._earlier = self._take()
        floats = [t for t in (*self.weights, *self._buffers) if t.is_floating_point()]
        self._types = list(dict.fromkeys(tensor.dtype for tensor in floats))

    def take(self, part: float) -> Vectors:
        """What a share has left, which is this part of the batch. Buffers are restored, so that
        each share begins with those of the batch."""
        pieces: dict[torch.dtype, list[Tensor]] = {kind: [] for kind in self._types}
        for index, (weight, gradient) in enumerate(zip(self.weights, self._take(), strict=True)):
            self._counts[index] += gradient is not None
            piece = torch.zeros_like(weight) if gradient is None else gradient
            pieces[weight.dtype].append(piece.reshape(-1))
        with torch.no_grad():
            for buffer, before in zip(self._buffers, self._before, strict=True):
                kind = self._kind(buffer)
                change = buffer.to(kind) - before.to(kind)
                pieces[kind].append(change.mul_(part).reshape(-1))
                buffer.copy_(before)
        return [torch.cat(pieces[kind]) for kind in self._types]

    def count(self, strategy: Strategy) -> list[float]:
        """How many shares give a gradient to each trained weight, over all processes."""
        is_trained, counts = self._is_trained.values(), iter(self._counts)
        # Of all weights, so that processes that have frozen others send as many numbers.
        of_all = [next(counts) if trained else 0.0 for trained in is_trained]
        numbers = strategy.collectives.sum_numbers([*map(float, is_trained), *of_all])
        ranks, counted = numbers[: len(of_all)], numbers[len(of_all) :]
        for name, trained in zip(self._is_trained, ranks, strict=True):
            if 0 < trained < strategy.world_size:
                raise UserError(
                    f"{name.removeprefix('task.')} is trained on {trained:.0f} of "
                    f"{strategy.world_size} ranks and frozen on the others; {FREEZE_ALIKE}"
                )
        return [count for count, trained in zip(counted, is_trained, strict=True) if trained]

    def zeros(self) -> Vectors:
        """What no share has left."""
        sizes = dict.fromkeys(self._types, 0)
        for tensor in (*self.weights, *self._buffers):
            sizes[self._kind(tensor)] += tensor.numel()
        device = self.weights[0].device
        return [torch.zeros(size, dtype=kind, device=device) for kind, size in sizes.items()]

    @torch.no_grad()
    def put(self, total: Vectors, counts: list[float]) -> None:
        """Adds the gradients to those of earlier batches: a weight that no share has given any
        keeps these. Gives the buffers the mean over the rows of what the shares have made of
        them."""
        pieces = self._cut(total)
        for weight, before, count in zip(self.weights, self._earlier, counts, strict=True):
            piece = next(pieces)
            if not count:
                weight.grad = before
            elif before is not None:
                weight.grad = before.add_(piece)
            elif weight.is_contiguous():
                weight.grad = piece
            else:  # e.g. in channels_last memory: fused optimizers take both as they lie there
                weight.grad = torch.empty_like(weight).copy_(piece)
        for buffer, before, change in zip(self._buffers, self._before, pieces, strict=True):
            if not buffer.is_floating_point():  # e.g. a count of batches
                change = change.round().to(torch.int64)
            buffer.copy_(before + change)

    def _take(self) -> list[Tensor | None]:
        """The gradients, which the weights no longer have."""
        taken = [weight.grad for weight in self.weights]
        for weight in self.weights:
            weight.grad = None
        return taken

    def _cut(self, total: Vectors) -> Iterator[Tensor]:
        """As the weights are, and then the buffers."""
        rest: dict[torch.dtype, Any] = dict(zip(self._types, total, strict=True))
        for tensor in (*self.weights, *self._buffers):
            kind = self._kind(tensor)
            piece, rest[kind] = rest[kind].tensor_split([tensor.numel()])
            yield piece.view(tensor.shape)

    def _kind(self, tensor: Tensor) -> torch.dtype:
        return tensor.dtype if tensor.is_floating_point() else self._types[0]
