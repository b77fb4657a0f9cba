"""Validation, test and prediction: every row once, whatever the strategy."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dpframe import seeding
from dpframe.data import Batch, Loader, placed
from dpframe.data.prefetch import prefetched
from dpframe.errors import Interrupted, UserError
from dpframe.launch.signals import Interruption
from dpframe.launch.watchdog import beat
from dpframe.metrics import Means, pooled
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.default_dtype import with_default_dtype
from dpframe.trainer.outputs import Measured
from dpframe.trainer.placement import Precision
from dpframe.trainer.predictions import Predictions, by_rows, collected
from dpframe.trainer.spool import Spool, fitting, size_of
from dpframe.trainer.step import EvalStep
from dpframe.trainer.stop_poll import StopPoll
from dpframe.trainer.task_metrics import TaskMetrics

NO_ROWS = "the data set gave no rows; check its stream"


AfterBatch = Callable[[Batch, list[Any]], None]
"""Called with each batch, placed, and what the steps returned."""
STEPS = {"val": "validation_step", "test": "test_step", "predict": "predict_step"}


class Evaluation:
    """One of the task's steps over the `val`, `test` or `predict` data set."""

    def __init__(
        self,
        task: Task,
        kind: str,
        loader: Loader,
        strategy: Strategy,
        *,
        name: str = "",
        precision: Precision,
        limit_batches: int | None,
        task_metrics: TaskMetrics,
        interruption: Interruption | None = None,
    ) -> None:
        self.task = task
        self.kind = kind
        self.name = name
        self.prefix = f"{kind}/{name}" if name else kind
        self.loader = loader
        self.devices = strategy.local_devices
        self.read, self.to_device = prefetched(loader, strategy.to_device, self.devices)
        self.strategy = strategy
        self.limit_batches = limit_batches
        self.task_metrics = task_metrics
        step = EvalStep(task, STEPS[kind], precision.autocast, name)
        self.step = strategy.wrap(step, training=False)
        self.forward: Callable[..., Any] = self.step
        if precision.dtype is not None:
            self.forward = with_default_dtype(precision.dtype, self.step)
        self.sums = means_over(strategy)
        self.stop_poll = StopPoll(strategy, interruption)

    @torch.no_grad()
    def means(
        self, *others: Means, after_batch: AfterBatch | None = None, at_most: int | None = None
    ) -> dict[str, float]:
        """The exact means over all rows, as `val/loss`, or `val/clean/loss` of the set `clean`, and
        the task's metrics; `others` share the all-reduce. With `at_most` only so many batches are
        read, for the names of what they measure."""
        with self.task_metrics.apart(is_part=self.name != ""):
            means = self._means(others, after_batch, at_most)
            return means | self.task_metrics.results(self.prefix, means)

    def _means(
        self, others: Iterable[Means], after_batch: AfterBatch | None, at_most: int | None
    ) -> dict[str, float]:
        self.sums.reset()
        seen = 0
        for rows, measured in self._batches(after_batch, at_most):
            self.sums.add(measured if at_most is None else map(unweighted, measured))
            seen += rows
        total = self.sums.total(*others)
        if not total:
            why = f"the weights of all {seen} rows add up to 0: there is no mean over them"
            raise UserError(f"{self.prefix}: {why if seen else NO_ROWS}")
        means = self.task.summarize(total)
        return {f"{self.prefix}/{name}": value for name, value in means.items()}

    @torch.no_grad()
    def predictions(
        self, spool: str | Path | None = None, *, after_batch: AfterBatch | None = None
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
        return Predictions(batches, self.name, rows=self.rows)

    def _batches(
        self, after_batch: AfterBatch | None = None, at_most: int | None = None
    ) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
        to_device = self.to_device
        self.step.eval()
        look_at = 0 if at_most else self.stop_poll.begin(0)
        batches = self.loader.batches
        may_look = batches is None or batches >= look_at
        random_state = seeding.random_state() if may_look else {}
        limits = [limit for limit in (self.limit_batches, at_most) if limit is not None]
        limit = min(limits, default=None)
        self.task.run_context.batches = min(filter(None, (batches, limit)), default=None)
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
                look_at = self._look(done, random_state)

    def _look(self, done: int, random_state: dict[str, Any]) -> int:
        try:
            return self.stop_poll.poll(done)[0]
        except Interrupted:  # a resumed run draws all of it again
            seeding.restore_random_state(random_state)
            raise


def means_of(
    evaluations: dict[str, Evaluation],
    *others: Means,
    after_batch: AfterBatch | None = None,
    at_most: int | None = None,
) -> dict[str, float]:
    """The means of each data set, and if there are several, also over the rows of all."""
    first = next(iter(evaluations.values()))
    first.task.begin_pass(first.kind)
    if set(evaluations) == {""}:
        return first.means(*others, after_batch=after_batch, at_most=at_most)
    random_state = seeding.random_state()
    means: dict[str, float] = {}
    with first.task_metrics.apart():
        try:
            for evaluation in evaluations.values():
                means |= evaluation.means(*others, after_batch=after_batch, at_most=at_most)
        except Interrupted:  # a resumed run draws all of it again
            seeding.restore_random_state(random_state)
            raise
        total = pooled([evaluation.sums for evaluation in evaluations.values()])
        over_all = first.task.summarize(total)
        means |= {f"{first.kind}/{name}": value for name, value in over_all.items()}
        return means | first.task_metrics.results(first.kind, means)


@contextmanager
def restore_modes(task: Task) -> Iterator[None]:
    """A module that was in evaluation mode before, e.g. a frozen backbone, is so afterwards."""
    modes = [(module, module.training) for module in task.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
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

    reduce = strategy.collectives.sum if strategy.world_size > 1 else None
    return Means(reduce, agree, is_exact=strategy.logical_shares > 0)
