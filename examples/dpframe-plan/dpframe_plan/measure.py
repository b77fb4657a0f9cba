"""Measures what one replica costs: a training of some steps, with shares of several sizes."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dpframe import DataModule, Strategy, Task, Trainer, TrainerSettings, UserError
from dpframe.plugin import (
    WARM_UPS,
    Probe,
    Sampled,
    TrainingData,
    bytes_of,
    checkpoint,
    now,
    refuse_by_hand,
    seeding,
    short,
    tensors_of,
)
from dpframe.plugin import memory as device_memory
from dpframe_plan.failures import Saving
from dpframe_plan.model import Costs, Gradient, Steps, buckets_of, line_through
from dpframe_plan.sharded import Call, Sharded, Unit, Weight

SIZES = 4  # shares measured: the whole batch, a quarter of it, …
LEAST_ROWS = 2  # batch statistics of a single row are refused
TRIES = 5  # backwards of which the quickest says when gradients are ready


class Times(NamedTuple):
    """Seconds of one step, by its parts."""

    read: float
    forward: float
    backward: float
    update: float


class Measured(NamedTuple):
    device: str
    costs: Costs
    steps: Steps
    times: dict[int, Times]  # by the rows of a share: the medians
    error: float  # the largest relative one of the lines that the costs have for these
    saving: Saving | None = None


def measure(
    task: Task,
    data: DataModule,
    settings: TrainerSettings,
    *,
    accelerator: str,
    seed: int,
    steps: int,
    wanted: Strategy | None = None,
    copies_gradients: bool = False,
    bucket_bytes: int | None = None,
    saves_in: Path | None = None,
) -> Measured:
    """Trains the task for a while, by the Trainer's own loop on one replica; `wanted` is the
    strategy to plan for, where replicas share the weights themselves. A checkpoint is saved in a
    directory `saves_in`, and removed."""
    clock, memory, gradients = (Clock(accelerator=accelerator) for _ in range(3))
    cuts: Any = wanted if wanted is not None and wanted.sharding.cuts else None
    clock.__enter__()
    data.setup()
    feed = TrainingData.of(data, clock, settings, seed=seed)
    if feed.train.order is None:
        raise UserError(
            f"mode=plan: {type(data).__name__}.train_dataset() is a stream, so the steps of its "
            "epoch are unknown; plan with a data set that has a length"
        )
    batches = list(islice(feed.train.order.epoch(0), feed.batches_per_epoch))
    whole = max(map(len, batches))
    ratio = (min(LEAST_ROWS, whole) / whole) ** (1 / (SIZES - 1))
    sizes = sorted({round(whole * ratio**power) for power in range(SIZES)}, reverse=True)

    def fit(probe: Clock, rows: list[int]) -> Trainer:
        probe.__enter__()
        sampled = Sampled(feed.source, batches, rows)
        kept = short(settings, steps=len(rows))
        trainer = Trainer(task, sampled, strategy=probe, settings=kept, seed=seed)
        trainer.prepare()
        refuse_by_hand(task, "mode=plan")
        if len(trainer.updates) > 1:
            raise UserError(
                "mode=plan times the parts of a step with one optimizer, and "
                f"{type(task).__name__} has several: {', '.join(trainer.updates)}; try "
                "mode=compare, which times whole steps"
            )
        trainer.fit()
        return trainer

    todo = (
        f"lower data.batch_size={data.batch_size}, and raise trainer.accumulate="
        f"{settings.accumulate} by the same factor: the same updates"
    )
    with seeding.seeded(seed), device_memory.explain(clock.device, "mode=plan", todo):
        # The sizes take turns, so that a machine that slows down slows all of them.
        trainer = fit(clock, sizes * (WARM_UPS + steps))
        saving = None if saves_in is None else _saving(trainer, saves_in)
        memory.kept = {}
        with saved_tensors_hooks(memory.keep, lambda tensor: tensor):
            fit(memory, sizes)
        gradients.sees_gradients = True
        gradients.blocks = cuts.sharding.choose_blocks(task) if cuts else []
        fit(gradients, [whole] * TRIES)
    taken = {rows: clock.times[i :: len(sizes)][WARM_UPS:] for i, rows in enumerate(sizes)}
    times = {rows: Times(*map(median, zip(*each, strict=True))) for rows, each in taken.items()}
    read, forward, backward = (
        line_through({rows: each[part] for rows, each in times.items()}) for part in range(3)
    )
    costs = Costs(
        read=read,
        forward=forward,
        backward=backward,
        update=median(each.update for each in times.values()),
        parameters=bytes_of(task.parameters()),
        gradients=bytes_of(p for p in task.parameters() if p.requires_grad),
        optimizer=bytes_of(tensors_of(trainer.update.optimizer.state)),
        buffers=bytes_of(task.buffers()),
        activations=line_through(dict(zip(sizes, map(float, memory.held), strict=True))),
        buckets=buckets_of(gradients.arrivals(), bucket_bytes),
        workers=feed.train.workers.processes,
        copies_gradients=copies_gradients,
        small_reduces=bool(trainer.update.weighting.is_used)
        + (settings.on_nonfinite == "skip") * settings.accumulate
        + (sum(not weight.ndim for weight in gradients.trained) if cuts else 0),
        peak=clock.peak,
        sharded=_sharded(task, cuts, gradients, settings) if cuts else None,
    )
    fits = {
        rows: sum(line.at(rows) for line in (read, forward, backward)) + costs.update
        for rows in times
    }
    error = max(abs(fits[rows] / sum(each) - 1) for rows, each in times.items())
    lengths = map(len, batches)
    updates = Counter(iter(lambda: tuple(islice(lengths, settings.accumulate)), ()))
    return Measured(str(clock.device), costs, updates, times, error, saving)


def _saving(trainer: Trainer, folder: Path) -> Saving:
    """The second of two saves: the first one makes the threads, buffers and files that it needs."""
    writer = checkpoint.Writer()
    with TemporaryDirectory(dir=folder, prefix="dpframe-plan-") as made:
        path = Path(made, "checkpoints", "last.ckpt")
        for _ in range(2):
            began = now(trainer.strategy.device)
            state = trainer.state_dict()
            writer.save(state, [path])
            stall = time.perf_counter() - began
            writer.wait()
            write = time.perf_counter() - began - stall
        return Saving(path.stat().st_size, len(list(tensors_of(state))), stall, write)


def _sharded(task: Task, strategy: Any, probe: "Clock", settings: TrainerSettings) -> Sharded:
    """`strategy` is an FSDP; torch keeps the rest's weights for the backward, unless it is told."""
    owned: set[int] = set()
    units = []
    for block in [*probe.blocks, task]:  # inner ones first
        own = [w for w in block.parameters() if w.ndim and id(w) not in owned]
        owned.update(map(id, own))
        units.append(Unit(tuple(_weight(each, strategy) for each in own)))
    trained = [weight for weight in probe.trained if weight.ndim]
    return Sharded(
        units=tuple(units),
        calls=tuple(probe.calls()),
        replicate=strategy.replicate,
        blocks_again=strategy.sharding.reshard_after_forward is not False,
        rest_again=strategy.sharding.reshard_after_forward is True,
        accumulates=settings.accumulate > 1,
        norms=4 * len(trained) if settings.clip_norm is not None else 0,
        buffers=sum(1 for _ in task.buffers()),
    )


def _weight(weight: Tensor, strategy: Any) -> Weight:
    numbers = weight[0].numel() if len(weight) else 0
    gathered = strategy.sharding.param_dtype or weight.dtype
    reduced = strategy.sharding.reduce_dtype or gathered
    return Weight(
        rows=len(weight),
        kept=numbers * weight.itemsize,
        gathered=numbers * gathered.itemsize,
        reduced=numbers * reduced.itemsize if weight.requires_grad else 0,
    )


class Clock(Probe):
    """Watches how long each part of a step takes, and when gradients and blocks come in it."""

    sees_gradients = False
    blocks: Sequence[nn.Module] = ()  # whose calls it notes, too

    def setup(self) -> None:
        super().setup()
        self.times: list[Times] = []
        self.tries: list[Try] = []
        self.arrived: dict[Tensor, float] = {}  # when each gradient was there
        self.called: list[list[float]] = []  # a block's number, and its forward's beginning and end
        self.laps = [now(self.device)]

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        module = super().wrap(module, training=training)
        if training:
            self.trained = [p for p in module.parameters() if p.requires_grad]
            module.register_forward_hook(lambda *_: self._lap())
            for parameter in self.trained if self.sees_gradients else []:
                parameter.register_post_accumulate_grad_hook(self._arrive)
            for number, block in enumerate(self.blocks):
                block.register_forward_pre_hook(partial(self._enter, number))
                block.register_forward_hook(self._leave)
        return module

    def check_gradients(self) -> None:
        self._lap()

    def sync_weights(self, for_reading: bool) -> None:
        if for_reading:
            return
        self._lap()
        seconds = [end - start for start, end in pairwise(self.laps)]
        if len(seconds) == len(Times._fields):  # a step with a NaN may be left out
            self.times.append(Times(*seconds))
            arrived = {weight: at - self.laps[2] for weight, at in self.arrived.items()}
            calls = [(int(n), a - self.laps[1], b - self.laps[1]) for n, a, b in self.called]
            self.tries.append(Try(seconds[1], seconds[2], arrived, calls))
        self.laps, self.arrived, self.called = self.laps[-1:], {}, []
        super().sync_weights(for_reading)

    def arrivals(self) -> list[Gradient]:
        """In their order, of the quickest try: it was the least disturbed."""
        when = self._when()
        return [
            Gradient(parameter.nbytes, when[parameter], f"{parameter.dtype} {parameter.device}")
            for parameter in sorted(self.trained, key=lambda parameter: when[parameter])
        ]

    def calls(self) -> Iterator[Call]:
        """The calls of the quickest try, in the order of its forward."""
        tried, when = self._quickest(), self._when()
        owned: set[int] = set()
        done = []
        for block in self.blocks:
            own = [w for w in block.parameters() if w in when and id(w) not in owned]
            owned.update(map(id, own))
            done.append(max((when[weight] for weight in own), default=0.0))
        for number, begins, ends in tried.calls:
            yield Call(number, begins / tried.forward, ends / tried.forward, done[number])

    def _quickest(self) -> "Try":
        return min(self.tries, key=lambda each: each.backward)

    def _when(self) -> dict[Tensor, float]:
        """A gradient that the step leaves out comes last: its bucket is full after the backward."""
        tried = self._quickest()
        seconds = tried.backward
        return {weight: tried.arrived.get(weight, seconds) / seconds for weight in self.trained}

    def begin_forward(self, batch: Any) -> None:
        self._lap()
        super().begin_forward(batch)

    def _arrive(self, parameter: Tensor) -> None:
        self.arrived[parameter] = now(self.device)

    def _enter(self, number: int, *_: Any) -> None:
        if len(self.laps) == 2:  # else a backward computes it again
            self.called.append([number, now(self.device)])

    def _leave(self, *_: Any) -> None:
        if len(self.laps) == 2:
            # Blocks within a block: the innermost one that is open.
            next(call for call in reversed(self.called) if len(call) == 2).append(now(self.device))

    def _lap(self) -> None:
        self.laps.append(now(self.device))


class Try(NamedTuple):
    """One step: seconds of its parts, and when in them gradients came and blocks were called."""

    forward: float
    backward: float
    arrived: dict[Tensor, float]
    calls: list[tuple[int, float, float]]
