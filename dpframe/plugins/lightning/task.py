"""The task around a LightningModule: its steps, its optimizers and its hooks, in dpframe's loop."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpframe import Task, UserError
from dpframe.plugin import Measured, default_dtype, is_number
from dpframe.plugins.lightning.by_hand import ByHand
from dpframe.plugins.lightning.checkpoint import kept, of_lightning, own_part, restored
from dpframe.plugins.lightning.data import LightningData, number_of, prepare, transfer
from dpframe.plugins.lightning.module import (
    adapt,
    call,
    is_a,
    is_metric,
    own_class,
    owns,
    refuse_uncalled,
)
from dpframe.plugins.lightning.numbers import (
    NOTHING,
    HookMetrics,
    Log,
    divide_counts,
    evaluation_outputs,
    note_value,
    training_outputs,
)
from dpframe.plugins.lightning.optimizer_step import with_schedules
from dpframe.plugins.lightning.passes import THEIRS, Passes, hook_of
from dpframe.plugins.lightning.schedules import Schedule, read_optimizers, step_due
from dpframe.plugins.lightning.trainer import Held, TheirTrainer
from dpframe.trainer.checks.in_place import InPlace

STAGES = ("validate", "test", "predict")  # modes of dpframe's; else it is "fit"
ALONE = {"train": "training", **THEIRS}
STEP = "step"
KEPT = "lightning"  # what a checkpoint has of it, beside the weights


class Lightning(Passes, Task):  # type: ignore[override]
    """`module` is trained as Lightning would, on every strategy with the same numbers."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        if not is_a("LightningModule", module):
            raise UserError(
                f"task.module is a {type(module).__name__}; name a LightningModule: "
                "task.module._target_=my.LitModel"
            )
        adapt(module)
        refuse_uncalled(module)
        self.module = module
        self.own_class = own_class(module)
        self.keeps_state = owns(module, "on_save_checkpoint")
        self.optimizes_by_hand = not module.automatic_optimization
        self.numbers = Log(type(module).__name__)
        self.by_hand = ByHand(self)
        self.optimizers: list[Optimizer] = []
        self.schedules: list[Schedule] = []
        self.known: dict[str, float] = {}  # the newest numbers
        self.current_epoch = 0
        self.hook_metrics = HookMetrics()
        self.kept_metrics = self.hook_metrics.kept
        self.held = Held()
        self.clip_norm: Any = None
        self.clip_value: Any = None
        self._ended: list[tuple[Any, Any, int]] = []  # steps whose update is still to come
        self._is_recomputing = False  # the gradients of a step whose hooks were called
        self.outputs: list[Measured] | None = None  # of the step at hand, for its closure
        self._stage = "fit"
        self._told: set[str] = set()  # what checkpoints can't hold
        self._theirs = TheirTrainer(self)
        module.trainer = self._theirs

    # ---- what the Trainer calls

    def setup(self, trainer: Any) -> None:
        self.held.trainer = trainer
        self._in_place = InPlace(self, trainer.strategy, "on_train_batch_end")
        mode = trainer.run.config.get("mode")
        self._stage = mode if mode in STAGES else "fit"
        self.clip_norm, self.clip_value = trainer.settings.clip_norm, trainer.settings.clip_value
        data = trainer.data
        data = getattr(data, "data", data)  # the kit's have another's first rows
        with self._theirs.setting_up():
            if isinstance(data, LightningData):
                data.connect(self.module, self._theirs, self._stage)
            else:
                prepare(self.module, trainer.strategy.collectives)
                self.module.setup(self._stage)
            with default_dtype(trainer.precision.dtype):
                self.module.configure_model()
        adapt(self.module)  # what these have made
        for metric in filter(is_metric, self.modules()):
            metric.register_forward_hook(note_value)
        self.module.trainer = self._theirs

    def configure_optimizer(self) -> Any:
        label = f"{type(self.module).__name__}.configure_optimizers"
        with self._theirs.setting_up():
            returned = self.module.configure_optimizers()
        made = read_optimizers(returned, label)
        self.optimizers = self._theirs.optimizers = [each.optimizer for each in made]
        self.schedules = [schedule for each in made for schedule in each.schedules]
        self._theirs.lr_scheduler_configs = self.schedules
        if self.optimizes_by_hand:
            self.by_hand.take(self.optimizers)
        elif len(made) > 1:
            raise UserError(
                f"{label} returned {len(made)} optimizers, which takes manual optimization; set "
                "self.automatic_optimization = False in __init__, and step them in training_step"
            )
        pairs = [with_schedules(each, self) for each in made]
        if len(pairs) == 1:
            return pairs[0]
        return {f"optimizer_{number}": pair for number, pair in enumerate(pairs)}

    def training_step(self, batch: Any) -> dict[str, Any]:
        module, index = self.module, self.run_context.batch_index
        with self.numbers.step() as numbers:
            batch = transfer(batch, module, self.held.trainer.data)
            is_new = not self._is_recomputing
            if is_new and call(module.on_train_batch_start, batch, index) == -1:
                raise UserError(
                    f"{type(module).__name__}.on_train_batch_start returned -1, which ends the "
                    "epoch here: the other replicas would not know; set trainer.limit_train_batches"
                )
            if self.optimizes_by_hand:
                self.held.trainer.strategy.collectives.broadcast_tensors(module.buffers())
                self.by_hand.losses.clear()
            output = call(module.training_step, batch, index, 0)
            loss = output.get("loss") if isinstance(output, dict) else output
            if self.optimizes_by_hand:
                if not isinstance(loss, Tensor):
                    loss = numbers.get("loss", sum(self.by_hand.losses, 0.0))
                if not isinstance(loss, Tensor):  # a number, whatever precision the step has
                    loss = torch.tensor(loss, dtype=torch.float32)
                loss = loss.detach()
            elif loss is None:
                raise UserError(
                    f"{type(module).__name__}.training_step returned no loss, which leaves out the "
                    "batch: the other replicas would not know; return a loss, e.g. 0.0 * loss"
                )
            else:
                if index % self.held.trainer.settings.accumulate == 0:
                    module.on_before_zero_grad(self.optimizers[0])
                module.on_before_backward(loss)
        if is_new and owns(module, "on_train_batch_end"):
            outputs = output if isinstance(output, dict) else {"loss": loss.detach()}
            self._ended.append((outputs, batch, index))
        return training_outputs(loss, numbers, output)

    def step_alone(  # type: ignore[override]
        self, task: Any, step: str, batch: Any, name: str = ""
    ) -> dict[str, Any]:
        at = 0, number_of(name, self.held.trainer.data)
        kind = next(kind for kind, theirs in ALONE.items() if step == f"{theirs}_{STEP}")
        with self.numbers.alone(kind) as numbers:
            batch = transfer(batch, self.module, self.held.trainer.data, at[1])
            output = call(getattr(self.module, step), batch, *at)
        if kind != "train":
            return _evaluated(output, numbers)
        loss = output["loss"] if isinstance(output, dict) else output
        return training_outputs(loss, numbers, output)

    def validation_step(self, batch: Any, name: str = "") -> dict[str, Any]:
        return self._evaluate("validation", batch, name)

    def test_step(self, batch: Any, name: str = "") -> dict[str, Any]:
        return self._evaluate("test", batch, name)

    def predict_step(self, batch: Any, name: str = "") -> Any:
        module, data = self.module, self.held.trainer.data
        at = self.run_context.batch_index, number_of(name, data)
        batch = transfer(batch, module, data, at[1])
        call(module.on_predict_batch_start, batch, *at)
        output = call(module.predict_step, batch, *at)
        call(module.on_predict_batch_end, output, batch, *at)
        return output

    def _evaluate(self, stage: str, batch: Any, name: str) -> dict[str, Any]:
        module, data = self.module, self.held.trainer.data
        at = self.run_context.batch_index, number_of(name, data)
        if not owns(module, f"{stage}_{STEP}"):
            raise UserError(f"{type(module).__name__} has no {stage}_{STEP}; write one")
        with self.numbers.step() as numbers:
            batch = transfer(batch, module, data, at[1])
            call(hook_of(module, stage, "batch_start"), batch, *at)
            output = call(getattr(module, f"{stage}_{STEP}"), batch, *at)
            call(hook_of(module, stage, "batch_end"), output, batch, *at)
        return _evaluated(output, numbers)

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return divide_counts(means)

    # ---- hooks of dpframe

    def on_fit_start(self, trainer: Any) -> None:
        if self.optimizes_by_hand:
            tensors = [*self.module.parameters(), *self.module.buffers()]
            trainer.strategy.collectives.broadcast_tensors(tensors)
        if owns(self.module, "backward") and not self.optimizes_by_hand:
            for update in trainer.updates.values():
                update.backward = partial(_backward, self.module, trainer.precision)
        if owns(self.module, "configure_gradient_clipping"):
            for update in trainer.updates.values():
                update.clip_norm = update.clip_value = None  # it clips
        self.current_epoch = trainer.progress.epoch
        self.numbers.begin_pass("train")
        self.hook_metrics.begin(self.named_modules())
        self.module.on_fit_start()
        self.module.on_train_start()

    def on_epoch_start(self, trainer: Any) -> None:
        self.current_epoch = trainer.progress.epoch
        self.numbers.begin_pass("train")
        self.module.on_train_epoch_start()

    def on_batch_end(self, trainer: Any, batch: Any, outputs: Any) -> None:
        if not self.optimizes_by_hand:
            rows = [share.rows for share in batch.shares]
            self.outputs = list(zip(rows, outputs, strict=True))
            with self.numbers.hooks_of_step(trainer):
                self.module.on_after_backward()
            is_last = self.run_context.batch_index + 1 == trainer.progress.batches_done + len(
                trainer.batches
            )
            if not is_last:
                self._end_batches(trainer)

    def on_before_step(self, trainer: Any) -> None:
        if self.optimizes_by_hand:
            return
        module, [optimizer] = self.module, self.optimizers
        self._is_recomputing = True  # from now on, for an optimizer that needs a closure
        with self.numbers.hooks_of_step(trainer):
            module.on_before_optimizer_step(optimizer)
            if owns(module, "configure_gradient_clipping"):
                how = self._theirs.gradient_clip_val, self._theirs.gradient_clip_algorithm
                call(module.configure_gradient_clipping, optimizer, *how)

    def on_step_end(self, trainer: Any) -> None:
        done = trainer.progress.batches_done
        if not self.optimizes_by_hand:
            step_due(self, "step", done)
        if not self.optimizes_by_hand and done == trainer.feed.batches_in(trainer.epoch):
            step_due(self, "epoch", self.current_epoch + 1)
        self._is_recomputing = False
        self._end_batches(trainer)

    def _end_batches(self, trainer: Any) -> None:
        ended, self._ended = self._ended, []
        with self.numbers.hooks_of_step(trainer), self._in_place.watched():
            for output, batch, index in ended:
                call(self.module.on_train_batch_end, output, batch, index)

    def on_epoch_end(self, trainer: Any) -> None:
        self.known.update(trainer.metrics)
        if trainer.progress.batches_done == 0 and not self.optimizes_by_hand:
            is_stream = trainer.feed.batches_per_epoch is None  # whose last batch nobody foresaw
            step_due(self, "epoch", self.current_epoch + 1, plateaus=True)
            if is_stream:
                step_due(self, "epoch", self.current_epoch + 1)

    def on_fit_end(self, trainer: Any) -> None:
        self.current_epoch = trainer.progress.epoch
        self.module.on_train_end()
        self.module.on_fit_end()
        _tear_down(trainer.data, self.module, self._stage)

    def on_test_end(self, trainer: Any) -> None:
        _tear_down(trainer.data, self.module, self._stage)

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        _tear_down(trainer.data, self.module, self._stage)

    def on_save(self, trainer: Any, state: dict[str, Any]) -> None:
        theirs = of_lightning(self, state["task"])
        own = kept(self.module, own_part(self.module, theirs), self._told)
        metrics = self.hook_metrics.state_dict(self.named_modules())
        state[KEPT] = {"steps": self.by_hand.steps, "own": own, "metrics": metrics}

    def on_load(self, trainer: Any, state: dict[str, Any]) -> None:
        theirs = state.get(KEPT, {})
        self.by_hand.steps = theirs.get("steps", 0)
        self.hook_metrics.load_state_dict(theirs.get("metrics", {}))
        self.current_epoch = trainer.progress.epoch
        theirs = restored(self, of_lightning(self, state["task"]), theirs.get("own", {}))
        self.module.on_load_checkpoint(theirs)


def _evaluated(output: Any, numbers: Any) -> dict[str, Any]:
    """What a step of a validation or a test has measured: has returned, or logged as `numbers`."""
    if not isinstance(output, dict):
        return evaluation_outputs(output, numbers)
    if numbers or "loss" in output:
        return evaluation_outputs(output.get("loss"), numbers)
    return {k: v for k, v in output.items() if is_number(v)} or {NOTHING: 0.0}


def _tear_down(data: Any, module: Any, stage: str) -> None:
    if isinstance(data, LightningData):
        data.tear_down(stage)
    module.teardown(stage)


def _backward(module: nn.Module, precision: Any, loss: Tensor) -> None:
    scaler = precision.scaler
    with default_dtype(precision.dtype):
        module.backward(loss if scaler is None else scaler.scale(loss))  # type: ignore[operator]
