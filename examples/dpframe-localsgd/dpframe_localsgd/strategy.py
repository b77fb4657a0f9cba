"""Local SGD: ranks train apart, and average their weights every `inner_steps` updates.

With `outer_momentum` it is DiLoCo (arXiv 2311.08105): the change of a round serves as a gradient,
and Nesterov's method moves the common weights along it. Without, at an outer learning rate of 1, it
is federated averaging.

With `overlap_steps` nobody waits for the link: the average of a round travels while the next one is
trained, and what that one has changed so far is kept (as in Streaming DiLoCo, arXiv 2501.18512).
"""

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dpframe import UserError
from dpframe.plugin import Gpus, Processes


class Exchange(NamedTuple):
    """An average on its way: of these tensors, and of what they were when it began."""

    tensors: list[Tensor]
    values: list[Tensor]
    vectors: list[Tensor]  # one for each type of number: on a slow link each collective waits
    works: list[Any]

    def averages(self, ranks: int) -> list[Tensor]:
        """Waits for it."""
        for work in self.works:
            work.wait()
        parts: dict[torch.dtype, Any] = {}
        for vector in self.vectors:
            sizes = [v.numel() for v in self.values if v.dtype == vector.dtype]
            parts[vector.dtype] = iter((vector / ranks).split(sizes))
        return [next(parts[value.dtype]).view_as(value) for value in self.values]


class LocalSGD(Processes):
    """The ranks, their shares and their metrics are as for ddp; gradients stay where they are."""

    def __init__(
        self,
        gpus: Gpus = None,
        accelerator: str = "auto",
        *,
        inner_steps: int = 50,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        overlap_steps: int = 0,
        timeout_seconds: float = 1800,
    ) -> None:
        super().__init__(gpus, accelerator, timeout_seconds=timeout_seconds)
        if inner_steps < 1:
            raise UserError(f"strategy.inner_steps={inner_steps}; use 1 or more")
        if not outer_learning_rate > 0:
            raise UserError(f"strategy.outer_learning_rate={outer_learning_rate}; use more than 0")
        if not 0 <= outer_momentum < 1:
            raise UserError(f"strategy.outer_momentum={outer_momentum}; use 0 or more, below 1")
        if not 0 <= overlap_steps <= inner_steps:
            raise UserError(
                f"strategy.overlap_steps={overlap_steps}; use 0 or more, and at most "
                f"strategy.inner_steps={inner_steps}"
            )
        self.inner_steps = inner_steps
        self.outer_learning_rate = outer_learning_rate
        self.outer_momentum = outer_momentum
        self.overlap_steps = overlap_steps
        self.link: dist.ProcessGroup | None = None  # None: all ranks' own group
        self.rounds = 0

    # ---- what the Trainer calls

    def setup(self) -> None:
        super().setup()
        # Averages have connections of their own: nothing that the ranks tell each other meanwhile
        # stands behind them.
        if self.overlap_steps:
            self.link = dist.new_group(timeout=timedelta(seconds=self.timeout_seconds))

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        if training:
            self.weights = list(module.parameters())
            self.buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
            self.collectives.broadcast_tensors([*self.weights, *module.buffers()])
            self.rounds = self.early_rounds = self.sent_bytes = self.ddp_bytes = 0
            self._begin()
        return module

    @torch.no_grad()
    def sync_weights(self, for_reading: bool) -> None:
        if not for_reading:
            self.steps += 1
            self.ddp_bytes += sum(weight.nbytes for weight in self.weights if weight.requires_grad)
        if self.under_way and (for_reading or self.steps == self.overlap_steps):
            self._receive(self.under_way)
        if self.steps == self.inner_steps or (for_reading and self.steps):
            self.early_rounds += self.steps < self.inner_steps
            self.under_way = self._send()
            self.rounds += 1
            self.steps = 0
            if for_reading or not self.overlap_steps:
                self._receive(self.under_way)

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = self.collectives.gather(_on_cpu(optimizer.state_dict()))
        return {"velocity": self.velocity, "inner": inner}

    def load_state_dict(self, state: dict[str, Any], optimizer: Optimizer) -> None:
        self._begin()
        for velocity, kept in zip(self.velocity, state.get("velocity", ()), strict=False):
            velocity.copy_(kept)
        inner = state.get("inner", ())
        if len(inner) == self.world_size:  # else all ranks resume with the main one's
            optimizer.load_state_dict(inner[self.rank])

    def close(self) -> None:
        if self.is_main and self.rounds:
            early = f", {self.early_rounds} of them early" if self.early_rounds else ""
            print(
                f"localsgd     sent {self.sent_bytes:,} bytes a rank in {self.rounds} rounds"
                f"{early}; ddp's gradients are {self.ddp_bytes:,}, "
                f"{self.ddp_bytes / self.sent_bytes:.3g} times as many",
                flush=True,
            )
        if self.link is not None and dist.is_initialized():
            dist.destroy_process_group(self.link)
        self.link = None
        super().close()

    # ---- the outer loop

    def _begin(self) -> None:
        """The weights as they are, the same on all ranks, are the common ones."""
        self.common = [weight.detach().clone() for weight in self.weights]
        self.velocity = [torch.zeros_like(weight) for weight in self.common]
        self.steps = 0  # of the round at hand
        self.under_way: Exchange | None = None

    def _send(self) -> Exchange:
        """Begins to average the weights that are trained, and the running statistics."""
        self.trained = [place for place, w in enumerate(self.weights) if w.requires_grad]
        tensors = [*(self.weights[place] for place in self.trained), *self.buffers]
        values = [tensor.detach().clone() for tensor in tensors] if self.overlap_steps else tensors
        vectors = [
            torch.cat([value.flatten() for value in values if value.dtype == dtype])
            for dtype in dict.fromkeys(value.dtype for value in values)
        ]
        self.sent_bytes += sum(vector.nbytes for vector in vectors)
        works = [dist.all_reduce(v, group=self.link, async_op=True) for v in vectors]
        return Exchange(tensors, values, vectors, works)

    def _receive(self, exchange: Exchange) -> None:
        """Moves the common weights; what a rank has trained since the exchange began is added."""
        averages = exchange.averages(self.world_size)
        for place, average in zip(self.trained, averages, strict=False):
            common, velocity = self.common[place], self.velocity[place]
            gradient = common - average
            velocity.mul_(self.outer_momentum).add_(gradient)
            gradient.add_(velocity, alpha=self.outer_momentum)  # Nesterov looks one step ahead
            common.sub_(gradient, alpha=self.outer_learning_rate)
        moved = [*(self.common[place] for place in self.trained), *averages[len(self.trained) :]]
        for tensor, value, new in zip(exchange.tensors, exchange.values, moved, strict=True):
            # The same bits on all ranks, where they have trained nothing since.
            tensor.add_(new - value) if self.steps else tensor.copy_(new)
        self.under_way = None


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state as the main process can hold it for all ranks."""
    kept = {
        index: {name: v.cpu() if isinstance(v, Tensor) else v for name, v in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": kept}
