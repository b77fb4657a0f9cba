"""The loop: `fit` -> `_train_epoch` -> `gradients` -> the task. `prepare` builds all it needs."""

import atexit
import inspect
import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import torch

from dpframe import checkpoint, memory, seeding
from dpframe.data import Batch, DataModule, Loader, placed
from dpframe.data.prefetch import prefetched
from dpframe.errors import UserError, refuse_unmeasured, suggestion
from dpframe.launch import fresh, signals
from dpframe.launch.signals import Interruption
from dpframe.launch.watchdog import beat
from dpframe.loggers import Logger
from dpframe.metrics import Means, numbers_of
from dpframe.strategies.base import Strategy
from dpframe.strategies.logical import Logical
from dpframe.strategies.single import auto
from dpframe.task import Task, TaskContext
from dpframe.trainer import given
from dpframe.trainer.activations import drop_activations
from dpframe.trainer.callback import Callback
from dpframe.trainer.compiled import Compiled
from dpframe.trainer.evaluation import (
    Evaluation,
    Predictions,
    means_of,
    means_over,
    on_cpu,
    restore_modes,
)
from dpframe.trainer.feed import Feed, evaluated, local_devices
from dpframe.trainer.guard import LossGuard
from dpframe.trainer.hooks import Hooks, in_order
from dpframe.trainer.outputs import Measured, cloned, prefixed
from dpframe.trainer.placement import Precision, explain, place
from dpframe.trainer.profile import Profile
from dpframe.trainer.progress import Progress, StopPoll
from dpframe.trainer.rates import ScaledRates
from dpframe.trainer.report import Report, Run
from dpframe.trainer.resume import Start, changes_since, fingerprint, named, refusing, start_state
from dpframe.trainer.settings import CUDA_GRAPH_MODES, TrainerSettings
from dpframe.trainer.step import StepByHand, TrainStep
from dpframe.trainer.task_metrics import TaskMetrics
from dpframe.trainer.update import ByHand, Update, each_of, states_of, updates_of

log = logging.getLogger("dpframe")
DOING = {"validate": "validation", "test": "test", "predict": "prediction"}  # by the mode


class Trainer:
    """Trains a task on data by a strategy. `metrics` has the newest value of each name.

    TrainerSettings may be given as `settings`, or one by one: `Trainer(task, data, max_epochs=3)`.
    """

    feed: Feed  # this and the following are set by `prepare`
    updates: dict[str, Update]  # by the optimizers' names; one alone has the name ""
    update: Update  # the one whose turn it is
    batches: list[Batch]  # of the step at hand
    validation: dict[str, Evaluation]  # by the data set's name; empty without validation
    profile: Profile | None = None
    _devices: list[torch.device]  # of this process
    _owns_strategy = False
    _look_at: int
    _logged_at: float
    _logged_rows: int

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
        **more: Any,
    ) -> None:
        callbacks, loggers = list(callbacks), list(loggers)
        given.check(task, data, strategy, settings, callbacks, loggers)
        self.task = task
        self.data = data
        self.settings = settings or TrainerSettings()
        if more:
            self.settings = _changed(self.settings, more)
        self.seed = seed
        self.callbacks = in_order(callbacks)
        self.run = run or Run()
        self.interruption = interruption  # by signals; None: the program handles them itself
        self.mode = ""  # fit, validate, test or predict, once one of them runs
        self._is_validating = False  # within a fit
        self.has_begun = False  # training
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        self.step_metrics: dict[str, float] = {}  # step/…: means of this epoch's newest updates
        self.is_extra_validation = False  # at the end of training: a longer run would not make it
        self.clock = 0.0  # seconds of training at the last look: the same in all processes
        self.checkpoint: str | None = None
        self.should_stop = False
        self.stop_reason = ""
        self.strategy = self._chosen(strategy)
        self._given: dict[str, list[Any]] = {"callbacks": callbacks, "loggers": loggers}
        self._launches = self.strategy.needs_launch
        if self._launches:  # each rank makes its own Trainer, and draws as this process would
            self._random_state = seeding.random_state([])
            return
        self._owns_strategy = self.strategy.open()
        self._shut = self.strategy.shut
        if self._owns_strategy:
            atexit.register(self._shut)
        if self.settings.logical_replicas is not None:
            self.strategy = Logical(self.strategy, self.settings.logical_replicas, seed)
        self._draws_as = 0 if self.strategy.logical_shares else self.strategy.rank
        self.stop_poll = StopPoll(self.strategy, interruption)
        self.report = Report(self.strategy.logger(loggers), self.run)
        self._write = self.report.log
        is_logical = self.strategy.logical_shares and self.strategy.device.type != "cpu"
        if self.settings.deterministic or is_logical:
            seeding.refuse_nondeterminism(self.strategy.device)
        self.precision = Precision(
            self.settings.precision,
            self.strategy.device,
            cuts_weights=self.strategy.sharding is not None,
        )
        self.strategy.dtype = self.precision.dtype
        task.setup(self)
        self.layout = place(task, self.strategy, self.precision, self.settings)
        self.task_metrics = TaskMetrics(task, self.strategy)
        beat()
        data.setup()
        beat()
        is_compiled = self.settings.compile_mode is not None
        task.run_context = TaskContext(self.progress, self.strategy, is_compiled=is_compiled)
        task.run_context.end_share = self.task_metrics.end_share
        self.hooks = Hooks(task, self.callbacks, self.strategy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Closes the strategy if this Trainer has set it up; after an error without waiting for
        other processes."""
        if self._owns_strategy:
            self._owns_strategy = False
            atexit.unregister(self._shut)
            self._shut(error)

    # ---- the four modes

    def fit(
        self, resume: Start = None, *, resume_anyway: bool = False, is_tested: bool = False
    ) -> dict[str, float]:
        """Trains. `resume` is a checkpoint's file, its state, or "last" for the newest one in the
        run directory; `resume_anyway` accepts one of a run with another config or code.
        `is_tested` keeps the loggers open for a `test` that follows."""
        if self._launches:
            return self._launched("fit", resume, resume_anyway=resume_anyway)
        self._refuse_closed()
        if self.mode != "fit" or resume is not None:
            # Training changes what it has loaded: the caller's state stays as it is.
            own = deepcopy(resume) if isinstance(resume, dict) else resume
            self.prepare(own, resume_anyway=resume_anyway)
        self._begin()
        try:
            self.hooks.call("on_fit_start", self)
            if self._resumed is not None:
                self._catch_up()
            while not self.should_stop:
                self._train_epoch()
            self.strategy.sync_weights(for_reading=True)
            if self.profile is not None:
                self._tell(self.profile)
            self.hooks.call("on_fit_end", self)
        except BaseException as error:
            explain(error, self.layout)
            self._end_by(error)
            raise
        if is_tested:
            self.report.flush()
        else:
            self.report.close(self.metrics, succeeded=True)
        return self.metrics

    def validate(self) -> dict[str, float]:
        """Measures the validation sets; returns `metrics`, e.g. {"val/loss": 0.5}."""
        if self._launches:
            return self._launched("validate")
        self._refuse_closed()
        self.mode = "validate"
        with restore_modes(self.task):
            self.validation = self._evaluations("val")
            self.hooks.call("on_validation_start", self)
            after_batch = self.hooks.after_batch("on_validation_batch_end", self)
            means = means_of(self.validation, after_batch=after_batch)
            self.metrics.update(means)
            self.hooks.call("on_validation_end", self)
        self.report.close(self.metrics, succeeded=True)
        return self.metrics

    def test(self) -> dict[str, float]:
        """Measures the test sets; returns `metrics`, e.g. {"test/loss": 0.5}."""
        if self._launches:
            return self._launched("test")
        self._refuse_closed()
        self.mode = "test"
        with restore_modes(self.task):
            evaluations = self._evaluations("test")
            self.hooks.call("on_test_start", self)
            after_batch = self.hooks.after_batch("on_test_batch_end", self)
            self.metrics.update(means_of(evaluations, after_batch=after_batch))
            self.hooks.call("on_test_end", self)
        self.report.close(self.metrics, succeeded=True)
        return self.metrics

    def predict(self, *, spool: str | Path | None = None) -> Any:
        """Returns Predictions, or several by the names of the data sets; None on all processes but
        the main one. Large predictions are kept on disk, in the directory `spool`, if it is set."""
        if self._launches:
            return self._launched("predict")
        self._refuse_closed()
        self.mode = "predict"
        by_name: dict[str, Predictions] = {}
        after_batch = self.hooks.after_batch("on_predict_batch_end", self)
        with restore_modes(self.task):
            evaluations = self._evaluations("predict")
            self.hooks.call("on_predict_start", self)
            self.task.begin_pass("predict")
            for name, evaluation in evaluations.items():
                predictions = evaluation.predictions(spool, after_batch=after_batch)
                if predictions is not None:
                    by_name[name] = predictions
                self.hooks.call_on_main("on_predict_end", self, predictions)
            self.task.end_pass("predict", {})
        self.report.close(self.metrics, succeeded=True)
        return by_name.get("", by_name or None)

    # ---- progress

    @property
    def global_step(self) -> int:
        return self.progress.global_step

    @property
    def epoch(self) -> int:
        return self.progress.epoch

    @property
    def steps_per_epoch(self) -> int:
        """0 where the length of a stream is unknown."""
        return self.feed.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """0 where it is unknown."""
        return self.feed.total_steps

    @property
    def doing(self) -> str:
        """The current phase in a word, for errors."""
        if self.mode in DOING:
            return DOING[self.mode]
        if self._is_validating:
            return DOING["validate"]
        return "training" if self.has_begun else "set-up"

    def peak_memory(self) -> list[int] | None:
        """The peak memory of tensors on each of `strategy.devices` in bytes, on the main process;
        None on the CPU. Every process has to call it."""
        here = [memory.peak(device) for device in local_devices(self.strategy)]
        if None in here:
            return None
        return list(chain.from_iterable(self.strategy.collectives.gather(here)))

    def stop(self, reason: str) -> None:
        """Ends training after this step; every process has to call it at the same step."""
        self.should_stop = True
        self.stop_reason = reason

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Adds numbers to `metrics` and to this step's row of every logger, e.g. {"val/f1": 0.5}.

        For the hooks of callbacks and tasks. Every process has to call it with the same numbers:
        others are refused when a validation or an epoch ends.
        """
        numbers = numbers_of(scalars)
        if self.hooks.log_check is not None:
            self.hooks.log_check.add(numbers)
        self.metrics.update(numbers)
        if self.report.is_open:
            self._log(numbers)

    # ---- media, for the loggers that show them; on processes but the main one nothing happens

    @property
    def loggers(self) -> list[Logger]:
        """The loggers of this process: only the main one has any."""
        return self.report.loggers

    def log_image(self, name: str, image: Any) -> None:
        """[H, W], [C, H, W], or [N, C, H, W] as a grid; floats from 0 to 1, or uint8."""
        self._show("image", name, image)

    def log_figure(self, name: str, figure: Any) -> None:
        """A figure of matplotlib's, which is closed."""
        self._show("figure", name, figure)

    def log_histogram(self, name: str, values: Any) -> None:
        """A histogram of the finite values of a tensor or an array of any shape."""
        self._show("histogram", name, values)

    def log_text(self, name: str, text: str) -> None:
        """TensorBoard takes it as markdown."""
        self._show("text", name, text)

    def log_audio(self, name: str, samples: Any, sample_rate: int) -> None:
        """[samples] or [channels, samples]; floats from -1 to 1, or int16."""
        self._show("audio", name, samples, sample_rate)

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Rows of numbers and texts."""
        self._show("table", name, columns, rows)

    def log_pr_curve(self, name: str, labels: Any, scores: Any, weights: Any = None) -> None:
        """Precision over recall: `labels` are 0 or 1, `scores` from 0 to 1, `weights` how often
        each counts."""
        self._show("pr_curve", name, labels, scores, weights)

    def _show(self, form: str, name: str, *values: Any) -> None:
        if self.mode != "fit" and not self.report.is_open:  # fit has opened it
            self._refuse_nowhere(self.loggers)
            self.report.open(self.strategy)
        self.report.show(form, name, *values, step=self.global_step)

    # ---- the heart

    def _train_epoch(self) -> None:
        strategy, progress = self.strategy, self.progress
        # Each process draws its own, e.g. for dropout. Between epochs there is nothing to save.
        if progress.batches_done == 0:
            seed = seeding.mix(self.seed, self._draws_as, progress.epoch)
            seeding.reseed(seed, self._devices)
        if not self.task.training:
            self.task.train()
        self.hooks.call("on_epoch_start", self)
        for batches in self._steps():
            self.batches = batches
            is_logged = (progress.global_step + 1) % self._log_every == 0
            for update in self._only or self._taking_turns():
                measured = self.gradients(batches, update)
                if measured is None:  # the loss was not finite
                    update.skip()
                    progress.skipped_steps += 1
                    continue
                self.means.add(prefixed(measured, update.name) if update.name else measured)
                for before_step in self.hooks["on_before_step"]:
                    before_step(self)
                closure = self._closure(measured) if update.needs_closure else None
                update.step(closure, wants_norm=is_logged)
            strategy.sync_weights(for_reading=False)
            progress.global_step = step = progress.global_step + 1
            progress.batches_done += len(batches)
            for batch in batches:
                progress.rows_seen += batch.rows
            if is_logged:
                self._log_step()
            for hook in self.hooks["on_step_end"]:
                hook(self)
            if self._validates_within and self._is_validation_due():
                self._validate()
            if self.should_stop or step == self.settings.max_steps:
                self.should_stop = True
                break
            if step >= self._look_at and self._look():
                break
        self._end_epoch()

    def gradients(self, batches: list[Batch], update: Update) -> list[Measured] | None:
        """Computes the gradients of the exact mean over the batches' rows.

        Returns what the steps measured, or None if the step is skipped.
        """
        strategy, progress, attached = self.strategy, self.progress, self.task.run_context
        module = strategy.begin_step(update.module)
        if module is not update.module:
            update.run(module)
        if self._records:
            torch.compiler.cudagraph_mark_step_begin()
        rows = 0
        for batch in batches:
            rows += batch.rows
        of = rows / strategy.gradient_divisor
        weights: list[Any] = []
        all_measured: list[Measured] = []
        for index, batch in enumerate(batches, progress.batches_done):
            if self._accumulates:
                strategy.grad_sync(batch is batches[-1])
            beat()
            attached.batch_index = index
            shares = self._to_device(batch.shares)
            for batch_start in self.hooks["on_batch_start"]:
                batch_start(self, placed(batch, shares))
            loss, measured = update.forward(shares, of)
            if self._records:  # the next step writes over what this one returned
                measured = cloned(measured)
            weights += update.weights_of(measured)
            if self.guard.refuses(measured, progress, index):
                return None
            update.backward(loss)
            all_measured += measured
            for batch_end in self.hooks["on_batch_end"]:
                batch_end(self, placed(batch, shares), [output for _, output in measured])
        if not all_measured:  # no row of these batches is this process's
            update.fill_gradients()
        strategy.check_gradients()
        if update.is_weighted or update.scaler is not None:
            update.complete(rows, weights)
        return all_measured

    def recompute(self) -> list[Measured] | None:
        """For `on_before_step`: computes the gradients of this step's batches again, at the current
        weights, and returns what the steps measured."""
        self.update.clear()
        with self.task_metrics.apart():  # they have counted these rows
            return self.gradients(self.batches, self.update)

    def _taking_turns(self) -> Iterator[Update]:
        """The optimizers of this step in turn; in each turn only its own weights get gradients."""
        names = list(self.task.turns())
        if self._compares_turns:
            self._refuse_other_turns(names)
        for name in names:
            if name not in self.updates:
                raise UserError(
                    f"{type(self.task).__name__}.turns returned {name!r}, which is no optimizer; "
                    f"{suggestion(str(name), self.updates)}"
                )
            self.update = self.updates[name]
            with self.update.alone():
                if not self.update.has_trained():
                    raise UserError(
                        f"{type(self.task).__name__}: all weights of {name} are frozen in its "
                        "turn; leave it out of turns() until some are thawed"
                    )
                yield self.update

    def _refuse_other_turns(self, names: list[str]) -> None:
        """Processes that train different weights would add up gradients of different things."""
        here = float(zlib.crc32(repr(names).encode()))
        if self.strategy.collectives.sum_numbers([here]) != [here * self.strategy.world_size]:
            raise UserError(
                f"{type(self.task).__name__}.turns returned {names} on rank {self.strategy.rank} "
                "and something else on another one; let it follow from self.global_step and "
                "self.epoch"
            )

    def _closure(self, measured: list[Measured]) -> Callable[[], torch.Tensor]:
        """For an optimizer such as LBFGS. The first call returns the loss of the gradients that
        are computed already, each later one computes both again."""
        known = [measured]

        def closure() -> torch.Tensor:
            losses = known.pop() if known else self.recompute() or []
            pairs = [(float(o["loss"]), float(o.get("weight", rows))) for rows, o in losses]
            columns = [[loss * weight for loss, weight in pairs], [w for _, w in pairs]]
            total, weight = self.strategy.collectives.sum_columns(
                columns, is_exact=self.strategy.logical_shares > 0
            )
            mean = total / weight if weight else math.nan
            return torch.tensor(mean, dtype=torch.float64, device="cpu")

        return closure

    def _steps(self) -> Iterator[list[Batch]]:
        """The rest of the epoch's batches, as many at a time as make one optimizer update."""
        progress = self.progress
        limit = self.feed.limit
        batches = self._read(progress.epoch, skip=progress.batches_done, limit=limit)
        clock = time.perf_counter
        asked = clock()
        while step := list(islice(batches, self.settings.accumulate)):
            progress.data_seconds += clock() - asked
            yield step
            asked = clock()
        if progress.batches_done == 0:
            raise UserError(
                f"{type(self.data).__name__}.train_dataset() gave no rows; check its stream"
            )

    # ---- the ends of steps and epochs

    def _log_step(self) -> None:
        self._read_losses()
        window = self.means.window()  # waits for the GPU; empty if all its steps were left out
        means = self.task.summarize(window) if window else {}
        self.step_metrics = {f"step/{name}": value for name, value in means.items()}
        now, rows = time.perf_counter(), self.progress.rows_seen
        rate = (rows - self._logged_rows) / (now - self._logged_at)
        self._logged_at, self._logged_rows = now, rows
        norms = {
            "/".join(filter(None, ("grad_norm", name))): float(update.grad_norm)
            for name, update in self.updates.items()
            if not self.task.optimizes_by_hand
        }
        scalars = {**means, **self._learning_rates(), **norms, "samples_per_second": rate}
        self._log({f"step/{name}": value for name, value in scalars.items()})

    def _read_losses(self) -> None:
        """Checks the losses that were not read at once; waits for the GPU if there are any."""
        self.guard.read(self.global_step, self.checkpoint, self.run.directory)

    def _learning_rates(self) -> dict[str, float]:
        """`lr`, and by the names of optimizers and groups, e.g. `lr/generator/backbone`."""
        return {
            "/".join(filter(None, ("lr", name, group))): rate
            for name, update in self.updates.items()
            for group, rate in update.learning_rates().items()
        }

    def _end_epoch(self) -> None:
        """Changes no state before the validation is over: a run that is interrupted there
        validates again when it is resumed."""
        progress, settings = self.progress, self.settings
        self._read_losses()
        rates = self._learning_rates()
        is_whole = not self.should_stop or progress.batches_done == self.feed.batches_in(
            progress.epoch
        )
        if self.stop_poll.done != progress.global_step:
            self._look()
        epochs = progress.epoch + is_whole
        is_last = self.should_stop or bool(settings.reached(epochs, progress.global_step))
        is_due = is_whole and epochs % max(1, int(settings.validate_every_epochs)) == 0
        self.is_extra_validation = not (is_due or self._is_validation_due())
        validated: dict[str, float] = {}
        if self.validation and (is_last or is_due):
            random_state = None if is_whole else seeding.random_state(self._devices)
            validated = self._measure_validation(self.means)
            if random_state is not None:  # a resumed run draws as if this one had not ended
                seeding.restore_random_state(random_state, self._devices)
        total = self.means.total()
        means = self.task.summarize(total) if total else {}
        measured = {f"train/{name}": value for name, value in means.items()}
        measured |= self.task_metrics.results("train", measured)
        if not total:  # every step was left out: the epoch before must not stand in for this one
            self.metrics = {k: v for k, v in self.metrics.items() if not k.startswith("train/")}
        self.metrics.update(measured | validated)
        if is_whole:
            progress.epoch, progress.batches_done = epochs, 0
            self.means.reset()
            self.step_metrics = {}
            self.task_metrics.reset()
        self.should_stop = self.should_stop or is_last  # hooks of the validation may have said so
        if validated:
            self.hooks.call("on_validation_end", self)
        if is_whole:
            is_stale = bool(self.validation) and self.is_extra_validation
            for update in self.updates.values():
                update.end_epoch(self.metrics, is_stale=is_stale)
        at = {f"progress/{name}": rate for name, rate in rates.items()}
        self._log({**measured, **validated, **at, "progress/epoch": float(progress.epoch)})
        self._read_clock()
        progress.ended_step = progress.global_step
        self.hooks.call("on_epoch_end", self)
        self.report.tend()

    def _is_validation_due(self) -> bool:
        """Whether to validate after this step, whatever ends with it."""
        progress, every = self.progress, self.settings.validate_every_steps
        is_due = every is not None and progress.global_step % every == 0
        return bool(self.validation) and (is_due or progress.batches_done in self._validates_after)

    def _validate(self) -> None:
        self._read_losses()
        self.is_extra_validation = False
        means = self._measure_validation()
        if means:
            self.metrics.update(means)
            self._log(means)
            self.hooks.call("on_validation_end", self)

    def _measure_validation(self, *others: Means) -> dict[str, float]:
        """The new metrics; none if this step was validated before."""
        if self.progress.validated_step == self.progress.global_step:
            return {}
        self.strategy.sync_weights(for_reading=True)
        self.hooks.call("on_validation_start", self)
        self._is_validating = True  # still so in an error of it
        with restore_modes(self.task):
            after_batch = self.hooks.after_batch("on_validation_batch_end", self)
            means = self._evaluate(*others, after_batch=after_batch)
        self._is_validating = False
        self.progress.validated_step = self.progress.global_step
        return means

    def _catch_up(self) -> None:
        """After a resume: the validation and the end of the epoch that the checkpoint's step has
        still to come to."""
        step = self.progress.global_step
        if self._is_validation_due():
            self._validate()
        if self.should_stop and self.progress.ended_step != step:
            self._end_epoch()

    def _look(self) -> bool:
        """Whether to stop: by the clock or a signal. Asked a few times a second and each epoch."""
        self._look_at, self.clock = self.stop_poll.poll(self.progress.global_step)
        limit = self.settings.max_seconds
        if limit is not None and self.clock > limit:
            self.stop(f"trainer.max_seconds={limit:g} are over")
        self.report.tend()
        return self.should_stop

    def _end_by(self, error: BaseException) -> None:
        ends: list[Callable[[], None]] = [] if self.profile is None else [self.profile.stop]
        ends.append(partial(self.report.close, self.metrics, succeeded=False))
        ends.append(partial(self.hooks.call, "on_exception", self, error))
        for end in ends:
            try:
                end()
            except Exception as second:
                if not isinstance(error, torch.AcceleratorError):
                    raise
                log.warning("%s", second)  # the same dead device; the first error tells more

    def _read_clock(self) -> None:
        self.progress.seconds = self._seconds_before + time.perf_counter() - self._began

    def _log(self, scalars: dict[str, float]) -> None:
        self._write(scalars, step=self.progress.global_step)
        while self.task_metrics.tables:
            self.log_table(*self.task_metrics.tables.pop(0))

    # ---- set up, once

    def _chosen(self, strategy: Strategy | None) -> Strategy:
        settings = self.settings
        if strategy is None:
            return auto(settings.gpus, settings.accelerator, settings.max_replicas_per_core)
        if not strategy.is_set_up:
            _refuse_other_devices(strategy, settings)
        return strategy

    def _launched(self, mode: str, *args: Any, **options: Any) -> Any:
        """Runs the mode in ranks, and takes over the main rank's state."""
        parts: dict[str, Any] = {"task": self.task, "data": self.data, "settings": self.settings}
        parts |= {"seed": self.seed, "run": self.run, **self._given}
        parts["random_state"] = self._random_state
        ending = self.strategy.launch_apart(_in_rank, self.strategy, parts, mode, args, options)
        value, ended = fresh.unpack(ending)
        self.mode = mode
        self.metrics.update(ended["metrics"])
        for callback, state in zip(self._given["callbacks"], ended["callbacks"], strict=True):
            vars(callback).update(state)
        if mode == "fit":
            self.task.to(dtype=Precision(self.settings.precision, torch.device("cpu")).dtype)
            self.task.load_state_dict(ended["weights"])
            self.progress, self.checkpoint = ended["progress"], ended["checkpoint"]
            self.stop_reason = ended["stop_reason"]
        return value if mode == "predict" else self.metrics

    def _refuse_closed(self) -> None:
        if not self.strategy.is_set_up:
            raise UserError(
                f"{self.strategy.name} is closed, by Trainer.close() or the end of a with block; "
                "call this before, or make another Trainer"
            )

    def prepare(self, resume: Start = None, *, resume_anyway: bool = False) -> None:
        """Builds and checks all that `fit` needs. It writes nothing and calls no hook."""
        self.mode, self._is_validating = "fit", False
        self._resumed = state = start_state(
            resume, self.run.directory, whole=self.strategy.sharding is None
        )
        task, strategy, settings = self.task, self.strategy, self.settings
        if settings.on_nonfinite == "skip":
            strategy.check_skips(settings.accumulate)
        self.feed = feed = Feed.of(self.data, strategy, settings, seed=self.seed)
        self.validation = {}
        if feed.validation:
            self.validation = self._evaluations("val", feed.validation)
            self._evaluate: Callable[..., Any] = partial(means_of, self.validation)
        self._devices = local_devices(strategy)
        self._read, self._to_device = prefetched(feed.train, strategy.to_device, self._devices)
        task.steps_per_epoch, task.total_steps = feed.steps_per_epoch, feed.total_steps
        task.scheduler_steps = feed.scheduler_steps(settings.scheduler_every)
        task.schedules_turns = settings.scheduler_every == "step"
        self.scaled_rates: ScaledRates | None = None
        if task.scale_lr is not None:
            self.scaled_rates = ScaledRates.of(task, settings, feed.source.batch_size)
        scaler = self.precision.scaler
        self.updates = updates_of(task, strategy, settings, scaler, self.scaled_rates)
        if task.optimizer_names and self.validation and not task.has_own("validation_step"):
            raise UserError(
                f"{type(task).__name__} has several optimizers, and training_step wants the name "
                "of one; write validation_step, or return None from val_dataset"
            )
        self.recomputed = drop_activations(task, settings.checkpoint_activations)
        mode = settings.compile_mode
        if strategy.sharding is not None:
            settings.check_compiled_parts(strategy.name)
        self.update = next(iter(self.updates.values()))
        self._only = () if self.update.name else (self.update,)
        if task.optimizes_by_hand:
            self._only = (ByHand(task, strategy, settings),)
            step = strategy.wrap(StepByHand(task, self.precision.autocast), training=False)
            for update in (*self._only, *self.updates.values()):
                update.run(step)
        options = {**settings.compile_options, "mode": mode}
        compiled = None if mode is None else Compiled(**options)
        for update in self.updates.values() if not task.optimizes_by_hand else ():
            step = TrainStep(task, self.precision.autocast, update.name, compiled)
            with update.alone() if update.name else nullcontext():
                update.run(strategy.wrap(step, training=True))
        self._compares_turns = strategy.world_size > 1 and task.has_own("turns")
        self.means = means_over(strategy)
        self.task_metrics.reset()
        self.guard = LossGuard(strategy, settings.on_nonfinite, feed.train.order)
        self.fingerprint = fingerprint(
            task, self.data, feed, self.updates, settings, self.run, self.seed
        )
        is_cuda = strategy.device.type == "cuda"
        self._records = is_cuda and mode in CUDA_GRAPH_MODES
        self._accumulates = settings.accumulate > 1
        self._log_every = settings.log_every
        has_validation = bool(self.validation)
        self._validates_after = feed.validations_within(settings) if has_validation else frozenset()
        every_steps = settings.validate_every_steps is not None
        self._validates_within = has_validation and (every_steps or bool(self._validates_after))
        if state is not None:
            self._load_state_dict(state, anyway=resume_anyway)
        reached = settings.reached(self.progress.epoch, self.progress.global_step)
        self.should_stop = bool(reached)
        if settings.sanity_batches and self.validation:
            self._try_validation(settings.sanity_batches)

    def _try_validation(self, batches: int) -> None:
        """So that errors in validation and misspelt names of metrics show before training."""
        random_state = seeding.random_state(self._devices)
        self._is_validating = True
        with restore_modes(self.task):
            names = means_of(self.validation, at_most=batches)
        self._is_validating = False
        seeding.restore_random_state(random_state, self._devices)
        self.task_metrics.tables.clear()
        monitored = [pair for callback in self.callbacks for pair in callback.monitored()]
        if any(update.is_plateau for update in self.updates.values()):
            monitored.append(("trainer.plateau_monitor", self.settings.plateau_monitor))
        for key, name in monitored:
            if not (name.startswith("train/") or self.hooks.may_log(name)):
                refuse_unmeasured(key, name, names)

    def _begin(self) -> None:
        """Opens the loggers, seeds this process and logs what is about to run."""
        self._refuse_nowhere([*self.callbacks, *self.loggers])
        if self._resumed is not None:
            self._reopen(self._resumed)
        else:
            self.report.open(self.strategy)
            # From here on every process draws its own random numbers, e.g. in on_fit_start.
            seed = seeding.mix(self.seed, self._draws_as)
            seeding.seed_everything(seed, self._devices)
        if self.strategy.is_main:
            self.feed.warn_of_a_short_batch()
        self.task_metrics.tables.clear()  # those of a validation before
        mode = self.settings.compile_mode
        if mode is not None and self.strategy.is_main:
            log.info("trainer.compile.mode=%s: the first step may take minutes to compile", mode)
        resting, sharding = self._resting(), self.strategy.sharding
        if resting and self.strategy.is_main:
            log.info(
                "stays in evaluation mode in training: %s; call train() on it in the task's "
                "__init__ where it should not",
                ", ".join(resting),
            )
        if self.recomputed and self.strategy.is_main:
            log.info("computed again in the backward: %s", ", ".join(self.recomputed))
        elif self.strategy.is_main and sharding is not None and sharding.keeps_casts:
            log.info(
                "autocast keeps all weights in bf16 in each process from forward to backward; set "
                "strategy.param_dtype=bf16 or trainer.checkpoint_activations=true where they don't "
                "fit"
            )
        if self.scaled_rates is not None and self.strategy.is_main:
            log.info("%s", self.scaled_rates)
        self.profile = Profile() if self.settings.profile else None
        if self.profile is not None:
            self._time_parts(self.profile)
        self._seconds_before = self.progress.seconds
        self._began = self._logged_at = time.perf_counter()
        self._logged_rows = self.progress.rows_seen
        self._look_at = self.stop_poll.begin(self.progress.global_step)
        self.has_begun = True

    def _resting(self) -> list[str]:
        """The outermost modules that the task has put into evaluation mode."""
        names: list[str] = []
        for name, module in self.task.named_modules():
            is_within = any(name.startswith(f"{outer}.") for outer in names)
            if self.task.training and not (module.training or is_within):
                names.append(name)
        return names

    def _refuse_nowhere(self, parts: Iterable[Callback | Logger]) -> None:
        for part in parts:
            if part.needs_directory and not self.run.directory:
                raise UserError(
                    f"{type(part).__name__} writes files, and nothing says where; pass the Trainer "
                    "run=Run(directory=…)"
                )

    def _evaluations(
        self, kind: str, loaders: dict[str, Loader] | None = None
    ) -> dict[str, Evaluation]:
        """The Evaluations by the names of the data sets."""
        if loaders is None:
            loaders = evaluated(kind, self.data, self.strategy, self.settings, seed=self.seed)
        return {
            name: Evaluation(
                self.task,
                kind,
                loader,
                self.strategy,
                name=name,
                precision=self.precision,
                limit_batches=self.settings.limit(kind, loader.batches),
                task_metrics=self.task_metrics,
                interruption=self.interruption,
            )
            for name, loader in loaders.items()
        }

    def _reopen(self, state: dict[str, Any]) -> None:
        """Continues the run's curves, and says from where."""
        log.info("resumed at epoch %s, step %s", self.epoch, self.global_step)
        if reached := self.settings.reached(self.progress.epoch, self.global_step):
            log.warning("%s is reached: nothing is left to train; raise it", ", ".join(reached))
        if self._changes:
            log.warning("not all is as it was: %s", "; ".join(self._changes))
        self.report.open(self.strategy, purge_step=self.global_step)
        if logged := state["progress"]["logged"]:
            self._log(logged)

    # ---- a profile

    def _time_parts(self, profile: Profile) -> None:
        timed = profile.timed
        self._read = profile.timed_batches(self._read)
        for update in self.updates.values():
            update.timed = partial(timed, "forward")
            update.run(update.module)
            update.backward = timed("backward", update.backward)
            update.step = timed("optimizer", update.step)  # type: ignore[method-assign]
        if self.validation:
            self._evaluate = timed("validation", self._evaluate)
        self._write = timed("logging", self.report.log)
        self.hooks.time_by(partial(timed, "callbacks"), end_step=profile.end_step)
        profile.start()

    def _tell(self, profile: Profile) -> None:
        is_main = self.strategy.is_main
        table, scalars = profile.summary(self.run.directory if is_main else "")
        self._log(scalars)
        if is_main:
            log.info("%s", table)

    # ---- the state that a checkpoint holds

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """All that decides the rest of training. Every process calls it, and the main one gets it.

        If not `whole`, each process gets its own shards of the tensors that the strategy shards.
        """
        self._read_losses()
        self._read_clock()
        strategy, progress = self.strategy, self.progress
        strategy.sync_weights(for_reading=True)
        # Random numbers and sums start again with each epoch: only within one is there a state.
        of_ranks: dict[str, Any] = {}
        if done := progress.batches_done:
            own = {
                "random": seeding.random_state(self._devices),
                "means": self.means.state_dict(),
                "task_metrics": self.task_metrics.state_dict(),
            }
            if (place := self.feed.train.place(done)) is not None:
                own["stream"] = place
            of_ranks = self._of_ranks(own)
        logged_step, logged = self.report.last
        state: dict[str, Any] = {
            "recipe": self.run.recipe,
            "fingerprint": json.dumps(self.fingerprint),
            "task": self.task.state_dict(),
            **states_of(self.updates),
            "strategy": {
                strategy.name: each_of(self.updates, lambda u: strategy.state_dict(u.optimizer))
            },
            "progress": {
                **progress.state_dict(),
                # A stream's last step does not tell that it is the last: a resumed run finds out.
                **({"validated_step": -1} if self.is_extra_validation else {}),
                "means": of_ranks.get("means", []),
                "task_metrics": of_ranks.get("task_metrics", []),
                "logged": dict(logged) if logged_step == progress.global_step else {},
            },
            "metrics": dict(self.metrics),
            "callbacks": {n: callback.state_dict() for n, callback in named(self.callbacks)},
            "random": of_ranks.get("random", []),
            "stream": of_ranks.get("stream", []),
        }
        self.hooks.call("on_save", self, state)
        sharding = strategy.sharding
        return state if sharding is None or not whole else sharding.whole(state)

    def _of_ranks(self, own: dict[str, Any]) -> dict[str, Any]:
        """Lists over the ranks by name."""
        everywhere = self.strategy.collectives.gather(own)
        names = dict.fromkeys(chain.from_iterable(everywhere))
        return {name: [each[name] for each in everywhere if name in each] for name in names}

    def _load_state_dict(self, state: dict[str, Any], *, anyway: bool) -> None:
        """Refuses a state of another run unless `anyway`; what differs is told when it begins."""
        strategy, progress = self.strategy, self.progress
        rank, world_size = strategy.rank, strategy.world_size
        changes = changes_since(state, self.fingerprint, anyway=anyway)
        checkpoint.load_task(self.task, state, is_resumed=True, sharding=strategy.sharding)
        with refusing(state):
            before = json.loads(state["fingerprint"])
            of_strategy = state.get("strategy", {}).get(strategy.name, {})
            for name, update in self.updates.items():
                update.load_state_dict(state, before, self.fingerprint)
                kept = of_strategy.get(name, {}) if name else of_strategy
                strategy.load_state_dict(kept, update.optimizer)
            progress.load_state_dict(state["progress"])
            means = state["progress"]["means"]
            means = [means] if isinstance(means, dict) else means  # an earlier version's
            self.means.load_state_dict(means, rank=rank, world_size=world_size)
            of_metrics = state["progress"].get("task_metrics", [])
            self.task_metrics.load_state_dict(of_metrics, rank=rank, world_size=world_size)
            self.metrics = dict(state["metrics"])
            for name, value in state["progress"]["logged"].items():
                if type(value) not in (int, float):
                    raise TypeError(f"{name}={str(value)[:200]} was logged")
        for name, callback in named(self.callbacks):
            if of_callback := state["callbacks"].get(name):
                callback.load_state_dict(of_callback)
        with refusing(state):
            processes = len(state["random"])
            if processes and strategy.logical_shares:  # all drew the same
                seeding.restore_random_state(state["random"][0], self._devices)
            elif processes == world_size:
                seeding.restore_random_state(state["random"][rank], self._devices)
            elif progress.batches_done:
                changes = [*changes, f"{processes} processes there, {world_size} here"]
                seed = seeding.mix(self.seed, rank, progress.global_step)
                seeding.seed_everything(seed, self._devices)
            self.feed.train.seek(state.get("stream", []), world_size)
            # As many rows of the epoch are skipped as were read, or a part of a batch less.
            batch_size = int(before["data.batch_size"])
            progress.batches_done = (
                progress.batches_done * batch_size // self.feed.source.batch_size
            )
        self._changes = changes
        self.hooks.call("on_load", self, state)


def _in_rank(
    strategy: Strategy, parts: dict[str, Any], mode: str, args: tuple, options: dict[str, Any]
) -> bytes:
    """Packs what the mode returns, and the state for the Trainer that has launched the ranks."""
    seeding.restore_random_state(parts.pop("random_state"), [])
    stop = signals.current()
    with (
        signals.watched(parts["settings"].hang_seconds),
        Trainer(**parts, strategy=strategy, interruption=stop) as trainer,
    ):
        value = getattr(trainer, mode)(*args, **options)
        names = ("metrics", "progress", "checkpoint", "stop_reason")
        ended = {name: getattr(trainer, name) for name in names}
        if mode == "fit":  # a program that has no card open gets no tensor of one
            ended["weights"] = on_cpu(trainer.state_dict()["task"])
        ended["callbacks"] = [sendable(vars(callback)) for callback in parts["callbacks"]]
        return fresh.pack((value, ended)) if strategy.is_main else b""


def sendable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that can be pickled for another process."""
    kept = {}
    for name, value in values.items():
        with suppress(UserError):
            fresh.pack(value)
            kept[name] = value
    return kept


def _changed(settings: TrainerSettings, more: dict[str, Any]) -> TrainerSettings:
    known = inspect.signature(TrainerSettings).parameters
    for name in more:
        if name not in known:
            valid = [*known, *inspect.signature(Trainer).parameters]
            raise UserError(f"Trainer: there is no setting {name}; {suggestion(name, valid)}")
    return replace(settings, **more)


def _refuse_other_devices(strategy: Strategy, settings: TrainerSettings) -> None:
    """In a config both have one value; from Python each is made with its own."""
    for key, unset in (("gpus", None), ("accelerator", "auto")):
        there, here = getattr(strategy, key, unset), getattr(settings, key)
        if here not in (unset, there):
            raise UserError(
                f"TrainerSettings({key}={here!r}) but the strategy is {strategy.name}({key}="
                f"{there!r}); pass {key} to the strategy alone"
            )
