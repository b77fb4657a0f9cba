"""The loop: `fit` -> `_train_epoch` -> `_train_step` -> the task. The rest is built before it."""

import atexit
import json
import logging
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Self

from dpframe import lean, seeding
from dpframe.callbacks.base import Callback, hooks_of
from dpframe.data import Batch, DataModule, Loader
from dpframe.errors import UserError
from dpframe.heartbeat import beat, beats
from dpframe.interruption import Interruption
from dpframe.loggers import Logger
from dpframe.metrics import Means
from dpframe.strategies.auto import auto
from dpframe.strategies.base import Strategy
from dpframe.task import Measured, Task, TrainStep, refuse_stateful_metrics
from dpframe.trainer import ahead, feed, fingerprint, graphs, layout, state
from dpframe.trainer.evaluation import Evaluation, means_over
from dpframe.trainer.lookout import Lookout
from dpframe.trainer.nonfinite import LossGuard
from dpframe.trainer.precision import Precision
from dpframe.trainer.predictions import Predictions
from dpframe.trainer.profile import Profile
from dpframe.trainer.report import Report, Run
from dpframe.trainer.settings import TrainerSettings
from dpframe.trainer.update import Update

log = logging.getLogger("dpframe")


class Trainer:
    """Trains a task on data where the strategy says. `metrics` holds the newest of each name."""

    train_dataset: Any  # all of these once `prepare` has run
    train_loader: Loader
    has_validation: bool
    validation: Evaluation
    batches_per_epoch: int | None  # None: a stream's, which nobody knows
    steps_per_epoch: int  # 0 where that is unknown
    total_steps: int
    _look_at: int
    _owns_strategy: bool

    def __init__(
        self,
        task: Task,
        data: DataModule,
        *,
        strategy: Strategy | None = None,
        settings: TrainerSettings | None = None,
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Logger] = (),
        seed: int = 0,
        run: Run | None = None,
        interruption: Interruption | None = None,
    ) -> None:
        self.task = task
        self.data = data
        self.settings = settings or TrainerSettings()
        self.strategy = self._opened(strategy)
        self.callbacks = sorted(callbacks, key=lambda callback: callback.runs_last)
        self.seed = seed
        self.run = run or Run()
        self.interruption = interruption  # by signals; None: they are not ours
        self.lookout = Lookout(self.strategy, interruption)
        self.mode = ""  # fit, validate, test or predict, once one of them runs
        self.report = Report(self.strategy.logger(list(loggers)), self.run)
        self.global_step = 0  # optimiser updates
        self.epoch = 0  # whole epochs done
        self.batches_done = 0  # of the epoch at hand
        self.rows_seen = 0
        self.skipped_steps = 0  # left out by trainer.on_nonfinite=skip
        self.seconds = 0.0
        self.data_seconds = 0.0  # of these, waiting for training data
        self.metrics: dict[str, float] = {}
        self.validated_step = -1  # whose val/ numbers `metrics` holds
        self.is_extra_validation = False  # at the end of training: a longer run does not make it
        self.ended_step = 0  # the last one of an epoch, or of training, that is wholly done
        self.clock = 0.0  # seconds of training as of the last look: the same in all processes
        self.checkpoint: str | None = None
        self.should_stop = False
        self.stop_reason = ""
        self._logged_at, self._logged_rows = 0.0, 0
        self._set_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the strategy if this Trainer has set it up; else its owner does."""
        if self._owns_strategy:
            self._owns_strategy = False
            atexit.unregister(self.strategy.shut)
            self.strategy.shut()

    # ---- the four modes

    def fit(
        self, resume: dict[str, Any] | None = None, *, resume_anyway: bool = False
    ) -> dict[str, float]:
        """Goes on with the checkpoint `resume`; `anyway`: even if it can't go on exactly."""
        self._refuse_closed()
        if self.mode != "fit":
            self.prepare(resume, resume_anyway=resume_anyway)
        self._begin()
        try:
            self._call("on_fit_start")
            if self._resumed is not None:
                self._catch_up()
            while not self.should_stop:
                self._train_epoch()
            self.strategy.weight_sync(is_read=True)
            if self.profile is not None:
                self.profile.tell(self)
            self._call("on_fit_end")
        except BaseException as error:
            layout.explain(error, self.layout)
            self.report.close(self.metrics, succeeded=False)
            self._call("on_exception", error)
            raise
        self.report.close(self.metrics, succeeded=True)
        return self.metrics

    def validate(self) -> dict[str, float]:
        self._refuse_closed()
        self.mode = "validate"
        self.metrics.update(feed.evaluation(self, "val", "validation_step").means_of("val"))
        self._call("on_validation_end")
        return self.metrics

    def test(self) -> dict[str, float]:
        self._refuse_closed()
        self.mode = "test"
        self.metrics.update(feed.evaluation(self, "test", "test_step").means_of("test"))
        self._call("on_test_end")
        return self.metrics

    def predict(self) -> Predictions | None:
        self._refuse_closed()
        self.mode = "predict"
        predictions = feed.evaluation(self, "predict", "predict_step").predictions()
        if predictions is not None:
            self._call("on_predict_end", predictions)
        return predictions

    def stop(self, reason: str) -> None:
        """Ends training after this step; every process has to come to the same decision."""
        self.should_stop = True
        self.stop_reason = reason

    # ---- the heart

    def _train_epoch(self) -> None:
        if self.batches_done == 0:  # so what is saved between epochs needs no random state
            seeding.reseed(seeding.mix(self.seed, self.strategy.rank, self.epoch))
        if not (self.step.training and self.task.training):
            lean.set_training(self.step, True, self.settings.lean)
        self._call("on_epoch_start")
        for batches in self._steps():
            self._train_step(batches)
            if self.global_step % self._log_every == 0:
                self._log_step()
            for hook in self.hooks["on_step_end"]:
                hook(self)
            if self._validates_steps and self.global_step % self._validates_steps == 0:
                self._validate()
            if self.should_stop or self.global_step == self.settings.max_steps:
                self.should_stop = True
                break
            if self.global_step >= self._look_at and self._look():
                break
        self._end_epoch()

    def _train_step(self, batches: list[Batch]) -> None:
        """One optimiser update, from `trainer.accumulate` global batches."""
        strategy = self.strategy
        rows = 0
        for batch in batches:
            rows += batch.rows
        of = rows / strategy.averaged_over
        weights: list[Any] = []
        all_measured: list[Measured] = []
        for index, batch in enumerate(batches, self.batches_done):
            if self._accumulates:
                strategy.grad_sync(batch is batches[-1])
            beats.count += 1
            loss, measured = self.step(self.to_device(batch.shares), of)
            for here, output in measured:
                if ("weight" in output) is not self.update.is_weighted:
                    self.update.agree_on_weights(measured)
                if self.update.is_weighted:
                    weights.append(output["weight"] if here else 0.0)
            if self.guard.refuses(self, measured, index):
                self.update.skip()
                self.skipped_steps += 1
                break
            self.update.backward(loss)
            all_measured += measured
        else:
            strategy.check_gradients()
            self.means.add(all_measured)
            wants_norm = (self.global_step + 1) % self._log_every == 0
            self.update.step(rows, weights, wants_norm=wants_norm)
        if self._syncs_weights:
            strategy.weight_sync(is_read=False)
        self.global_step += 1
        self.batches_done += len(batches)
        self.rows_seen += rows

    def _steps(self) -> Iterator[list[Batch]]:
        """The rest of the epoch's batches, as many at a time as make one optimiser update."""
        limit = self.settings.limit_train_batches
        batches = self.read(self.epoch, skip=self.batches_done, limit=limit)
        clock = time.perf_counter
        asked = clock()
        while step := list(islice(batches, self.settings.accumulate)):
            self.data_seconds += clock() - asked
            yield step
            asked = clock()
        if self.batches_done == 0:
            raise UserError(f"{type(self.data).__name__}.train_dataset() gave no rows")

    # ---- the ends of steps and epochs

    def _log_step(self) -> None:
        self.guard.read(self)
        window = self.means.window()  # waits for the GPU; empty if all its steps were left out
        means = self.task.summarize(window) if window else {}
        now = time.perf_counter()
        rate = (self.rows_seen - self._logged_rows) / (now - self._logged_at)
        self._logged_at, self._logged_rows = now, self.rows_seen
        norm, lr = float(self.update.grad_norm), self.update.learning_rate
        scalars = {**means, "lr": lr, "grad_norm": norm, "samples_per_second": rate}
        self.report.log({f"step/{k}": v for k, v in scalars.items()}, step=self.global_step)

    def _end_epoch(self) -> None:
        """Changes nothing before the validation is over: a run that ends in it validates again."""
        self.guard.read(self)
        learning_rate = self.update.learning_rate
        is_whole = not self.should_stop or self.batches_done == self.batches_per_epoch
        if self.lookout.done != self.global_step:
            self._look()
        epochs = self.epoch + is_whole
        is_last = self.should_stop or self.settings.are_done(epochs, self.global_step)
        is_due = is_whole and epochs % self.settings.validate_every_epochs == 0
        every = self._validates_steps
        self.is_extra_validation = not (is_due or (every and self.global_step % every == 0))
        validated: dict[str, float] = {}
        if self.has_validation and (is_last or is_due):
            drawn = None if is_whole else seeding.random_state()
            validated = self._measure_validation(self.means)
            if drawn is not None:  # a run that goes on from here draws as if it had not ended
                seeding.restore_random_state(drawn)
        total = self.means.total()
        means = self.task.summarize(total) if total else {}
        measured = {f"train/{name}": value for name, value in means.items()}
        if not total:  # every step was left out: the epoch before is not to stand in for this one
            self.metrics = {k: v for k, v in self.metrics.items() if not k.startswith("train/")}
        self.metrics.update(measured | validated)
        if is_whole:
            self.epoch = epochs
            self.batches_done = 0
            self.means.reset()
        self.should_stop = is_last
        if validated:
            self._call("on_validation_end")
        if is_whole:
            is_stale = self.has_validation and self.is_extra_validation
            self.update.end_epoch(self.metrics, is_stale=is_stale)
        measured |= validated | {"progress/lr": learning_rate, "progress/epoch": float(self.epoch)}
        self.report.log(measured, step=self.global_step)
        self._read_clock()
        self.ended_step = self.global_step
        self._call("on_epoch_end")
        self.report.tend()

    def _validate(self) -> None:
        self.guard.read(self)
        self.is_extra_validation = False
        means = self._measure_validation()
        if means:
            self.metrics.update(means)
            self.report.log(means, step=self.global_step)
            self._call("on_validation_end")

    def _measure_validation(self, *others: Means) -> dict[str, float]:
        """The new numbers; none where this very step was validated before."""
        if self.validated_step == self.global_step:
            return {}
        self.strategy.weight_sync(is_read=True)
        means = self.validation.means_of("val", *others)
        lean.set_training(self.step, True, self.settings.lean)
        self.validated_step = self.global_step
        return means

    def _catch_up(self) -> None:
        """What was still to come after the step of the checkpoint that this run goes on from."""
        if self._validates_steps and self.global_step % self._validates_steps == 0:
            self._validate()
        if self.should_stop and self.ended_step != self.global_step:
            self._end_epoch()

    def _look(self) -> bool:
        """A few times a second, and at an epoch's end, at the clock and for signals: is it over?"""
        self._look_at, self.clock = self.lookout.look(self.global_step)
        limit = self.settings.max_seconds
        if limit is not None and self.clock > limit:
            self.stop(f"trainer.max_seconds={limit:g} are over")
        self.report.tend()
        return self.should_stop

    def _read_clock(self) -> None:
        self.seconds = self._seconds_before + time.perf_counter() - self._began

    # ---- set up, once

    def _opened(self, strategy: Strategy | None) -> Strategy:
        """Set up, for all the modes and until `close`, or else the program's end."""
        settings = self.settings
        if strategy is None:
            strategy = auto(settings.gpus, settings.accelerator, settings.max_replicas_per_core)
        elif not strategy.is_set_up:
            _refuse_other_devices(strategy, settings)
        self._owns_strategy = strategy.open()
        if self._owns_strategy:
            atexit.register(strategy.shut)
        return strategy

    def _refuse_closed(self) -> None:
        if not self.strategy.is_set_up:
            raise UserError(
                f"{self.strategy.name} is closed, by Trainer.close() or the end of a with block; "
                "call this before, or make another Trainer"
            )

    def _set_up(self) -> None:
        if self.settings.deterministic:
            seeding.refuse_nondeterminism(self.strategy.device)
        refuse_stateful_metrics(self.task, self.strategy.replicas, self.strategy.name)
        self.precision = Precision(self.settings.precision, self.strategy.device)
        self.strategy.dtype = self.precision.dtype
        self.layout = layout.place(self)
        beat()
        self.data.setup()
        beat()
        self.hooks = hooks_of(self.callbacks)

    def prepare(self, resume: dict[str, Any] | None = None, *, resume_anyway: bool = False) -> None:
        """What `fit` begins with, and may refuse: nothing is written, no hook called."""
        self.mode = "fit"
        self._resumed = resume
        settings = self.settings
        if settings.on_nonfinite == "skip":
            self.strategy.check_skips(settings.accumulate)
        feed.set_up(self)
        self.read, self.to_device = ahead.reader(self.train_loader, self.strategy)
        self.update = Update(self.task, self.strategy, settings, self.precision.scaler())
        step = TrainStep(self.task, self.precision.autocast)
        if settings.compile:
            step.compile()
        with lean.no_dynamo_in_ddp(settings.lean and not settings.compile):
            self.step = self.strategy.wrap(step, training=True)
        self.means = means_over(self.strategy)
        self._accumulates = settings.accumulate > 1
        self._syncs_weights = type(self.strategy).weight_sync is not Strategy.weight_sync
        self._log_every = settings.log_every
        self._validates_steps = settings.validate_every_steps if self.has_validation else None
        self.guard = LossGuard(self.strategy, settings.on_nonfinite)
        self.fingerprint = json.dumps(fingerprint.of(self))
        graphs.check(self)
        if resume is not None:
            self._changes = state.restore(self, resume, anyway=resume_anyway)
        self.should_stop = settings.are_done(self.epoch, self.global_step)

    def _begin(self) -> None:
        loggers = [guarded.logger for guarded in self.report.loggers]
        parts: list[Callback | Logger] = [*self.callbacks, *loggers]
        for part in parts:
            if part.needs_directory and not self.run.directory:
                raise UserError(
                    f"{type(part).__name__} writes files, and nothing says where; give the Trainer "
                    "run=Run(directory=…)"
                )
        if self._resumed is not None:
            state.reopen(self, self._resumed, self._changes)
        else:
            self.report.open(self.strategy)
            feed.draw_graph(self)
            # From here on every process draws its own random numbers, for dropout say.
            seeding.seed_everything(seeding.mix(self.seed, self.strategy.rank))
        if self.settings.compile and self.strategy.is_main:
            log.info("trainer.compile=true: the first step compiles, which may take minutes")
        self._seconds_before = self.seconds
        self._began = self._logged_at = time.perf_counter()
        self._logged_rows = self.rows_seen
        self._look_at = self.lookout.begin(self.global_step)
        self.profile = Profile(self) if self.settings.profile else None
        graphs.set_up(self)

    # ---- hooks

    def _call(self, name: str, *args: Any) -> None:
        for hook in self.hooks[name]:
            beat()
            hook(self, *args)

    def state_dict(self) -> dict[str, Any]:
        """All that decides the rest of training; every process calls it, the main one keeps it."""
        self.guard.read(self)
        self._read_clock()
        self.strategy.weight_sync(is_read=True)
        return state.of(self)


def _refuse_other_devices(strategy: Strategy, settings: TrainerSettings) -> None:
    """The command's configs say it once; in Python each is said where it is made."""
    for key, unset in (("gpus", None), ("accelerator", "auto")):
        there, here = getattr(strategy, key, unset), getattr(settings, key)
        if here not in (unset, there):
            raise UserError(
                f"TrainerSettings({key}={here!r}) but the strategy is {strategy.name}({key}="
                f"{there!r}); give {key} to the strategy alone"
            )
