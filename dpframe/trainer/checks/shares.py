"""The shares of a trial: what a step that computes one sees of its strategy."""

from itertools import chain
from typing import Any

from torch import Tensor, nn

from dpframe.data import Share
from dpframe.rows import current_share
from dpframe.strategies.base import Strategy
from dpframe.strategies.data_parallel import DataParallel
from dpframe.trainer.outputs import Measured


class Gathers(Exception):
    """A step wants the rows of the other shares."""


class SharesOf:
    """A strategy as the step of a share sees it. There are two of them, or all rows are in one."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    @property
    def replicas(self) -> int:
        return 1 if current_share.rows == current_share.total else 2

    @property
    def world_size(self) -> int:
        return self.replicas if self._strategy.world_size > 1 else 1

    @property
    def rank(self) -> int:
        is_first = not (current_share.rows and current_share.places and current_share.places[0])
        return 0 if is_first or self.world_size == 1 else 1

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        if current_share.rows == current_share.total:
            return x
        raise Gathers

    def gather_shares(self, x: Tensor, shares: int) -> Tensor:
        return self.gather_rows(x[None], shares)


class Gatherable(SharesOf):
    """Shares that a step may gather."""

    is_differentiated = False  # within a step

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        gathered = DataParallel().gather_rows(x, total)
        if gathered.requires_grad and gathered is not x:
            gathered.register_hook(self._note)
        return gathered

    def _note(self, gradient: Tensor) -> None:
        self.is_differentiated |= bool(current_share.rows)


class ShareStep(nn.Module):
    """A step for `Replicas`."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step

    def forward(self, share: Share) -> list[Measured]:
        return [(share.rows, self.step(share))]

    @staticmethod
    def combine(results: list[list[Measured]]) -> list[Measured]:
        return list(chain(*results))
