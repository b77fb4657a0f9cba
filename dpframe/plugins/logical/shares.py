"""What computes this process's shares of a batch, to evaluate or to train."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpframe import UserError
from dpframe.plugin import Share, seeding
from dpframe.plugins.logical.gradients import Gradients
from dpframe.plugins.logical.tree import Vectors

KEY = "trainer.logical_replicas"


class Shares(nn.Module):
    """Computes them in order, each with random numbers of its own.

    These are a fact of the seed, the step, the batch and the share.
    """

    def __init__(self, module: Any, strategy: Any) -> None:
        """`strategy` is a Logical, whose shares these are."""
        super().__init__()
        self.module = module
        self._strategy = strategy
        kind = "/".join((type(module).__name__, *getattr(module, "turn", ()), _step_of(module)))
        self._kind = zlib.crc32(kind.encode())

    def _compute(self, number: int, share: Share, *args: Any) -> Any:
        self._draw(number)
        result = self.module(share, *args)
        if (metrics := self._strategy.sums.metrics) is not None:
            metrics.end_share([self._step, self._batch, number])
        return result

    def _end(self) -> None:
        """Afterwards all processes draw alike, by a number that no share has."""
        self._draw(self._strategy.count)

    def _draw(self, share: int) -> None:
        strategy = self._strategy
        strategy.share_at = share
        seed = seeding.mix(strategy.seed, self._step, self._kind, self._batch, share)
        seeding.reseed(seed, [strategy.device])

    @property
    def _batch(self) -> int:
        """Its number in the pass that is evaluated, or in the step."""
        return self.module.task.run_context.batch_index

    @property
    def _step(self) -> int:
        progress = self.module.task.run_context.progress
        return progress.global_step if progress is not None else 0


class EvalShares(Shares):
    """Of a batch that is evaluated."""

    def forward(self, shares: list[Share]) -> Any:
        numbered = enumerate(shares, self._strategy.first)
        results = [self._compute(number, share) for number, share in numbered if share.rows]
        self._end()
        return self.module.combine(results)


class TrainShares(Shares):
    """The backward of each share follows its forward, so that the activations of one are kept. The
    backward of the loss that comes out adds up what all processes have, and puts it into the
    weights."""

    batches = 0  # of the step, so far

    @property
    def _batch(self) -> int:
        return self.batches

    def _end(self) -> None:
        super()._end()
        self.batches += 1

    def forward(self, shares: list[Share], of: float) -> tuple[Tensor, list[Any]]:
        gradients, measured = Gradients(self.module), list[Any]()
        if not gradients.weights:
            self.module(Share(None, 0), of)  # refuses that, on each process
        own = self._strategy.own_sums(partial(self._give, shares, of, gradients, measured))
        self._end()
        # On the host: its backward runs in this thread, as the collectives of all processes do.
        loss = torch.zeros((), requires_grad=True)
        return Delivery.apply(loss, partial(self._deliver, gradients, own)), measured

    def _give(
        self, shares: list[Share], of: float, gradients: Gradients, measured: list[Any], number: int
    ) -> Vectors | None:
        """What a share adds to the gradients and the buffers; and what it has measured."""
        share = shares[number - self._strategy.first]
        if not share.rows:
            return None
        with _explaining(share):
            loss, own = self._compute(number, share, of)
        loss.backward()
        measured += own
        return gradients.take(share.rows / share.total)

    def _deliver(self, gradients: Gradients, own: list[Vectors | None]) -> None:
        counts = gradients.count(self._strategy)
        gradients.put(self._strategy.total(own, gradients.zeros), counts)


class Delivery(torch.autograd.Function):
    """A loss whose backward is a call: the gradients are there, and only not yet in the weights."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, deliver: Callable[[], None]) -> Tensor:
        ctx.deliver = deliver
        return handle.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.deliver()
        return None, None


@contextmanager
def _explaining(share: Share) -> Iterator[None]:
    """BatchNorm has no statistics of one row."""
    try:
        yield
    except ValueError as error:
        if share.rows > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise UserError(
            f"a batch of {share.total} rows has a logical share of 1, and BatchNorm needs 2; use "
            f"data.drop_last=true, another data.batch_size, or a smaller {KEY}"
        ) from error


def _step_of(module: Any) -> str:
    """The step and its data set: each draws other random numbers."""
    return "/".join((getattr(module, "step", ""), *getattr(module, "named", {}).values()))
