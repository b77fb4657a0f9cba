"""The hooks, as one annotated loop. Override what you need: the rest does nothing.

    on_fit_start
    for epoch:   on_epoch_start
        for step:
            for batch:   on_batch_start   forward, backward   on_batch_end
            on_before_step   clipping, optimizer.step()
            on_step_end
            validation, every n steps
        validation, every n epochs:
            on_validation_start   for batch: on_validation_batch_end   on_validation_end
        on_epoch_end
    on_fit_end / on_exception

Within a hook, callbacks run in the order of the config; those with `reads_metrics` come after them,
and those with `runs_last` last. A Task may have methods with these names and the same arguments:
they come first. With several optimizers, the batches up to `on_before_step` come once for each of
them. `on_save` and `on_load` come with each checkpoint that is made, and with the one that a run
resumes from.
`mode=validate` has the hooks of validation, and the other modes their own:
`on_test_start`, `on_test_batch_end`, `on_test_end`, `on_predict_start`, `on_predict_batch_end`,
`on_predict_end`.
Hooks run in every process; only the one where `trainer.strategy.is_main` may print and write.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpframe.data import Batch
    from dpframe.trainer import Predictions, Trainer


class Callback:
    """Acts at the loop's hooks: override those that you need.

    A class may set `reads_metrics` (it is called after the callbacks that add metrics), `runs_last`
    (after all others), `needs_directory` (`fit` refuses to begin without a run directory),
    `shows_banner` (it prints what a run is) and `logs` (whether it adds metrics, where its methods
    don't show that).
    A constructor may set `watches`, which names its state in a checkpoint beside its class.
    """

    reads_metrics = False  # True: after those that may add to them by `trainer.log`
    runs_last = False  # True: after all others, so that it sees what they decided
    needs_directory = False  # True: `fit` refuses to begin without `trainer.run.directory`
    shows_banner = False  # True: prints `layers` of a run; else warnings say what is there
    logs: bool | None = None  # whether it adds metrics; None: if a method calls `trainer.log`
    watches = ""  # e.g. a metric: others of this class, that watch another one, have other states

    def reset(self) -> None:
        """A fit without `resume` begins: forget what the run before has come to."""

    def monitored(self) -> list[tuple[str, str]]:
        """The metrics that it needs, by their keys: a misspelt one is refused before training."""
        return []

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Everything is built and placed; no step has been taken yet."""

    def on_epoch_start(self, trainer: "Trainer") -> None:
        """`trainer.epoch` epochs are done."""

    def on_batch_start(self, trainer: "Trainer", batch: "Batch") -> None:
        """`batch.shares` are those of this process's replicas, on their devices."""

    def on_batch_end(
        self, trainer: "Trainer", batch: "Batch", outputs: list[dict[str, Any]]
    ) -> None:
        """`outputs` is what training_step returned for each share, without gradients."""

    def on_before_step(self, trainer: "Trainer") -> None:
        """The whole job's gradients are in `grad` of the weights of `trainer.update.optimizer`, not
        clipped; under fsdp shards of them.

        `trainer.recompute_gradients()` computes them again, at the weights as they are now. What
        is drawn here has to be the same in all processes. A task that steps its optimizers itself
        has stepped them already.
        """

    def on_step_end(self, trainer: "Trainer") -> None:
        """`trainer.global_step` updates are done. The hot path: read no tensor here."""

    def on_validation_start(self, trainer: "Trainer") -> None:
        """Before the first batch of all validation sets."""

    def on_validation_batch_end(
        self, trainer: "Trainer", batch: "Batch", outputs: list[dict[str, Any]]
    ) -> None:
        """`batch.name` is that of the data set, where there are several."""

    def on_validation_end(self, trainer: "Trainer") -> None:
        """`trainer.metrics` holds the new val/ numbers."""

    def on_epoch_end(self, trainer: "Trainer") -> None:
        """`trainer.metrics` holds the epoch's train/ and val/ numbers."""

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Training is over, and nothing went wrong."""

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None:
        """Training ends by this error; a signal is an `Interrupted`."""

    def on_test_start(self, trainer: "Trainer") -> None:
        """Before the first batch of all test sets."""

    def on_test_batch_end(
        self, trainer: "Trainer", batch: "Batch", outputs: list[dict[str, Any]]
    ) -> None:
        """As `on_validation_batch_end`."""

    def on_test_end(self, trainer: "Trainer") -> None:
        """`trainer.metrics` holds the test/ numbers."""

    def on_predict_start(self, trainer: "Trainer") -> None:
        """Before the first batch of all sets to predict."""

    def on_predict_batch_end(self, trainer: "Trainer", batch: "Batch", outputs: list[Any]) -> None:
        """`outputs` is what predict_step returned for each share."""

    def on_predict_end(self, trainer: "Trainer", predictions: "Predictions") -> None:
        """Called on the main process alone: the others have no predictions."""

    def on_save(self, trainer: "Trainer", state: dict[str, Any]) -> None:
        """`state` is what a checkpoint will hold: numbers, text, tensors, lists and dicts."""

    def on_load(self, trainer: "Trainer", state: dict[str, Any]) -> None:
        """A run resumes, and all of `state` is restored."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: numbers, text, tensors, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` returned when the checkpoint was made."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
