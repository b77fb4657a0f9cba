"""The loop: `fit` -> `_train_epoch` -> `Step.gradients` -> the task. `prepare` makes its parts."""

import atexit
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

from dpframe import seeding
from dpframe.data import DataModule
from dpframe.data.columns import asked_for
from dpframe.data.preparation import call_prepare_data
from dpframe.errors import UserError
from dpframe.launch.signals import Interruption
from dpframe.launch.watchdog import beat
from dpframe.loggers import Logger
from dpframe.metrics import Means
from dpframe.strategies.base import Strategy
from dpframe.task import Task, TaskContext
from dpframe.trainer.calendar import EpochEnd
from dpframe.trainer.callback import Callback
from dpframe.trainer.callback_view import CallbackView
from dpframe.trainer.checks import alike, arguments
from dpframe.trainer.checks.keywords import SettingsByName, signature_with_settings, with_settings
from dpframe.trainer.compute.placement import DTYPES, Precision, place
from dpframe.trainer.evaluation import Evaluations, Placed, restore_modes
from dpframe.trainer.feed import TrainingData
from dpframe.trainer.hooks import Hooks, end_by, in_order, name_callback
from dpframe.trainer.outputs import prefixed
from dpframe.trainer.predictions import Predictions
from dpframe.trainer.prepare import (
    Given,
    Resumed,
    Training,
    Watchers,
    look_again,
    make_evaluations,
    make_training,
    told,
)
from dpframe.trainer.progress import Progress
from dpframe.trainer.ranks import Ranks, SoFar, choose_strategy, put_around
from dpframe.trainer.recorder import Recorder, RunInfo, begun
from dpframe.trainer.resume.state import Start, start_state
from dpframe.trainer.settings import TrainerSettings
from dpframe.trainer.task_metrics import TaskMetrics

HAS_TRAINED = "this Trainer has trained already; make another one, with a new task, or pass resume"
HAS_LOADED = (
    "this Trainer has loaded a checkpoint, or a part of one; pass resume again, or make another one"
)

log = logging.getLogger("dpframe")


class Trainer(CallbackView):
    """Trains a task on data by a strategy. `metrics` has the newest value of each name.

    TrainerSettings may be given as `settings`, or one by one: `Trainer(task, data, max_epochs=3)`.
    """

    # What hooks read and call, and `_record`, which tells the loggers, is in CallbackView.

    ranks: Ranks | None = None  # None: there are none to launch
    _is_prepared = False
    _has_loaded = False  # a checkpoint, or a part of one

    def __init__(
        self,
        task: Task,
        data: DataModule | Any = None,
        val: Any = None,
        *,
        test: Any = None,
        predict: Any = None,
        batch_size: int | None = None,
        strategy: Strategy | str | None = None,
        settings: TrainerSettings | None = None,
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Logger] = (),
        seed: int = 0,
        run: RunInfo | None = None,
        interruption: Interruption | None = None,
        show_progress: bool | None = None,
        **more: Unpack[SettingsByName],
    ) -> None:
        """Joins the job, moves `task` to its device and prepares the data, unless the strategy
        launches ranks: they do so when a mode is called. `data` is a DataModule, or the data set or
        DataLoader to train on; several are a dict. `strategy` may be a name, e.g. "ddp", which
        takes `gpus` and `accelerator`; `more` are settings by name. `interruption` is by signals;
        without one the program handles them itself. `show_progress`: None shows it on a terminal
        and in a notebook, False nowhere."""
        callbacks = arguments.list_of("callbacks", callbacks, Callback)
        loggers = arguments.list_of("loggers", loggers, Logger)
        given = arguments.Sets(data, val, test, predict, batch_size)
        data = arguments.check(task, given, strategy, settings, callbacks, run, seed)
        if show_progress is not False:
            from dpframe.callbacks.display import display

            callbacks += display(callbacks, is_wanted=bool(show_progress))
        self.task = task
        self.data = data
        self.settings = settings = with_settings(settings or TrainerSettings(), more, type(self))
        self.seed = seed = int(seed)
        self.callbacks = in_order(callbacks)
        self.run = run or RunInfo()
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        self.step_metrics: dict[str, float] = {}  # step/…: means of this epoch's newest updates
        self.checkpoint: str | None = None
        self._opened = ExitStack()  # holds the strategy, if it was set up here
        self.strategy = choose_strategy(strategy, settings)
        if self.strategy.needs_launch:
            parts = {"task": task, "data": data, "settings": settings, "callbacks": callbacks}
            parts |= {"loggers": loggers, "seed": seed, "run": self.run, "show_progress": False}
            self.ranks = Ranks(type(self), self.strategy, parts)
        else:
            self._set_up(loggers, interruption)

    def _set_up(self, loggers: list[Logger], interruption: Interruption | None) -> None:
        """Joins the other processes, places the task and prepares the data."""
        task, data, settings = self.task, self.data, self.settings
        if not self.strategy.is_set_up:
            self._opened.enter_context(self.strategy)
            atexit.register(self._opened.close)  # which does not keep the Trainer
        self.strategy = strategy = put_around(self.strategy, settings, self.seed)
        cuts_weights = strategy.sharding.cuts
        self.precision = Precision(settings.precision, strategy.device, cuts_weights=cuts_weights)
        strategy.dtype = self.precision.dtype
        task.setup(self)
        self.layout = place(task, strategy, self.precision, settings)
        self.task_metrics = metrics = TaskMetrics(task, strategy)
        beat()
        if data.has_preparation:
            call_prepare_data(data, strategy.collectives.once)
        data.setup()
        beat()
        task.run_context = TaskContext(
            self.progress,
            strategy,
            seed=self.seed,
            is_compiled=settings.compile_mode is not None,
        )
        self.hooks = Hooks(task, self.callbacks, strategy, settings)
        own_loggers = strategy.logger(loggers)
        self.recorder = Recorder(own_loggers, self.run, is_profiled=settings.profile)
        self.placed = Placed(task, data, strategy, self.seed, self.precision, metrics, interruption)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Closes the strategy if this Trainer has set it up; after an error without waiting for
        other processes."""
        atexit.unregister(self._opened.close)
        self._opened.__exit__(*error)

    def close(self) -> None:
        self.__exit__(None, None, None)

    # ---- the modes

    def prepare(self, resume: Start = None, *, resume_anyway: bool = False) -> Training:
        """Makes and checks all that `fit` needs. It writes nothing, and needs no run directory.

        `resume` is a checkpoint's file, its state, which training changes, or "last": the newest in
        the run directory. `resume_anyway` accepts that of a run with another config or code."""
        if self.ranks is not None:
            raise UserError(f"Trainer.prepare: the ranks of {self.strategy.name} do it; call fit")
        self.mode, self.is_validating, self._is_prepared = "fit", False, False
        state = start_state(resume, self.run.directory, whole=not self.strategy.sharding.cuts)
        if state is None and (self._has_loaded or self.has_begun):
            raise UserError(HAS_TRAINED if self.has_begun else HAS_LOADED)
        # The task may ask for its lengths while its parts are made.
        self.feed = TrainingData.of(self.data, self.strategy, self.settings, seed=self.seed)
        given = Given(
            self.placed,
            self.settings,
            self.feed,
            Watchers(self.callbacks, *self.hooks.bound(self, "on_batch_start", "on_batch_end")),
            self.progress,
            self.run,
            Resumed(state, resume_anyway),
        )
        self.training = training = make_training(given)
        if state is not None:
            self._has_loaded = True
            training.changes.extend(training.state.restore(state))
            self.metrics = dict(state["metrics"])
            self.hooks.call("on_load", self, state)
        self.is_over = bool(self.settings.reached(self.progress.epoch, self.progress.global_step))
        self.should_stop = False
        if self.settings.sanity_batches and training.validation:
            self.is_validating = True  # still so in an error of it
            measured = training.validation.measure_few(self.settings.sanity_batches)
            self.is_validating = False
            monitored = [pair for callback in self.callbacks for pair in callback.monitored()]
            monitored += training.updates.monitored()
            self.hooks.refuse_misspelt(monitored, measured)
        self._is_prepared = True
        return training

    def fit(
        self, resume: Start = None, *, resume_anyway: bool = False, keep_loggers_open: bool = False
    ) -> dict[str, float]:
        """Trains; see `prepare`. `keep_loggers_open` is for a `test` that follows."""
        if self.ranks is not None:
            return self._run_on_ranks("fit", resume, resume_anyway=resume_anyway)
        if not self._is_prepared or resume is not None:
            own = deepcopy(resume) if isinstance(resume, dict) else resume
            self.prepare(own, resume_anyway=resume_anyway)
        elif self.mode != "fit":  # since then something else has drawn and measured
            self.prepare(self.training.resumed_from, resume_anyway=True)
        self._is_prepared, training = False, self.training
        is_fresh, is_main = training.resumed_from is None, self.strategy.is_main
        parts: list[Callback | Logger] = [*self.callbacks, *self.recorder.loggers]
        run = begun(self.run, parts, is_fresh=is_fresh, is_main=is_main)
        with run, self._recorded(training, keep_loggers_open=keep_loggers_open):
            self.hooks.call("on_fit_start", self)
            if self.strategy.world_size > 1:
                self._poll(training)
            if not is_fresh:
                self._finish_resumed_step(training)
            while not self.is_over:
                self._train_epoch(training)
            training.updates.modes.eval()
            self.strategy.sync_weights(for_reading=True)
            alike.check(self.placed, self.settings, self.progress)
            if training.profile is not None:
                self._record(training.profile.summarize(self.run.directory, is_main=is_main))
            self.hooks.call("on_fit_end", self)
        return self.metrics

    def validate(self) -> dict[str, float]:
        """Measures the validation sets; returns `metrics`, e.g. {"val/loss": 0.5}."""
        return self._evaluate("validate", "val", "on_validation")

    def test(self) -> dict[str, float]:
        """Measures the test sets; returns `metrics`, e.g. {"test/loss": 0.5}."""
        return self._evaluate("test", "test", "on_test")

    def predict(self, *, spool: str | Path | None = None, columns: Iterable[str] = ()) -> Any:
        """Returns Predictions, or several by the names of the data sets; None on all processes but
        the main one. Large predictions are kept on disk, in the directory `spool`, if it is set.
        `columns` of the data set, and "id", stand beside them in a table that is saved."""
        columns = asked_for(columns)
        if self.ranks is not None:
            return self._run_on_ranks("predict", columns=columns)
        by_name: dict[str, Predictions] = {}
        after_batch = self.hooks.after_batch("on_predict_batch_end", self)
        with self._evaluating("predict", "predict") as evaluations:
            beside = {name: each.columns(columns) for name, each in evaluations.by_name.items()}
            self.hooks.call("on_predict_start", self)
            self.task.adapter.begin_pass("predict")
            for name, evaluation in evaluations.by_name.items():
                predictions = evaluation.predictions(spool, beside[name], after_batch=after_batch)
                if predictions is not None:
                    by_name[name] = predictions
                self.hooks.call_on_main("on_predict_end", self, predictions)
            self.task.adapter.end_pass("predict", {})
        return by_name.get("", by_name or None)

    def _evaluate(self, mode: str, kind: str, hook: str) -> dict[str, float]:
        if self.ranks is not None:
            return self._run_on_ranks(mode)
        with self._evaluating(mode, kind) as evaluations:
            self.hooks.call(f"{hook}_start", self)
            after_batch = self.hooks.after_batch(f"{hook}_batch_end", self)
            self.metrics.update(evaluations.means(after_batch=after_batch))
            self.hooks.call(f"{hook}_end", self)
        return self.metrics

    @contextmanager
    def _evaluating(self, mode: str, kind: str) -> Iterator[Evaluations]:
        self.mode = mode
        try:
            with restore_modes(self.task):
                yield make_evaluations(self.placed, kind, self.settings, self.progress)
        except Exception as error:
            name_callback(error)
            raise
        self.recorder.close(self.metrics, succeeded=True)

    # ---- the heart: `Step` has forward and backward, `OptimizerStep` the optimizer, and `Calendar`
    # says when to log, validate and stop

    def _train_epoch(self, training: Training) -> None:
        progress, hooks, calendar = self.progress, self.hooks, training.calendar
        means, left_out, profile = training.means, training.left_out, training.profile
        # In these hooks all processes draw the same, and then each its own, e.g. for dropout. They
        # follow from the epoch, so that a checkpoint between two epochs needs no random state.
        if is_new := progress.batches_done == 0:
            self._seed(progress.epoch)
        if not self.task.training:
            self.task.train()
        hooks.call("on_epoch_start", self)
        if is_new and self.strategy.draws_as != 0:
            self._seed(progress.epoch, self.strategy.draws_as)
        if training.later is not None:  # these hooks may have changed layers and their modes
            look_again(training.later, training, self.placed, progress.epoch)
        for batches in training.feed.steps(progress):  # those of one update
            is_logged = calendar.logs(progress.global_step + 1)
            for update in training.updates.taking_turns():
                if left_out.may_be:
                    left_out.begin(update)
                measured = training.step.gradients(batches, update)
                if measured is not None:
                    for before_step in hooks["on_before_step"]:
                        before_step(self)
                    closure = training.step.closure(measured) if update.needs_closure else None
                    if update.step(closure, is_logged=is_logged):
                        training.newest[update.name] = measured
                        means.add(prefixed(measured, update.name) if update.name else measured)
                        continue
                left_out.end(update, is_logged=is_logged)
            self.strategy.sync_weights(for_reading=False)
            progress.count(batches)
            if is_logged:
                self._log_step(training)
            for hook in hooks["on_step_end"]:
                hook(self)
            if profile is not None:
                profile.end_step()
            if calendar.validates(progress):
                self._validate_by_itself(training)
            if self.is_over or progress.global_step == self.settings.max_steps:
                self.is_over = True
                break
            if calendar.polls(progress.global_step) and self._poll(training):
                break
        self._end_epoch(training)

    def _log_step(self, training: Training) -> None:
        self._read_losses(training)
        window = training.means.window()  # waits for the GPU; empty if all its steps were left out
        means = self.task.summarize(window) if window else {}
        self.step_metrics = {f"step/{name}": value for name, value in means.items()}
        scalars = {**means, **training.updates.pop_logged(beside=means)}
        scalars["samples_per_second"] = self.progress.rows_per_second()
        self._record({f"step/{name}": value for name, value in scalars.items()})

    def _end_epoch(self, training: Training) -> None:
        """Changes no state before the validation is over: a run that is interrupted there
        validates again when it is resumed."""
        progress, calendar = self.progress, training.calendar
        self._read_losses(training)
        rates = training.updates.learning_rates()
        batches = training.feed.batches_in(progress.epoch)
        is_whole = not self.is_over or progress.batches_done == batches
        if calendar.polls_before_end(progress.global_step, is_over=self.is_over):
            self._poll(training)
        end = calendar.end_epoch(progress, is_whole=is_whole, should_stop=self.is_over)
        alike.check_epoch(self.placed, self.settings, self.progress, end)
        self.is_extra_validation = end.is_extra_validation
        validated = self._validate_at_end(training, end)
        measured = self._training_means(training)
        self.metrics.update(measured | validated)
        if is_whole:
            progress.epoch, progress.batches_done = end.epochs, 0
            training.means.reset()
            self.step_metrics = {}
            self.task_metrics.reset()
        self.is_over |= end.is_last
        if validated:
            self.hooks.call("on_validation_end", self)
        training.updates.modes.train()
        if is_whole:
            is_stale = bool(training.validation) and self.is_extra_validation
            for update in training.updates.values():
                update.end_epoch(self.metrics, is_stale=is_stale)
        at = {f"progress/{name}": rate for name, rate in rates.items()}
        self._record({**measured, **validated, **at, "progress/epoch": float(progress.epoch)})
        progress.read_clock()
        progress.ended_step = progress.global_step
        self.hooks.call("on_epoch_end", self)
        if not end.is_last and (self.is_over or self._poll(training)):  # by a hook, after the end
            self._validate_by_itself(training, is_extra=True)

    def _validate_at_end(self, training: Training, end: EpochEnd) -> dict[str, float]:
        """The new metrics of the validation after an epoch, or at the end of training."""
        if not (training.validation and end.validates):
            return {}
        if end.is_whole:
            return self._measure_validation(training, training.means)
        random_state = seeding.random_state(self.strategy.local_devices)
        validated = self._measure_validation(training, training.means)
        # A resumed run draws as if this one had not ended.
        seeding.restore_random_state(random_state, self.strategy.local_devices)
        return validated

    def _training_means(self, training: Training) -> dict[str, float]:
        """The metrics of the epoch's updates."""
        total = training.means.total()
        means = self.task.summarize(total) if total else {}
        measured = {f"train/{name}": value for name, value in means.items()}
        measured |= self.task_metrics.results("train")(measured)
        if not total:  # every step was left out: the epoch before must not stand in for this one
            self.metrics = {k: v for k, v in self.metrics.items() if not k.startswith("train/")}
        return measured

    def _finish_resumed_step(self, training: Training) -> None:
        """The validation and the end of the epoch that the checkpoint's step has still to come
        to."""
        if training.calendar.validates(self.progress):
            self._validate_by_itself(training)
        if self.is_over and self.progress.ended_step != self.progress.global_step:
            self._end_epoch(training)

    def _validate_by_itself(self, training: Training, *, is_extra: bool = False) -> None:
        """Within an epoch, or after the end of one. `is_extra`: a longer run would not."""
        if not training.validation or self.progress.validated_step == self.progress.global_step:
            return
        self._read_losses(training)
        self.is_extra_validation = is_extra
        means = self._measure_validation(training)
        if means:
            self.metrics.update(means)
            self._record(means)
            self.hooks.call("on_validation_end", self)
            training.updates.modes.train()
            self._poll(training)

    def _measure_validation(self, training: Training, *others: Means) -> dict[str, float]:
        """The new metrics; none if this step was validated before. `others` share the
        all-reduce."""
        if self.progress.validated_step == self.progress.global_step:
            return {}
        training.updates.modes.eval()
        self.strategy.sync_weights(for_reading=True)
        self.hooks.call("on_validation_start", self)
        self.is_validating = True  # still so in an error of it
        after_batch = self.hooks.after_batch("on_validation_batch_end", self)
        with restore_modes(self.task):
            means = training.validation.means(*others, after_batch=after_batch)
        self.is_validating = False
        self.progress.validated_step = self.progress.global_step
        return means

    def _seed(self, epoch: int, process: int = 0) -> None:
        seeding.reseed(seeding.mix(self.seed, process, epoch), self.strategy.local_devices)

    def _poll(self, training: Training) -> bool:
        """Whether to stop: by the clock, a signal, or as a hook of any process wishes. Asked a few
        times a second, where several processes log, and around validations and epochs."""
        wish = self.stop_reason if self.should_stop else None
        reason = training.calendar.poll(self.progress.global_step, wish)
        if reason is not None:
            self.stop(reason)
            self.is_over = True
        self.recorder.flush_if_due()
        return self.is_over

    # ---- what is recorded

    @contextmanager
    def _recorded(self, training: Training, *, keep_loggers_open: bool) -> Iterator[None]:
        """Opens the loggers, seeds this process and says what is about to run."""
        if (state := training.resumed_from) is not None:
            self._reopen(training, state["progress"]["logged"])
        else:
            self.recorder.open(self.strategy)
            # All processes draw the same in on_fit_start.
            seeding.seed_everything(seeding.mix(self.seed, 0), self.strategy.local_devices)
        if self.strategy.is_main:
            training.feed.warn_of_a_short_batch(self.strategy.replicas)
            for level, note in told(training, self.settings, self.callbacks):
                log.log(level, "%s", note)
        self.task_metrics.tables.clear()  # those of a validation before
        if training.profile is not None:
            training.profile.start()
        self.progress.start_clock()
        training.calendar.begin(self.progress.global_step)
        self.has_begun = True
        try:
            yield
        except BaseException as error:
            name_callback(error)
            ends = [] if training.profile is None else [training.profile.stop]
            ends.append(partial(self.recorder.close, self.metrics, succeeded=False))
            ends.append(partial(self.hooks.call, "on_exception", self, error))
            end_by(error, ends)
            raise
        if keep_loggers_open:
            self.recorder.flush()
        else:
            self.recorder.close(self.metrics, succeeded=True)

    def _reopen(self, training: Training, logged: dict[str, float]) -> None:
        """Continues the run's curves, and says from where."""
        log.info("resumed at epoch %s, step %s", self.epoch, self.global_step)
        if reached := self.settings.reached(self.epoch, self.global_step):
            log.warning("%s is reached: nothing is left to train; raise it", ", ".join(reached))
        if training.changes:
            log.warning("not all is as it was: %s", "; ".join(training.changes))
        self.recorder.open(self.strategy, purge_step=self.global_step)
        if logged:
            self._record(logged)

    # ---- where it runs

    def _run_on_ranks(self, mode: str, *args: Any, **options: Any) -> Any:
        """Has the ranks run the mode, and takes over what it came to in the main one."""
        assert self.ranks is not None
        if mode == "fit" and self.has_begun and args == (None,):
            raise UserError(HAS_TRAINED)
        so_far = SoFar(self.metrics, self.progress, self.checkpoint)
        ended = self.ranks.run(so_far, mode, *args, **options)
        self.mode = mode
        self.metrics.update(ended.metrics)
        if ended.weights is not None:
            self.task.to(dtype=DTYPES.get(self.settings.precision))
            self.task.load_state_dict(ended.weights)
            self.has_begun = True
            self.metrics, self.progress = ended.metrics, ended.progress
            self.checkpoint = ended.checkpoint
            self.stop_reason = ended.stop_reason
        return ended.value if mode == "predict" else self.metrics


Trainer.__signature__ = signature_with_settings(Trainer)  # type: ignore[attr-defined]
