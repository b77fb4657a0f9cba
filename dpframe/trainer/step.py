"""A step: from its batches to the gradients of the exact mean over their rows."""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpframe.data import Batch, Share, placed, split
from dpframe.data.pieces import Cut
from dpframe.errors import UserError, refuse_miscalled
from dpframe.launch.watchdog import beat
from dpframe.layers.dropout import begin_in_graph
from dpframe.layers.exact import drops_by_row
from dpframe.parameters import has_sparse
from dpframe.rows import current_share
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.checks.loss_guard import LossGuard
from dpframe.trainer.compute.placement import Autocast
from dpframe.trainer.optim.step import NotFinite, OptimizerStep
from dpframe.trainer.outputs import (
    Measured,
    ZeroGradients,
    ZeroLoss,
    check_evaluated,
    cloned,
    detached,
    exact_weight,
    is_nothing,
    loss_of,
    one_loss,
    refuse_frozen,
)
from dpframe.trainer.progress import Progress
from dpframe.trainer.task_metrics import TaskMetrics


@dataclass(eq=False)
class Step:
    """Computes the gradients of an update's batches, each as the shares of this process."""

    task: Task
    strategy: Strategy
    progress: Progress
    guard: LossGuard
    task_metrics: TaskMetrics
    to_device: Callable[[list[Share]], Any]
    on_batch_start: Sequence[Callable[[Batch], None]]
    on_batch_end: Sequence[Callable[[Batch, list[Any]], None]]
    accumulates: bool
    uses_cuda_graphs: bool
    cut: Cut | None  # None: a share is computed as a whole
    batches: list[Batch] = field(init=False)  # of the step at hand
    update: OptimizerStep = field(init=False)  # whose gradients they are for

    def gradients(self, batches: list[Batch], update: OptimizerStep) -> list[Measured] | None:
        """Computes the gradients of the exact mean over the batches' rows.

        Returns what the steps measured, or None if the step is skipped.
        """
        self.batches, self.update = batches, update
        strategy, progress, context = self.strategy, self.progress, self.task.run_context
        module = strategy.begin_step(update.module)
        if module is not update.module:
            update.use(module)
        if self.uses_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        rows = 0
        for batch in batches:
            rows += batch.rows
        of = rows / strategy.gradient_divisor
        row_weights: list[Any] = []
        all_measured: list[Measured] = []
        for index, batch in enumerate(batches, progress.batches_done):
            context.batch_index = index
            shares = self.to_device(batch.shares)
            for batch_start in self.on_batch_start:
                batch_start(placed(batch, shares))
            pieces = (shares,) if self.cut is None else self.cut.of(shares, batch.rows)
            context.is_cut = len(pieces) > 1
            before = len(all_measured)
            for number, piece in enumerate(pieces, 1):
                if self.accumulates:
                    strategy.grad_sync(batch is batches[-1] and number == len(pieces))
                beat()
                loss, measured = update.forward(piece, of)
                if self.uses_cuda_graphs:  # the next step writes over what this one returned
                    measured = cloned(measured)
                row_weights += update.weighting.of(measured)
                if self.guard.refuses(measured, progress, index):
                    return None
                update.backward(loss)
                all_measured += measured
            for batch_end in self.on_batch_end:
                batch_end(placed(batch, shares), [out for _, out in all_measured[before:]])
        if not all_measured:  # no row of these batches is this process's
            update.fill_gradients()
        strategy.check_gradients()
        if update.scaler is not None:
            update.unscale()
        if update.weighting.is_used:
            update.scale_gradients(update.weighting.factor(rows, row_weights))
        return all_measured

    def recompute(self) -> list[Measured] | None:
        """The gradients of the same batches again, at the weights as they are now."""
        self.update.clear()
        with self.task_metrics.apart():  # they have counted these rows
            measured = self.gradients(self.batches, self.update)
        self.update.is_refused = measured is None  # the step is left out
        return measured

    def _compute_again(self) -> list[Measured]:
        measured = self.recompute()
        if measured is None:
            raise NotFinite
        self.update.check_again()
        return measured

    def closure(self, measured: list[Measured]) -> Callable[[], Tensor]:
        """For an optimizer such as LBFGS. The first call returns the loss of the gradients that
        are computed already, each later one computes both again."""
        known = [measured]
        strategy = self.strategy

        def closure() -> Tensor:
            losses = known.pop() if known else self._compute_again()
            pairs = [(float(o["loss"]), float(o.get("weight", rows))) for rows, o in losses]
            columns = [[loss * weight for loss, weight in pairs], [w for _, w in pairs]]
            total, weight = strategy.sums.of_columns(columns, strategy.collectives.sum_numbers)
            mean = total / weight if weight else math.nan
            return torch.tensor(mean, dtype=torch.float64, device="cpu")

        return closure


class TrainStep(nn.Module):
    """What a strategy wraps: one forward of the task, its loss scaled to its part of the step."""

    def __init__(
        self,
        task: Task,
        autocast: Autocast | None,
        turn: str = "",
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        """`compiled` runs the task's training_step. What scales its loss stays outside: in 64 bits
        and on the CPU, it would keep CUDA graphs from being recorded."""
        super().__init__()
        self.task = task
        self.autocast = autocast
        self.turn = (turn,) if turn else ()
        self.compiled = compiled
        self.has_sparse = has_sparse(task)
        self.begins_dropout = compiled is not None and drops_by_row(task)

    def forward(self, share: Share, of: float) -> tuple[Tensor, list[Measured]]:
        """A share has `rows` of the step's rows; `of` is all rows over the replicas averaged over.

        A replica without a row takes part in every collective of the backward and adds exactly
        nothing. So does a share of weight 0, even if its mean is NaN.
        """
        if not (rows := share.rows):
            # The last weights first, as their gradients come in a backward.
            trained = [p for p in self.task.parameters() if p.requires_grad][::-1]
            return self._no_rows(*trained or refuse_frozen(self.task)), []
        task = self.task
        step = task.training_step
        if self.compiled is not None:
            step = partial(self.compiled, task)
        current_share.of(share, task.run_context, *self.turn or ("",))
        try:
            if self.begins_dropout:
                begin_in_graph(current_share, task.device)
            if self.autocast is None:
                output = step(share.batch, *self.turn)
            else:
                with self.autocast():
                    output = step(share.batch, *self.turn)
            if isinstance(output, dict) and isinstance(output.get("loss"), dict):
                output = one_loss(output, task, "training_step")
        finally:
            current_share.rows, current_share.context = 0, None
        loss = loss_of(output, task)
        is_weighted = "weight" in output
        weight = exact_weight(output["weight"], task) if is_weighted else rows
        if is_weighted and is_nothing(output):
            loss = self._nothing(loss)
        elif is_weighted or rows != of:
            loss = loss * (weight / of)
        return loss, [(rows, detached(output))]

    def _no_rows(self, *weights: Tensor) -> Tensor:
        strategy: Any = self.task.run_context.strategy
        if self.has_sparse or strategy is None or not strategy.wants_all_gradients:
            return self._nothing(*weights)
        return ZeroGradients.apply(*weights)

    def _nothing(self, *tensors: Tensor) -> Tensor:
        loss = ZeroLoss.apply(*tensors)
        return loss + self._sparse_nothing() if self.has_sparse else loss

    def _sparse_nothing(self) -> Any:
        """Sparse gradients without an entry: DDP's all-reduce can't do with a missing one."""
        return sum(
            nn.functional.embedding(
                torch.empty(0, dtype=torch.int64, device=part.weight.device),
                part.weight,
                sparse=True,
            ).sum()
            for part in self.task.modules()
            if getattr(part, "sparse", False) and isinstance(part.weight, Tensor)
        )

    @staticmethod
    def combine(results: list[tuple[Tensor, list[Measured]]]) -> tuple[Tensor, list[Measured]]:
        """Several replicas' results as one: the losses are shares of one mean, so they add up."""
        loss = results[0][0]
        for other, _ in results[1:]:
            loss = loss + other.to(loss.device)
        return loss, [measured for _, part in results for measured in part]


class StepByHand(TrainStep):
    """A training step in which the task steps its optimizers itself: there is no loss to return."""

    def forward(self, share: Share, of: float) -> tuple[Any, list[Measured]]:
        strategy = self.task.run_context.strategy
        if strategy is not None and not len(split(range(share.total), strategy.replicas)[-1]):
            raise UserError(
                f"{self.task.own_class.__name__} steps its optimizers itself, in which each of "
                f"{strategy.replicas} replicas takes part, and a batch of {share.total} rows "
                "leaves one without a row; set data.drop_last=true, or use fewer replicas"
            )
        of_share = current_share.of(share, self.task.run_context, "")
        with of_share, self.autocast() if self.autocast else nullcontext():
            output = self.task.training_step(share.batch)
        return None, [(share.rows, detached(output))]

    @staticmethod
    def combine(results: list[tuple[Any, list[Measured]]]) -> tuple[Any, list[Measured]]:
        return results[0]  # of the only replica of this process


class EvalStep(nn.Module):
    """One forward of `validation_step`, `test_step` or `predict_step`.

    A step with a parameter `name` gets the name of the data set; "" where there is one alone.
    """

    def __init__(
        self, task: Task, step: str, autocast: Autocast | None = None, name: str = ""
    ) -> None:
        super().__init__()
        self.task = task
        if step == "test_step" and not task.has_own(step):
            step = "validation_step"
        self.step = step
        self.autocast = autocast
        takes_name = "name" in inspect.signature(getattr(task, step)).parameters
        self.named = {"name": name} if takes_name else {}
        refuse_miscalled(task, step, "batch", **self.named)

    def forward(self, share: Share) -> list[tuple[int, Any]]:
        if not share.rows:
            return []
        step = getattr(self.task, self.step)
        with current_share.of(share, self.task.run_context):
            with self.autocast() if self.autocast else nullcontext():
                output = step(share.batch, **self.named)
            if self.step != "predict_step":  # whose output is checked where it is joined
                output = one_loss(output, self.task, self.step)
                check_evaluated(output, self.task, self.step)
        return [(share.rows, output)]

    @staticmethod
    def combine(results: list[list[tuple[int, Any]]]) -> list[tuple[int, Any]]:
        return [measured for part in results for measured in part]
