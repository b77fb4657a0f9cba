"""What hooks read of the Trainer that they are given, and what they call."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from dpframe.data import Batch
from dpframe.errors import UserError
from dpframe.loggers import Logger
from dpframe.metrics import numbers_of
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.feed import TrainingData
from dpframe.trainer.hooks import Hooks
from dpframe.trainer.optim.step import OptimizerStep
from dpframe.trainer.optim.turns import Turns
from dpframe.trainer.outputs import Measured
from dpframe.trainer.prepare import Training
from dpframe.trainer.progress import Progress
from dpframe.trainer.recorder import Recorder, RunInfo, require_directory
from dpframe.trainer.task_metrics import TaskMetrics

PHASES = {"validate": "validation", "test": "test", "predict": "prediction"}  # by the mode


class CallbackView:
    """A Trainer inherits this. Hooks may also read its attributes `data`, `settings`, `seed`,
    `callbacks` and `step_metrics`."""

    task: Task
    strategy: Strategy
    run: RunInfo
    progress: Progress
    feed: TrainingData  # what training reads
    training: Training
    hooks: Hooks
    recorder: Recorder
    task_metrics: TaskMetrics
    mode = ""  # fit, validate, test or predict, once one of them runs
    has_begun = False  # training
    is_validating = False  # within a fit
    is_on_main_alone = False  # a hook that runs
    is_extra_validation = False  # at the end of training: a longer run would not make it
    metrics: dict[str, float]
    checkpoint: str | None  # the newest that this process has saved
    is_over = False  # training, in all processes
    should_stop = False  # after `stop`, here at least
    stop_reason = ""

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
    def updates(self) -> Turns:
        """By the optimizers' names; one alone has the name ""."""
        return self.training.updates

    @property
    def update(self) -> OptimizerStep:
        """The one whose turn it is."""
        return self.training.updates.current

    @property
    def batches(self) -> list[Batch]:
        """Of the step at hand."""
        return self.training.step.batches

    @property
    def clock(self) -> float:
        """Seconds of training at the last look, the same in all processes."""
        return self.training.calendar.clock

    @property
    def phase(self) -> str:
        """What is done now in a word, for errors."""
        if self.mode in PHASES:
            return PHASES[self.mode]
        if self.is_validating:
            return PHASES["validate"]
        return "training" if self.has_begun else "set-up"

    def stop(self, reason: str) -> None:
        """Ends training after this step. Any process may call it: several end together, where they
        next meet, i.e. after a step that is logged or validated, an epoch, or a moment later."""
        self.stop_reason, self.should_stop = reason, True
        self.is_over |= self.strategy.world_size == 1

    def recompute_gradients(self) -> list[Measured] | None:
        """For `on_before_step`: computes the gradients of this step's batches again, at the current
        weights, and returns what the steps measured; None if the step is left out."""
        return self.training.step.recompute()

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Adds numbers to `metrics` and to this step's row of every logger, e.g. {"val/f1": 0.5}.

        For the hooks of callbacks and tasks. The step is the newest that is done: log what
        `on_before_step` has computed in `on_step_end`. Every process has to call it with the same
        numbers: others are refused when a validation or an epoch ends.
        """
        numbers = numbers_of(scalars)
        if self.hooks.log_check is not None:
            self.hooks.log_check.add(numbers)
        self.metrics.update(numbers)
        if self.recorder.is_open:
            self._record(numbers)

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """All that decides the rest of training. Every process calls it, and the main one gets it.

        If not `whole`, each process gets its own shards of the tensors that the strategy shards.
        """
        training, strategy = self.training, self.strategy
        self._read_losses(training)
        self.progress.read_clock()
        strategy.sync_weights(for_reading=True)
        logged_step, logged = self.recorder.last
        logged = logged if logged_step == self.global_step else {}
        with strategy.sharding.taking_shards():
            state = training.state.capture(self.metrics, logged)
            if self.is_extra_validation:
                # Only as training ended here: a resumed, longer run must not count it.
                state["progress"]["validated_step"] = -1
            self.hooks.call("on_save", self, state)
        return strategy.sharding.whole(state) if whole else state

    def whole_state_dict(self, module: nn.Module | None = None) -> dict[str, Any]:
        """`state_dict()` of the task, or of a module in it, with whole weights under each strategy.
        Every process calls it; where weights are sharded the main one alone gets something."""
        module = self.task if module is None else module
        sharding = self.strategy.sharding
        if not sharding.cuts or not self.strategy.is_set_up:  # its ranks have ended
            return module.state_dict()
        if self.is_on_main_alone:
            raise UserError(
                "trainer.whole_state_dict needs every rank, and only the main one calls "
                "on_predict_end; call it in on_predict_start"
            )
        return sharding.whole_state(module)

    def _read_losses(self, training: Training) -> None:
        """Checks the losses that were not read at once; waits for the GPU if there are any."""
        training.guard.read(self.global_step, self.checkpoint, self.run.directory)

    # ---- media, for the loggers that show them; on processes but the main one nothing happens

    @property
    def loggers(self) -> list[Logger]:
        """The loggers of this process: only the main one has any."""
        return self.recorder.loggers

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
        if self.mode != "fit" and not self.recorder.is_open:  # fit has opened it
            require_directory(self.recorder.loggers, self.run)
            self.recorder.open(self.strategy)
        self.recorder.show(form, name, *values, step=self.global_step)

    def _record(self, scalars: dict[str, float]) -> None:
        self.recorder.log(scalars, step=self.global_step)
        while self.task_metrics.tables:
            self.log_table(*self.task_metrics.tables.pop(0))
