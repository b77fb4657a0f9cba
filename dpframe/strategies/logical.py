"""trainer.logical_replicas: the same bits on any number of replicas, in one process or several.

Each global batch is computed as so many logical shares, one after the other, whoever does it. What
they give is added up along one binary tree over all of them: each sum has the same two operands
everywhere, so it rounds alike. A process has the sums of the largest parts of the tree that are its
own; the rest is added up from those of all processes.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from dpframe import seeding
from dpframe.data import Share, move, split
from dpframe.errors import UserError
from dpframe.loggers import Logger
from dpframe.parameters import has_sparse
from dpframe.strategies.base import FREEZE_ALIKE, Strategy
from dpframe.strategies.devices import model

KEY = "trainer.logical_replicas"
Span = tuple[int, int]
"""A node of the tree: the first of its shares, and the one after its last."""
Vectors = list[Tensor]
"""One for each type that weights or buffers have."""


class Logical(Strategy):
    """Another strategy's processes and devices, and logical shares instead of its own."""

    def __init__(self, strategy: Strategy, count: int, seed: int) -> None:
        """`strategy` is set up."""
        refuse(strategy, count)
        refuse_several_models(strategy, count)
        super().__init__(strategy.gpus, strategy.accelerator)
        self._within = strategy
        self._seed = seed
        self.logical_shares = count
        self.rank, self.world_size = strategy.rank, strategy.world_size
        self.collectives = strategy.collectives
        self.replicas, self.device, self.nodes = strategy.replicas, strategy.device, strategy.nodes
        self.uses_gpus, self.launches_ranks = strategy.uses_gpus, strategy.launches_ranks
        self.has_alike_weights = strategy.has_alike_weights
        self.share_at = 0  # the one that is computed
        self.spans = spans(count, self.world_size)
        self._parts = [parts((0, count), *span) for span in self.spans]

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
                f"{KEY}={self.logical_shares} can't add up sparse gradients; use "
                "nn.Embedding(sparse=False), and an optimizer for dense gradients"
            )
        if any(weight.is_complex() for weight in module.parameters()):
            raise UserError(
                f"{KEY}={self.logical_shares} can't add up the gradients of complex weights; use "
                f"{KEY}=null"
            )
        self._within.collectives.broadcast_tensors([*module.parameters(), *module.buffers()])
        return TrainShares(module, self)

    def split_rows(self, rows: Sequence) -> list[Sequence]:
        first, end = self.spans[self.rank]
        return split(rows, self.logical_shares)[first:end]

    def to_device(self, shares: list[Share]) -> list[Share]:
        if self.dtype is None and self.device.type == "cpu":
            return shares
        return [s._replace(batch=move(s.batch, self.device, self.dtype)) for s in shares]

    def begin_step(self, module: nn.Module) -> nn.Module:
        module.batches = 0  # type: ignore[assignment]  # of TrainShares
        return module

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        raise UserError(
            f"self.all_gather can't be had with {KEY}={self.logical_shares}: the shares are "
            f"computed one after the other; use {KEY}=null"
        )

    def logger(self, loggers: list[Logger]) -> list[Logger]:
        return self._within.logger(loggers)

    # ---- the sum of what all shares give

    def own_sums(self, give: Callable[[int], Vectors | None]) -> list[Vectors | None]:
        """Of this process's parts of the tree. `give` is called with each of its shares in order;
        None adds nothing."""

        def leaf(span: Span) -> Any:
            return give(span[0]) if span[1] - span[0] == 1 else ...

        return [add_up(part, leaf) for part in self._parts[self.rank]]

    def total(self, own: list[Vectors | None], zeros: Callable[[], Vectors]) -> Vectors:
        everyone = [span for spans in self._parts for span in spans]
        counts = list(map(len, self._parts))

        def add(vectors: list[Tensor]) -> Tensor:
            known = dict(zip(everyone, vectors, strict=True))
            whole = (0, self.logical_shares)
            (total,) = add_up(whole, lambda span: [known[span]] if span in known else ...) or []
            return total.add_(0.0)  # where shares give -0.0 and others nothing, it is 0.0

        of_types = zip(*(vectors or zeros() for vectors in own), strict=True)
        return [
            self._within.collectives.sum_in_order(add, list(vectors), counts)
            for vectors in of_types
        ]


def refuse(strategy: Strategy, count: int) -> None:
    """What can't have the same bits, in one line."""
    if not strategy.takes_logical_shares:
        raise UserError(
            f"{KEY}={count} but {strategy.name} shares gradients in a way of its own; use "
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
                f"round otherwise; use devices of one kind, or {KEY}=null"
            )


# ---- the tree


def spans(count: int, processes: int) -> list[Span]:
    """The shares of each process."""
    ends = [count * process // processes for process in range(processes + 1)]
    return list(zip(ends, ends[1:], strict=False))


def halves(span: Span) -> tuple[Span, Span]:
    """The left one has as many shares as the largest power of two below theirs."""
    first, end = span
    middle = first + (1 << (end - first - 1).bit_length() - 1)
    return (first, middle), (middle, end)


def parts(span: Span, first: int, end: int) -> list[Span]:
    """The largest nodes below this one that have only shares from `first` to before `end`."""
    if end <= span[0] or span[1] <= first:
        return []
    if first <= span[0] and span[1] <= end:
        return [span]
    return [part for half in halves(span) for part in parts(half, first, end)]


def add_up(span: Span, known: Callable[[Span], Any]) -> Vectors | None:
    """The sum of a node's shares. `known` gives it where it is known, and `...` where it follows
    from the halves. At most log2 of the shares are kept, as each is added as soon as it can be."""
    value = known(span)
    if value is not ...:
        return value
    left, right = halves(span)
    ours, theirs = add_up(left, known), add_up(right, known)
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return [one.add_(other) for one, other in zip(ours, theirs, strict=True)]


# ---- what a share gives


class Shares(nn.Module):
    """Computes this process's shares in order, each with random numbers of its own.

    These are a fact of the seed, the step, the batch and the share.
    """

    def __init__(self, module: Any, strategy: Logical) -> None:
        super().__init__()
        self.module = module
        self.batches = 0  # of the step, or of the pass
        self._strategy = strategy
        self._first = strategy.spans[strategy.rank][0]
        kind = "/".join((type(module).__name__, *getattr(module, "turn", ()), _step_of(module)))
        self._kind = zlib.crc32(kind.encode())

    def _draw(self, share: int) -> None:
        """The random numbers of one share; those of the share after the last one are what a
        process draws by after all of them."""
        strategy, progress = self._strategy, self.module.task.run_context.progress
        strategy.share_at = share
        step = progress.global_step if progress is not None else 0
        seed = seeding.mix(strategy._seed, step, self._kind, self.batches, share)
        seeding.reseed(seed, [strategy.device])

    def _end_share(self, share: int) -> None:
        context = self.module.task.run_context
        step = context.progress.global_step if context.progress is not None else 0
        context.end_share([step, self.batches, share])

    def _end(self) -> None:
        self._draw(self._strategy.logical_shares)
        self.batches += 1


class EvalShares(Shares):
    """The logical shares of a batch that is evaluated."""

    def train(self, mode: bool = True) -> Self:
        """Each pass begins with `eval()`."""
        self.batches = 0
        return super().train(mode)

    def forward(self, shares: list[Share]) -> Any:
        results = []
        for number, share in enumerate(shares, self._first):
            if share.rows:
                self._draw(number)
                results.append(self.module(share))
                self._end_share(number)
        self._end()
        return self.module.combine(results)


class TrainShares(Shares):
    """The backward of each share follows its forward, so that the activations of one are kept. The
    backward of the loss that comes out adds up what all processes have, and puts it into the
    weights."""

    def forward(self, shares: list[Share], of: float) -> tuple[Tensor, list[Any]]:
        layout = Layout(self.module)
        if not layout.trained:
            self.module(Share(None, 0), of)  # refuses that, on each process
        all_measured: list[Any] = []

        def give(number: int) -> Vectors | None:
            share = shares[number - self._first]
            if not share.rows:
                return None
            self._draw(number)
            with _explaining(share):
                loss, measured = self.module(share, of)
            self._end_share(number)
            loss.backward()
            all_measured.extend(measured)
            vectors = layout.vectors(share.rows / share.total)
            layout.restore()
            return vectors

        earlier = layout.take_gradients()
        own = self._strategy.own_sums(give)
        self._end()

        def deliver() -> None:
            has_gradient = layout.count_gradients(self._strategy)
            total = self._strategy.total(own, layout.zeros)
            layout.set_gradients(total, earlier, has_gradient)
            layout.set_buffers(total)

        # On the host: its backward runs in this thread, as the collectives of all processes do.
        return Delivery.apply(torch.zeros((), requires_grad=True), deliver), all_measured


class Layout:
    """Where in the vectors the gradients and the buffers' changes are. There is a vector for each
    type of weights and of buffers that are floats; the first one has the other buffers, too."""

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_parameters())
        self._is_trained = {name: weight.requires_grad for name, weight in named.items()}
        self.trained = [weight for weight in named.values() if weight.requires_grad]
        self.buffers = [torch.view_as_real(b) if b.is_complex() else b for b in module.buffers()]
        self.has_gradient = [0.0] * len(self.trained)  # from how many of this process's shares
        self._before = [buffer.clone() for buffer in self.buffers]
        floats = [t for t in (*self.trained, *self.buffers) if t.is_floating_point()]
        self.types = list(dict.fromkeys(tensor.dtype for tensor in floats))

    def count_gradients(self, strategy: Strategy) -> list[float]:
        """How many shares give a gradient to each trained weight, over all processes."""
        is_trained = self._is_trained.values()
        counts = iter(self.has_gradient)
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

    def take_gradients(self) -> list[Tensor | None]:
        """Returns the gradients, and sets them to None."""
        taken = [weight.grad for weight in self.trained]
        for weight in self.trained:
            weight.grad = None
        return taken

    def vectors(self, part: float) -> Vectors:
        """What a share has left, which is this part of the batch; it takes the gradients away."""
        pieces: dict[torch.dtype, list[Tensor]] = {kind: [] for kind in self.types}
        for index, gradient in enumerate(self.take_gradients()):
            weight = self.trained[index]
            self.has_gradient[index] += gradient is not None
            piece = torch.zeros_like(weight) if gradient is None else gradient
            pieces[weight.dtype].append(piece.reshape(-1))
        for buffer, before in zip(self.buffers, self._before, strict=True):
            kind = self._kind(buffer)
            change = buffer.to(kind) - before.to(kind)
            pieces[kind].append(change.mul_(part).reshape(-1))
        return [torch.cat(pieces[kind]) for kind in self.types]

    def zeros(self) -> Vectors:
        """What no share has left."""
        sizes = dict.fromkeys(self.types, 0)
        for weight in self.trained:
            sizes[weight.dtype] += weight.numel()
        for buffer in self.buffers:
            sizes[self._kind(buffer)] += buffer.numel()
        device = self.trained[0].device
        return [torch.zeros(size, dtype=kind, device=device) for kind, size in sizes.items()]

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the buffers, so that each share begins with those of the batch."""
        for buffer, before in zip(self.buffers, self._before, strict=True):
            buffer.copy_(before)

    def set_gradients(
        self, total: Vectors, earlier: list[Tensor | None], counts: list[float]
    ) -> None:
        """Adds them to those of the earlier batches. A weight that no share has given any keeps
        these."""
        pieces = self._cut(total)
        for weight, before, count in zip(self.trained, earlier, counts, strict=True):
            piece = next(pieces)
            if not count:
                weight.grad = before
            elif before is not None:
                weight.grad = before.add_(piece)
            elif weight.is_contiguous():
                weight.grad = piece
            else:  # e.g. in channels_last memory: fused optimizers take both as they lie there
                weight.grad = torch.empty_like(weight).copy_(piece)

    @torch.no_grad()
    def set_buffers(self, total: Vectors) -> None:
        """The mean over the rows of what the shares have made of them."""
        changes = list(self._cut(total))[len(self.trained) :]
        for buffer, before, change in zip(self.buffers, self._before, changes, strict=True):
            if buffer.is_floating_point():
                buffer.copy_(before + change)
            else:  # e.g. a count of batches
                buffer.copy_(before + change.round().to(torch.int64))

    def _cut(self, total: Vectors) -> Iterator[Tensor]:
        rest = dict(zip(self.types, total, strict=True))
        for tensor in (*self.trained, *self.buffers):
            kind = self._kind(tensor)
            piece, rest[kind] = rest[kind].tensor_split([tensor.numel()])
            yield piece.view(tensor.shape)

    def _kind(self, tensor: Tensor) -> torch.dtype:
        return tensor.dtype if tensor.is_floating_point() else self.types[0]


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
