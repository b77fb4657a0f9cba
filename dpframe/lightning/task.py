"""The task around a LightningModule: its steps, its optimizers and its hooks, in dpframe's loop."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpframe.errors import UserError
from dpframe.lightning.by_hand import ByHand
from dpframe.lightning.checkpoint import kept, of_lightning, own_part, restored
from dpframe.lightning.data import LightningData, prepare
from dpframe.lightning.module import (
    adapt,
    call,
    is_a,
    is_metric,
    own_class,
    owns,
    refuse_uncalled,
)
from dpframe.lightning.numbers import (
    NOTHING,
    Log,
    divide_counts,
    evaluation_outputs,
    find_number,
    note_value,
    training_outputs,
)
from dpframe.lightning.optimizer_step import StepsAgain, StepsByModule, mean_loss
from dpframe.lightning.schedules import Schedule, ScheduledOptimizer, Schedules, read_optimizers
from dpframe.lightning.trainer import Held, TheirTrainer
from dpframe.metrics import is_number
from dpframe.task import Task
from dpframe.trainer.in_place import InPlace
from dpframe.trainer.outputs import Measured
from dpframe.trainer.placement import default_dtype

STAGES = ("validate", "test", "predict")  # modes of dpframe's; else it is "fit"
THEIRS = {"val": "validation", "test": "test", "predict": "predict"}  # in the names of hooks
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
STEP = "step"
KEPT = "lightning"  # what a checkpoint has of it, beside the weights


class Lightning(Task):
    """`module` is trained as Lightning would, on every strategy with the same numbers."""

    prefers_metrics = True
    needs_trainer = True

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
        self.kept_metrics: set[str] = set()
        self._loaded_metrics: dict[str, Any] = {}  # states, until the sanity pass is over
        self._held = Held()
        self.clip_norm: Any = None
        self.clip_value: Any = None
        self._ended: list[tuple[Any, Any, int]] = []  # steps whose update is still to come
        self._is_recomputing = False  # the gradients of a step whose hooks were called
        self._outputs: list[Measured] | None = None  # of the step at hand, for its closure
        self._stage = "fit"
        self._told: set[str] = set()  # what checkpoints can't hold
        self._theirs = TheirTrainer(self)
        module.trainer = self._theirs

    @property
    def trainer_here(self) -> Any:
        return self._held.trainer

    # ---- what the Trainer calls

    def setup(self, trainer: Any) -> None:
        self._held.trainer = trainer
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
        pairs = [self._pair(each) for each in made]
        if len(pairs) == 1:
            return pairs[0]
        return {f"optimizer_{number}": pair for number, pair in enumerate(pairs)}

    def _pair(self, made: ScheduledOptimizer) -> Any:
        optimizer = made.optimizer
        if not self.optimizes_by_hand and owns(self.module, "optimizer_step"):
            closure = inspect.signature(type(optimizer).step).parameters.get("closure")
            needs_it = closure is not None and closure.default is closure.empty
            kind = StepsAgain if needs_it else StepsByModule
            # Errors show the optimizer's own name.
            named: Any = type(type(optimizer).__name__, (kind,), {})
            optimizer = named(optimizer, self)
        if not made.schedules:
            return optimizer
        return optimizer, Schedules(made.schedules, list(self._theirs.lengths.values()))

    def training_step(self, batch: Any) -> dict[str, Any]:
        module, index = self.module, self.run_context.batch_index
        with self.numbers.step() as numbers:
            batch = self._transfer(batch)
            is_new = not self._is_recomputing
            if is_new and call(module.on_train_batch_start, batch, index) == -1:
                raise UserError(
                    f"{type(module).__name__}.on_train_batch_start returned -1, which ends the "
                    "epoch here: the other replicas would not know; set trainer.limit_train_batches"
                )
            if self.optimizes_by_hand:
                self.trainer_here.strategy.collectives.broadcast_tensors(module.buffers())
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
                if index % self.trainer_here.settings.accumulate == 0:
                    module.on_before_zero_grad(self.optimizers[0])
                module.on_before_backward(loss)
        if is_new and owns(module, "on_train_batch_end"):
            outputs = output if isinstance(output, dict) else {"loss": loss.detach()}
            self._ended.append((outputs, batch, index))
        return training_outputs(loss, numbers, output)

    def step_alone(self, batch: Any) -> dict[str, Any]:
        with self.numbers.alone() as numbers:
            output = call(self.module.training_step, self._transfer(batch), 0, 0)
        loss = output["loss"] if isinstance(output, dict) else output
        return training_outputs(loss, numbers, output)

    def validation_step(self, batch: Any, name: str = "") -> dict[str, Any]:
        return self._evaluate("validation", batch, name)

    def test_step(self, batch: Any, name: str = "") -> dict[str, Any]:
        return self._evaluate("test", batch, name)

    def predict_step(self, batch: Any, name: str = "") -> Any:
        module, at = self.module, (self.run_context.batch_index, self._number_of(name))
        batch = self._transfer(batch, at[1])
        call(module.on_predict_batch_start, batch, *at)
        output = call(module.predict_step, batch, *at)
        call(module.on_predict_batch_end, output, batch, *at)
        return output

    def _evaluate(self, stage: str, batch: Any, name: str) -> dict[str, Any]:
        module, at = self.module, (self.run_context.batch_index, self._number_of(name))
        if not owns(module, f"{stage}_{STEP}"):
            raise UserError(f"{type(module).__name__} has no {stage}_{STEP}; write one")
        with self.numbers.step() as numbers:
            batch = self._transfer(batch, at[1])
            call(_hook(module, stage, "batch_start"), batch, *at)
            output = call(getattr(module, f"{stage}_{STEP}"), batch, *at)
            call(_hook(module, stage, "batch_end"), output, batch, *at)
        if not isinstance(output, dict):
            return evaluation_outputs(output, numbers)
        if numbers or "loss" in output:
            return evaluation_outputs(output.get("loss"), numbers)
        return {k: v for k, v in output.items() if is_number(v)} or {NOTHING: 0.0}

    def _transfer(self, batch: Any, number: int = 0) -> Any:
        """Through the hooks that Lightning has around the move to the device, which is done."""
        data = getattr(self.trainer_here.data, "module", None)
        for hook in TRANSFERS:
            is_of_data = data is not None and hook in vars(type(data))
            if is_of_data or owns(self.module, hook):
                args = (self.device,) if hook == "transfer_batch_to_device" else ()
                owner = data if is_of_data else self.module
                batch = getattr(owner, hook)(batch, *args, number)
        return batch

    def _number_of(self, name: str) -> int:
        names = getattr(self.trainer_here.data, "names", [])
        return names.index(name) if name in names else 0

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return divide_counts(means)

    def metric_name(self, kind: str, name: str) -> str:
        return self.numbers.name_of(kind, name.removeprefix("module."))

    def logs_metric(self, kind: str, name: str) -> bool:
        return self.numbers.has_metric(kind, name.removeprefix("module."))

    def begin_pass(self, kind: str) -> None:
        self.numbers.begin_pass(kind)
        if self.optimizes_by_hand and kind == "val":
            self.trainer_here.strategy.collectives.broadcast_tensors(self.module.buffers())
        stage = THEIRS[kind]
        for moment in ("start", "epoch_start"):
            _hook(self.module, stage, moment)()

    def end_pass(self, kind: str, numbers: dict[str, float]) -> dict[str, float]:
        self.known.update(numbers)
        self.numbers.kind = kind
        with self._keeping_metrics():
            if kind == "train":
                self.module.on_train_epoch_end()
            else:
                for moment in ("epoch_end", "end"):
                    _hook(self.module, THEIRS[kind], moment)()
        more = self.numbers.of_pass(self.trainer_here.strategy)
        self.known.update(more)
        self.numbers.kind = "train" if self.trainer_here.mode == "fit" else ""
        return more

    @contextmanager
    def _keeping_metrics(self) -> Iterator[None]:
        """As in Lightning, a metric that only hooks update is reset where it is logged itself, and
        else goes on from pass to pass, e.g. a MaxMetric."""
        metrics = {
            name: part
            for name, part in self.named_modules()
            if is_metric(part) and (name in self.kept_metrics or not part.update_called)
        }
        self.numbers.in_hooks.clear()
        yield
        updated = {name: metric for name, metric in metrics.items() if metric.update_called}
        for name, logged in self.numbers.in_hooks:
            if any(logged is metric for metric in updated.values()):
                self.module.log(name, logged.compute())
                logged.reset()
        if not self._theirs.sanity_checking:
            self.kept_metrics |= {n for n, metric in updated.items() if metric.update_called}

    # ---- hooks of dpframe

    def on_fit_start(self, trainer: Any) -> None:
        if self.optimizes_by_hand:
            tensors = [*self.module.parameters(), *self.module.buffers()]
            trainer.strategy.collectives.broadcast_tensors(tensors)
        if owns(self.module, "backward") and not self.optimizes_by_hand:
            for update in trainer.updates.values():
                update.backward = partial(_backward, self.module, trainer.precision.scaler)
        if owns(self.module, "configure_gradient_clipping"):
            for update in trainer.updates.values():
                update.clip_norm = update.clip_value = None  # it clips
        self.current_epoch = trainer.progress.epoch
        self.numbers.begin_pass("train")
        self._load_metrics()
        self.module.on_fit_start()
        self.module.on_train_start()

    def on_epoch_start(self, trainer: Any) -> None:
        self.current_epoch = trainer.progress.epoch
        self.numbers.begin_pass("train")
        self.module.on_train_epoch_start()

    def on_batch_end(self, trainer: Any, batch: Any, outputs: Any) -> None:
        if not self.optimizes_by_hand:
            rows = [share.rows for share in batch.shares]
            self._outputs = list(zip(rows, outputs, strict=True))
            with self._per_step(trainer):
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
        with self._per_step(trainer):
            module.on_before_optimizer_step(optimizer)
            if owns(module, "configure_gradient_clipping"):
                how = self._theirs.gradient_clip_val, self._theirs.gradient_clip_algorithm
                call(module.configure_gradient_clipping, optimizer, *how)

    def on_step_end(self, trainer: Any) -> None:
        done = trainer.progress.batches_done
        if not self.optimizes_by_hand:
            self._step_schedules("step", done)
        if not self.optimizes_by_hand and done == trainer.feed.batches_in(trainer.epoch):
            self._step_schedules("epoch", self.current_epoch + 1)
        self._is_recomputing = False
        self._end_batches(trainer)

    def _end_batches(self, trainer: Any) -> None:
        ended, self._ended = self._ended, []
        with self._per_step(trainer), self._in_place.watched():
            for output, batch, index in ended:
                call(self.module.on_train_batch_end, output, batch, index)

    def on_epoch_end(self, trainer: Any) -> None:
        self.known.update(trainer.metrics)
        if trainer.progress.batches_done == 0 and not self.optimizes_by_hand:
            is_stream = trainer.feed.batches_per_epoch is None  # whose last batch nobody foresaw
            self._step_schedules("epoch", self.current_epoch + 1, plateaus=True)
            if is_stream:
                self._step_schedules("epoch", self.current_epoch + 1)

    def on_fit_end(self, trainer: Any) -> None:
        self.current_epoch = trainer.progress.epoch
        self.module.on_train_end()
        self.module.on_fit_end()
        self._tear_down(trainer)

    def on_test_end(self, trainer: Any) -> None:
        self._tear_down(trainer)

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        self._tear_down(trainer)

    def on_save(self, trainer: Any, state: dict[str, Any]) -> None:
        own = kept(self.module, own_part(self.module, self._checkpoint(state)), self._told)
        metrics = {n: m for n, m in self.named_modules() if n in self.kept_metrics}
        states = {name: deepcopy(metric.metric_state) for name, metric in metrics.items()}
        state[KEPT] = {"steps": self.by_hand.steps, "own": own, "metrics": states}

    def on_load(self, trainer: Any, state: dict[str, Any]) -> None:
        theirs = state.get(KEPT, {})
        self.by_hand.steps = theirs.get("steps", 0)
        self._loaded_metrics = theirs.get("metrics", {})
        self.current_epoch = trainer.progress.epoch
        theirs = restored(self, self._checkpoint(state), theirs.get("own", {}))
        self.module.on_load_checkpoint(theirs)

    def _load_metrics(self) -> None:
        loaded, self._loaded_metrics = self._loaded_metrics, {}
        there = dict(self.named_modules())
        for name, state in loaded.items() if loaded.keys() <= there.keys() else ():
            metric: Any = there[name]
            for key, value in state.items():
                setattr(metric, key, value)
            metric.to(metric.device)
            self.kept_metrics.add(name)

    def _checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        counts = {"epoch": self.current_epoch, "global_step": self._theirs.global_step}
        return of_lightning(self, state["task"], counts)

    def loss_of_step(self) -> Tensor:
        """The closure that `optimizer_step` gets: the gradients are there already. It returns the
        mean over all rows of the last batch, the same on every rank."""
        outputs, self._outputs = self._outputs, None
        if outputs is None:
            name = type(self.module).__name__
            raise UserError(
                f"{name}.optimizer_step calls its closure again in a step, and {name}'s "
                f"{type(self.optimizers[0]).__name__} takes gradients that are computed once; "
                "set self.automatic_optimization = False in __init__ and step it in training_step"
            )
        return mean_loss(outputs, self.trainer_here.strategy, self.device)

    def _step_schedules(self, interval: str, count: int, *, plateaus: bool = False) -> None:
        """As in Lightning, all but those that wait for a metric come before the validation."""
        for schedule in self.schedules:
            if schedule.reduce_on_plateau != plateaus or not schedule.is_due(interval, count):
                continue
            metric = None
            if schedule.monitor is not None and schedule.reduce_on_plateau:
                metric = find_number(schedule.monitor, {**self.trainer_here.metrics, **self.known})
                if metric is None and schedule.strict:
                    there = ", ".join(self.trainer_here.metrics) or "nothing"
                    raise UserError(
                        f"{type(self.module).__name__}: a scheduler monitors {schedule.monitor}, "
                        f"which is not measured; there is {there}"
                    )
                if metric is None:
                    continue
            self.module.lr_scheduler_step(schedule.scheduler, metric)

    @contextmanager
    def _per_step(self, trainer: Any) -> Iterator[None]:
        """Within, `self.log` logs to this step, as often as the step's own numbers are logged."""

        def log(numbers: dict[str, Any]) -> None:
            if (trainer.progress.global_step + 1) % trainer.settings.log_every == 0:
                trainer.log({f"step/{name}": value for name, value in numbers.items()})

        self.numbers.per_step = log
        try:
            yield
        finally:
            self.numbers.per_step = None

    def _tear_down(self, trainer: Any) -> None:
        if isinstance(trainer.data, LightningData):
            trainer.data.tear_down(self._stage)
        self.module.teardown(self._stage)


def _hook(module: Any, stage: str, moment: str) -> Any:
    return getattr(module, f"on_{stage}_{moment}")


def _backward(module: nn.Module, scaler: Any, loss: Tensor) -> None:
    module.backward(loss if scaler is None else scaler.scale(loss))  # type: ignore[operator]
