"""Local SGD: ranks train apart, and average their weights every `inner_steps` updates.

With `outer_momentum` it is DiLoCo (arXiv 2311.08105): the change of a round serves as a gradient,
and Nesterov's method moves the common weights along it. Without, at an outer learning rate of 1, it
is federated averaging.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dpframe import UserError
from dpframe.strategies.ddp import DDP
from dpframe.strategies.devices import Gpus


class LocalSGD(DDP):
    """The ranks, their shares and their metrics are ddp's; what they send, and when, is not."""

    def __init__(
        self,
        gpus: Gpus = None,
        accelerator: str = "auto",
        max_replicas_per_core: int = 8,
        *,
        inner_steps: int = 50,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        timeout_seconds: float = 1800,
    ) -> None:
        super().__init__(gpus, accelerator, max_replicas_per_core, timeout_seconds=timeout_seconds)
        if inner_steps < 1:
            raise UserError(f"strategy.inner_steps={inner_steps}; use 1 or more")
        if not outer_learning_rate > 0:
            raise UserError(f"strategy.outer_learning_rate={outer_learning_rate}; use more than 0")
        if not 0 <= outer_momentum < 1:
            raise UserError(f"strategy.outer_momentum={outer_momentum}; use 0 or more, below 1")
        self.inner_steps = inner_steps
        self.outer_learning_rate = outer_learning_rate
        self.outer_momentum = outer_momentum
        self.rounds = 0

    # ---- what the Trainer calls

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        if training:
            self.weights = list(module.parameters())
            self.buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)
            self.rounds = self.early_rounds = self.sent_bytes = self.ddp_bytes = 0
            self._begin()
        return module

    def grad_sync(self, is_last: bool) -> None:
        """Gradients stay where they are."""

    @torch.no_grad()
    def weight_sync(self, is_read: bool) -> None:
        if not is_read:
            self.steps += 1
            self.ddp_bytes += sum(weight.nbytes for weight in self.weights if weight.requires_grad)
        if self.steps == self.inner_steps or (is_read and self.steps):
            self.early_rounds += self.steps < self.inner_steps
            self._end_round()

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        return {"velocity": self.velocity, "inner": self.gather(_on_cpu(optimizer.state_dict()))}

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
        super().close()

    # ---- the outer loop

    def _begin(self) -> None:
        """The weights as they are, the same on all ranks, are the common ones."""
        self.common = [weight.detach().clone() for weight in self.weights]
        self.velocity = [torch.zeros_like(weight) for weight in self.common]
        self.steps = 0  # of the round at hand

    def _end_round(self) -> None:
        trios = zip(self.weights, self.common, self.velocity, strict=True)
        trained = [trio for trio in trios if trio[0].requires_grad]
        self._average([*(weight for weight, _, _ in trained), *self.buffers])
        for weight, common, velocity in trained:
            gradient = common - weight
            velocity.mul_(self.outer_momentum).add_(gradient)
            gradient.add_(velocity, alpha=self.outer_momentum)  # Nesterov looks one step ahead
            common.sub_(gradient, alpha=self.outer_learning_rate)
            weight.copy_(common)
        self.steps = 0
        self.rounds += 1

    def _average(self, tensors: list[Tensor]) -> None:
        """One collective for each type of number: on a slow link every one of them waits."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            vector = torch.cat([tensor.flatten() for tensor in alike])
            self.sent_bytes += vector.nbytes
            parts = (self.reduce(vector) / self.world_size).split([t.numel() for t in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state as the main process can hold it for all ranks."""
    kept = {
        index: {name: v.cpu() if isinstance(v, Tensor) else v for name, v in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": kept}
