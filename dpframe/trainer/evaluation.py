"""Validation, test and prediction: every row once, whatever the strategy."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpframe import seeding
from dpframe.data import Batch, DataModule, Loader, placed
from dpframe.data.columns import Columns
from dpframe.data.order import Order
from dpframe.data.prefetch import prefetched
from dpframe.errors import Interrupted, UserError
from dpframe.launch.signals import Interruption
from dpframe.launch.watchdog import beat
from dpframe.metrics import Means, pooled
from dpframe.strategies.base import Strategy
from dpframe.strategies.collectives import Collectives
from dpframe.task import Task
from dpframe.trainer.calendar import StopPoll
from dpframe.trainer.checks.put_back import put_back
from dpframe.trainer.compute.placement import Precision, with_default_dtype
from dpframe.trainer.feed import evaluated
from dpframe.trainer.outputs import Measured, refuse_backward
from dpframe.trainer.predictions import Predictions, Spool, by_rows, collected, fitting, size_of
from dpframe.trainer.profile import timed
from dpframe.trainer.settings import TrainerSettings
from dpframe.trainer.step import EvalStep
from dpframe.trainer.task_metrics import TaskMetrics

NO_ROWS = "the data set gave no rows; check its stream"


AfterBatch = Callable[[Batch, list[Any]], None]
"""Called with each batch, placed, and what the steps returned."""
STEPS = {"val": "validation_step", "test": "test_step", "predict": "predict_step"}


@dataclass(frozen=True)
class Placed:
    """What every mode of a Trainer needs: a placed task, its data, and where and how they run."""

    task: Task
    data: DataModule
    strategy: Strategy
    seed: int
    precision: Precision
    task_metrics: TaskMetrics
    interruption: Interruption | None
    checked: set[str] = field(default_factory=set)  # by the share check: val, test


class Evaluation:
    """One of the task's steps over a `val`, `test` or `predict` data set."""

    def __init__(
        self, placed: Placed, kind: str, name: str, loader: Loader, settings: TrainerSettings
    ) -> None:
        self.task, self.strategy, precision = placed.task, placed.strategy, placed.precision
        self.kind = kind
        self.name = name
        self.prefix = f"{kind}/{name}" if name else kind
        self.loader = loader
        self.read, self.to_device = prefetched(
            loader, self.strategy.to_device, self.strategy.local_devices
        )
        self.batches = loader.batches
        self.limit_batches = settings.limit(kind, self.batches)
        self.task_metrics = placed.task_metrics
        step = EvalStep(self.task, STEPS[kind], precision.autocast, name)
        self.step = self.strategy.wrap(step, training=False)
        self.forward: Callable[..., Any] = self.step
        if precision.dtype is not None:
            self.forward = with_default_dtype(precision.dtype, self.step)
        self.sums = means_over(self.strategy)
        self.stop_poll = StopPoll(self.strategy, placed.interruption)

    def measure(
        self,
        after_batch: AfterBatch | None = None,
        at_most: int | None = None,
        modules: list[nn.Module] | None = None,
    ) -> None:
        """Reads the set; `sums` has what its steps measured. With `at_most` only so many batches
        are read, for the names of what they measure. `modules` are the task's, if they are
        known."""
        self.sums.reset()
        self.rows = 0
        for rows, measured in self._batches(after_batch, at_most, modules):
            self.sums.add(measured if at_most is None else map(unweighted, measured))
            self.rows += rows

    def means(self) -> dict[str, float]:
        """The exact means over all rows, as `val/loss`, or `val/clean/loss` of the set `clean`."""
        total = self.sums.known()
        if not total:
            why = f"the weights of all {self.rows} rows add up to 0: there is no mean over them"
            raise UserError(f"{self.prefix}: {why if self.rows else NO_ROWS}")
        means = self.task.summarize(total).items()
        return {f"{self.prefix}/{name}": value for name, value in means}

    def columns(self, asked: Sequence[str]) -> Columns | None:
        """What of the data set's rows stands beside their predictions."""
        if not asked:
            return None
        if not isinstance(self.loader.order, Order | None):
            raise UserError(
                "predict.columns: the DataLoader to predict on has an order of its own; give its "
                "data set, or leave predict.columns out"
            )
        return Columns(self.loader.rows.dataset, asked, self.name)

    @torch.no_grad()
    def predictions(
        self,
        spool: str | Path | None = None,
        columns: Columns | None = None,
        *,
        after_batch: AfterBatch | None = None,
    ) -> Predictions | None:
        """Every row's output in the order of the data set, on the main process; None elsewhere.
        Large outputs are kept on disk, in the directory `spool`, if it is set."""
        name = f"{type(self.task).__name__}.{STEPS[self.kind]}"

        def read() -> Iterator[list[Any]]:
            for rows, part in self._batches(after_batch):
                self.rows += rows
                yield [by_rows(output, own, f"{name} returned") for own, output in part]

        batches: Any = [] if spool is None else Spool(spool)
        self.rows, count, here = 0, 1, read()
        while some := list(islice(here, count)):
            batches.extend(collected(self.strategy.collectives.gather(some)))
            [held] = self.strategy.collectives.sum_numbers([float(size_of(some))])
            count = fitting(count, held)
        if not self.strategy.is_main:
            return None
        if not batches:
            raise UserError(f"predict: {NO_ROWS}")
        return Predictions(batches, self.name, self.rows, columns)

    def _batches(
        self,
        after_batch: AfterBatch | None = None,
        at_most: int | None = None,
        modules: list[nn.Module] | None = None,
    ) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
        to_device = self.to_device
        if modules is None or any(map(attrgetter("training"), modules)):
            self.step.eval()
        look_at = 0 if at_most else self.stop_poll.begin(0)
        limit = min(filter(None, (self.limit_batches, at_most)), default=None)
        self.task.run_context.batches = min(filter(None, (self.batches, limit)), default=None)
        for done, batch in enumerate(self.read(limit=limit), 1):
            beat()
            self.task.run_context.batch_index = done - 1
            shares = to_device(batch.shares)
            outputs = self.forward(shares)
            yield batch.rows, outputs
            if after_batch is not None:
                seen = placed(batch, shares)._replace(name=self.name)
                after_batch(seen, [output for _, output in outputs])
            if done >= look_at and at_most is None:
                look_at = self.stop_poll.poll(done)[0]

    @property
    def may_poll(self) -> bool:
        """Within the next pass."""
        return self.batches is None or self.batches >= self.stop_poll.every


class Evaluations:
    """Of all `val`, `test` or `predict` data sets; false where there is none."""

    def __init__(
        self,
        placed: Placed,
        kind: str,
        settings: TrainerSettings,
        loaders: dict[str, Loader] | None = None,
    ) -> None:
        if loaders is None:
            loaders = evaluated(kind, placed.data, placed.strategy, settings, seed=placed.seed)
        self._placed = placed
        self.kind = kind
        self.by_name = {
            name: Evaluation(placed, kind, name, loader, settings)
            for name, loader in loaders.items()
        }
        self._is_profiled = settings.profile

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def means(self, *others: Means, after_batch: AfterBatch | None = None) -> dict[str, float]:
        """The means of each data set, and if there are several, also over the rows of all."""
        # Not kept: a cycle would keep the workers until Python looks for cycles.
        measure = timed("validation", self._means, is_profiled=self._is_profiled)
        may_poll = any(evaluation.may_poll for evaluation in self.by_name.values())
        random_state = seeding.random_state() if may_poll else {}
        try:
            self._placed.task.adapter.begin_pass(self.kind)
            return measure(*others, after_batch=after_batch)
        except Interrupted:  # a resumed run draws all of it again
            seeding.restore_random_state(random_state)
            raise

    @torch.no_grad()
    def _means(
        self, *others: Means, after_batch: AfterBatch | None = None, at_most: int | None = None
    ) -> dict[str, float]:
        task, task_metrics = self._placed.task, self._placed.task_metrics
        evaluations = [*self.by_name.values()]
        first, *more = [evaluation.sums for evaluation in evaluations]
        if set(self.by_name) == {""}:
            [evaluation] = evaluations
            with task_metrics.apart():
                evaluation.measure(after_batch, at_most)
                first.total(*others)
                means = evaluation.means()
                return means | task_metrics.results(self.kind)(means)
        # Listed once: for each of many small sets that would take a third of its time.
        modules = [*task.modules()]
        with task_metrics.apart():
            results = []
            for evaluation in evaluations:
                with task_metrics.apart(is_part=True):
                    evaluation.measure(after_batch, at_most, modules)
                    evaluation.sums.collect_many()
                    results.append(task_metrics.results(evaluation.prefix))
            first.total(*more, *others)  # by one all-reduce
            means = {}
            for evaluation, results_beside in zip(evaluations, results, strict=True):
                of_set = evaluation.means()
                means |= of_set | results_beside(of_set)
            over_all = task.summarize(pooled([first, *more]))
            means |= {f"{self.kind}/{name}": value for name, value in over_all.items()}
            return means | task_metrics.results(self.kind)(means)

    def measure_few(self, batches: int) -> list[str]:
        """The names of what is measured, from so many batches. Nothing is drawn or counted, and the
        task has its buffers and attributes again."""
        devices = self._placed.strategy.local_devices
        random_state = seeding.random_state(devices)
        with put_back(self._placed.task):
            try:
                self._placed.task.adapter.begin_pass(self.kind)
                names = self._means(at_most=batches)
            except RuntimeError as error:
                refuse_backward(error, self._placed.task)
                raise
        seeding.restore_random_state(random_state, devices)
        self._placed.task_metrics.tables.clear()
        return list(names)


@contextmanager
def restore_modes(task: Task) -> Iterator[None]:
    """A module that was in evaluation mode before, e.g. a frozen backbone, is so afterwards."""
    modes = [(module, module.training) for module in task.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
            if module.training is not is_training:
                module.training = is_training


def unweighted(measured: Measured) -> Measured:
    """Without the weight: in the few batches of a sanity check all weights may be 0."""
    rows, output = measured
    return rows, {name: value for name, value in output.items() if name != "weight"}


def means_over(strategy: Strategy) -> Means:
    def agree(names: list[str]) -> list[str]:
        return strategy.collectives.broadcast(
            sorted(set().union(*strategy.collectives.gather(names)))
        )

    reduce = partial(_sum_in_order, strategy.collectives)
    return Means(reduce if strategy.world_size > 1 else None, agree, strategy.sums)


def _sum_in_order(collectives: Collectives, numbers: Tensor) -> Tensor:
    """Over the processes, in the order of their ranks. In what order an all-reduce adds a number
    depends on its place among the others, and these are others after a resume."""
    of_ranks = numbers.new_zeros(collectives.world_size, len(numbers))
    of_ranks[collectives.rank] = numbers
    total = torch.zeros_like(numbers)
    for of_rank in collectives.sum(of_ranks).to(total.device):
        total += of_rank
    return total
