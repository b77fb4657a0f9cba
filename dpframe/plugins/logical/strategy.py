"""Another strategy's processes and devices, and logical shares instead of its own."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from dpframe import Logger, Strategy, UserError
from dpframe.parameters import has_sparse
from dpframe.plugin import Share, move, split
from dpframe.plugins.logical.shares import KEY, EvalShares, TrainShares
from dpframe.plugins.logical.sums import ExactSums
from dpframe.plugins.logical.tree import Vectors, add_up, parts, spans
from dpframe.strategies.devices import model


class Logical(Strategy):
    """Is put around another strategy, and no proxy of it: gradients are shared here, so what is not
    forwarded is as in a single process."""

    has_fixed_shares = True

    def __init__(self, strategy: Strategy, count: int, seed: int) -> None:
        """`strategy` is set up."""
        refuse(strategy, count)
        refuse_several_models(strategy, count)
        super().__init__(strategy.gpus, strategy.accelerator)
        self._within = strategy
        self.seed = seed
        self.count = count
        self.rank, self.world_size = strategy.rank, strategy.world_size
        self.collectives = strategy.collectives
        self.replicas, self.device, self.nodes = strategy.replicas, strategy.device, strategy.nodes
        self.uses_gpus, self.launches_ranks = strategy.uses_gpus, strategy.launches_ranks
        self.has_alike_weights = strategy.has_alike_weights
        self.sums: ExactSums = ExactSums()
        self.share_at = 0  # the one that is computed
        of_processes = spans(count, self.world_size)
        self.first, self.end = of_processes[self.rank]  # of this process's shares
        self._parts = [parts((0, count), *span) for span in of_processes]

    @property
    def name(self) -> str:
        return self._within.name

    @property
    def is_set_up(self) -> bool:  # type: ignore[override]  # it is opened and shut as the other is
        return self._within.is_set_up

    @property
    def devices(self) -> list[str]:
        return self._within.devices

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        if not training:
            return EvalShares(module, self)
        if has_sparse(module):
            raise UserError(
                f"{KEY}={self.count} can't add up sparse gradients; use "
                "nn.Embedding(sparse=False), and an optimizer for dense gradients"
            )
        if any(weight.is_complex() for weight in module.parameters()):
            raise UserError(
                f"{KEY}={self.count} can't add up the gradients of complex weights; use {KEY}=null"
            )
        self.collectives.broadcast_tensors([*module.parameters(), *module.buffers()])
        return TrainShares(module, self)

    def split_rows(self, rows: Sequence) -> list[Sequence]:
        return split(rows, self.count)[self.first : self.end]

    def to_device(self, shares: list[Share]) -> list[Share]:
        if self.dtype is None and self.device.type == "cpu":
            return shares
        return [s._replace(batch=move(s.batch, self.device, self.dtype)) for s in shares]

    def begin_step(self, module: nn.Module) -> nn.Module:
        module.batches = 0  # type: ignore[assignment]  # of TrainShares
        return module

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        raise UserError(
            f"self.all_gather can't be combined with {KEY}={self.count}: the shares are computed "
            f"one after the other; use {KEY}=null"
        )

    def logger(self, loggers: list[Logger]) -> list[Logger]:
        return self._within.logger(loggers)

    # ---- the sum of what all shares give

    def own_sums(self, give: Callable[[int], Vectors | None]) -> list[Vectors | None]:
        """Of this process's parts of the tree. `give` is called with each of its shares in order;
        None adds nothing."""

        def leaf(span: tuple[int, int]) -> Any:
            return give(span[0]) if span[1] - span[0] == 1 else ...

        return [add_up(part, leaf) for part in self._parts[self.rank]]

    def total(self, own: list[Vectors | None], zeros: Callable[[], Vectors]) -> Vectors:
        """Of all processes, from the sums of each."""
        everyone = [span for spans in self._parts for span in spans]
        counts = list(map(len, self._parts))

        def add(vectors: list[Tensor]) -> Tensor:
            known = dict(zip(everyone, vectors, strict=True))
            whole = (0, self.count)
            (total,) = add_up(whole, lambda span: [known[span]] if span in known else ...) or []
            return total.add_(0.0)  # where shares give -0.0 and others nothing, it is 0.0

        of_types = zip(*(vectors or zeros() for vectors in own), strict=True)
        return [self.collectives.sum_in_order(add, list(each), counts) for each in of_types]


def refuse(strategy: Strategy, count: int) -> None:
    """What can't have the same bits, in one line."""
    if not strategy.takes_logical_shares:
        raise UserError(
            f"{KEY}={count} but {strategy.name} shares gradients in its own way; use "
            f"strategy=cpu, single_gpu, data_parallel or ddp, or {KEY}=null"
        )
    if strategy.replicas > count:
        raise UserError(
            f"{KEY}={count} but there are {strategy.replicas} replicas, of which each needs a "
            f"share; use {KEY}={strategy.replicas} or more, or fewer replicas"
        )
    if strategy.replicates_task:
        raise UserError(
            f"{KEY}={count} but {strategy.name} computes on copies of the task on "
            f"{strategy.replicas} devices; use strategy=ddp"
        )


def refuse_several_models(strategy: Strategy, count: int) -> None:
    """Refuses devices of several kinds, which round differently. Each process has to call it."""
    if strategy.world_size == 1:
        return
    first, *others = strategy.collectives.broadcast(
        strategy.collectives.gather(model(strategy.device))
    )
    for rank, other in enumerate(others, 1):
        if other != first:
            raise UserError(
                f"{KEY}={count} but rank 0 computes on {first} and rank {rank} on {other}, which "
                f"round differently; use devices of one kind, or {KEY}=null"
            )
