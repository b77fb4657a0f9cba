"""Measures what one replica costs: some steps of a recipe at several sizes of its share."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, islice
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dpframe import interruption, seeding
from dpframe.data import Batch, Loader
from dpframe.errors import UserError
from dpframe.plan.model import Costs, Gradient, Steps, buckets_of, line_through
from dpframe.trainer import Trainer

WARM_UPS = 3  # steps that make the optimiser's state and fill the caches
SIZES = 4  # shares measured: the whole batch, a quarter of it, …
LEAST_ROWS = 2  # batch statistics of a single row are refused


class Times(NamedTuple):
    """Seconds of one step, by its parts."""

    read: float
    forward: float
    backward: float
    update: float


class Measured(NamedTuple):
    costs: Costs
    steps: Steps
    times: dict[int, Times]  # by the rows of a share: the medians
    error: float  # the largest relative one of the lines that the costs have for these
    spread: float  # the largest relative distance from the median that half of the steps kept


def measure(trainer: Trainer, *, steps: int, copies_gradients: bool = False) -> Measured:
    """Of a Trainer that was made for a single replica and prepared; it is of no use afterwards."""
    batches = list(islice(_order(trainer).epoch(0), trainer.settings.limit_train_batches))
    trainer.update.schedules_steps = False  # a schedule may refuse more steps than training has
    trainer.step.train()
    with seeding.seeded(trainer.seed):
        feeds = {rows: _feed(trainer, batches, rows, WARM_UPS + steps) for rows in _sizes(batches)}
        taken, peak = _times(trainer, feeds)
        times = {rows: _medians(each) for rows, each in taken.items()}
        costs = _costs(trainer, batches, times, peak, copies_gradients=copies_gradients)
    errors = (abs(_fitted(costs, rows) / sum(each) - 1) for rows, each in times.items())
    spread = max(_spread([sum(each) for each in one_size]) for one_size in taken.values())
    return Measured(costs, steps_of(trainer, batches), times, max(errors), spread)


def steps_of(trainer: Trainer, batches: list[Tensor]) -> Steps:
    sizes = map(len, batches)
    accumulate = trainer.settings.accumulate
    return Counter(iter(lambda: tuple(islice(sizes, accumulate)), ()))


def _order(trainer: Trainer) -> Any:
    order = trainer.train_loader.order
    if order is None:
        raise UserError(
            f"mode=plan: {type(trainer.data).__name__}.train_dataset() is a stream, and nobody "
            "knows the steps of its epoch; plan with a data set that has a length"
        )
    return order


def _sizes(batches: list[Tensor]) -> list[int]:
    whole = max(map(len, batches))
    least = min(LEAST_ROWS, whole)
    ratio = (least / whole) ** (1 / (SIZES - 1))
    return sorted({round(whole * ratio**power) for power in range(SIZES)}, reverse=True)


def _feed(trainer: Trainer, batches: list[Tensor], rows: int, count: int) -> Iterator[Batch]:
    """`count` batches of so many rows each: those that the recipe's own batches begin with."""
    large_enough = [batch[:rows] for batch in batches if len(batch) >= rows]
    data = trainer.data
    loader = Loader(
        trainer.train_dataset,
        batch_size=rows,
        shares=lambda rows: [rows],
        sampler=list(islice(cycle(large_enough), count)),
        collate=data.collate,
        seed=trainer.seed,
        pin_memory=trainer.strategy.device.type == "cuda",
    )
    return loader.epoch()


def _times(
    trainer: Trainer, feeds: dict[int, Iterator[Batch]]
) -> tuple[dict[int, list[Times]], int | None]:
    """The sizes take turns, so that a machine that slows down slows all of them."""
    is_cuda = trainer.strategy.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    taken: dict[int, list[Times]] = {rows: [] for rows in feeds}
    for rows in cycle(feeds):
        timed = _step(trainer, feeds[rows])
        if timed is None:
            break
        taken[rows].append(timed)
    peak = torch.cuda.max_memory_allocated() if is_cuda else None
    return {rows: each[WARM_UPS:] for rows, each in taken.items()}, peak


def _medians(times: list[Times]) -> Times:
    return Times(*(median(part) for part in zip(*times, strict=True)))


def _spread(seconds: list[float]) -> float:
    middle = median(seconds)
    return median(abs(each - middle) for each in seconds) / middle


def _step(trainer: Trainer, feed: Iterator[Batch]) -> Times | None:
    """One update, as the loop makes it; None where the batches have come to their end."""
    interruption.look()
    now = _clock(trainer)
    began = now()
    batch = next(feed, None)
    if batch is None:
        return None
    was_read = now()
    loss, measured = _forward(trainer, batch)
    was_computed = now()
    trainer.update.backward(loss)
    was_shared = now()
    trainer.means.add(measured)
    weights = [output["weight"] for _, output in measured if "weight" in output]
    trainer.update.step(batch.rows, weights, wants_norm=False)
    ends = (began, was_read, was_computed, was_shared, now())
    return Times(*(end - start for start, end in zip(ends, ends[1:], strict=False)))


def _forward(trainer: Trainer, batch: Batch) -> Any:
    return trainer.step(trainer.strategy.to_device(batch.shares), batch.rows)


def _clock(trainer: Trainer) -> Callable[[], float]:
    """On a GPU (not tried on one) it waits for all that was asked of the device before."""
    if trainer.strategy.device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


# ---- from one step's insides


def _costs(
    trainer: Trainer,
    batches: list[Tensor],
    times: dict[int, Times],
    peak: int | None,
    *,
    copies_gradients: bool,
) -> Costs:
    read, forward, backward, _ = (
        line_through({rows: each[part] for rows, each in times.items()}) for part in range(4)
    )
    held, outputs = {}, {}
    for rows in times:
        held[rows], outputs[rows] = _saved(trainer, next(_feed(trainer, batches, rows, 1)))
    has_weight = "weight" in next(iter(outputs.values()))[0][1]
    skips = trainer.settings.on_nonfinite == "skip"
    trained = [p for p in trainer.task.parameters() if p.requires_grad]
    return Costs(
        read=read,
        forward=forward,
        backward=backward,
        update=median(each.update for each in times.values()),
        parameters=_bytes(trainer.task.parameters()),
        gradients=_bytes(trained),
        optimizer=_bytes(_tensors(trainer.update.optimizer.state)),
        buffers=_bytes(trainer.task.buffers()),
        activations=line_through({rows: float(size) for rows, size in held.items()}),
        buckets=buckets_of(_gradients(trainer, batches, max(times))),
        workers=trainer.train_loader.readers.processes,
        copies_gradients=copies_gradients,
        small_reduces=has_weight + skips * trainer.settings.accumulate,
        peak=peak,
    )


def _fitted(costs: Costs, rows: int) -> float:
    lines = (costs.read, costs.forward, costs.backward)
    return sum(line.at(rows) for line in lines) + costs.update


def _saved(trainer: Trainer, batch: Batch) -> tuple[int, Any]:
    """The bytes that backward is handed: activations and the batch itself, each storage once."""
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, lest its place is given to another
        return tensor

    shares = trainer.strategy.to_device(batch.shares)
    for tensor in _tensors(shares[0]):
        keep(tensor)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _, measured = trainer.step(shares, batch.rows)
    own = chain(trainer.task.parameters(), trainer.task.buffers())
    lasting = {tensor.untyped_storage().data_ptr() for tensor in own}
    return sum(s.nbytes() for place, s in kept.items() if place not in lasting), measured


def _gradients(trainer: Trainer, batches: list[Tensor], rows: int) -> list[Gradient]:
    """In the order in which backward makes them; the quickest of some tries, as the least
    disturbed."""
    trained = [p for p in trainer.task.parameters() if p.requires_grad]
    tries = [_arrivals(trainer, batch, trained) for batch in _feed(trainer, batches, rows, 5)]
    seconds, arrived = min(tries, key=lambda found: found[0])
    when = {id(p): at / seconds for p, at in arrived}
    # One that the step left out comes last: its bucket is full when backward is over.
    ordered = sorted(trained, key=lambda p: when.get(id(p), 1.0))
    return [Gradient(_bytes([p]), when.get(id(p), 1.0), f"{p.dtype} {p.device}") for p in ordered]


def _arrivals(
    trainer: Trainer, batch: Batch, trained: Sequence[Tensor]
) -> tuple[float, list[tuple[Tensor, float]]]:
    now = _clock(trainer)
    arrived: list[tuple[Tensor, float]] = []
    began = 0.0
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: arrived.append((p, now() - began)))
        for p in trained
    ]
    loss, _ = _forward(trainer, batch)
    began = now()
    trainer.update.backward(loss)
    seconds = now() - began
    for hook in hooks:
        hook.remove()
    trainer.update.optimizer.zero_grad()
    return seconds, arrived


def _tensors(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, dict):
        yield from chain.from_iterable(map(_tensors, nest.values()))
    elif isinstance(nest, (list, tuple)):
        yield from chain.from_iterable(map(_tensors, nest))


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
