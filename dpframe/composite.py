"""Several optimizers that make one step together, each of its own weights, as one optimizer."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer


class Composite(Optimizer):
    """Its groups are those of its parts in a row, and its state is theirs: what reads or changes a
    group, e.g. a schedule, does so for the part."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__(list(chain.from_iterable(part.param_groups for part in parts)), {})
        self.parts = list(parts)
        self.steps: list[Callable[[], Any]] = [part.step for part in parts]
        for part in parts:  # e.g. Adagrad's, which begins with some
            self.state.update(part.state)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for step in self.steps:
            step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, or those that it is made of."""
    return optimizer.parts if isinstance(optimizer, Composite) else [optimizer]


def name_of(optimizer: Optimizer) -> str:
    return " and ".join(type(part).__name__ for part in parts_of(optimizer))
