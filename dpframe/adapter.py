"""What the Trainer asks of a task around another framework's module, such as Lightning's."""

from collections.abc import Set
from typing import Any


class Adapter:
    """A task without one has these defaults."""

    needs_trainer = False  # even for a single step
    prefers_metrics = False  # a metric's result may have the name of a mean: see logs_metric
    kept_metrics: Set[str] = frozenset()  # metrics that it resets itself, e.g. a best of all epochs
    keeps_state: bool | None = None  # in checkpoints, of its own; None: where it has on_save
    ends_passes = False  # by `end_pass`, for which metrics get the states of all rows

    def begin_pass(self, kind: str) -> None:
        """Before the batches of a validation, a test or a prediction: `val`, `test`, `predict`."""

    def end_pass(self, kind: str, numbers: dict[str, float]) -> dict[str, float]:
        """More numbers of a pass, or of an epoch of training, beside those that were measured.
        Every process calls it, and has to return the same."""
        return {}

    def step_alone(self, task: Any, step: str, *args: Any, **named: Any) -> dict[str, Any]:
        """What the share check calls, before a run: a training, validation or test step without
        what belongs to a run. All that it changes is put back."""
        return getattr(task, step)(*args, **named)

    def metric_name(self, kind: str, name: str) -> str:
        """Under which name the result of a metric that it holds is logged."""
        return name.removeprefix("metrics.")  # of what holds all of them, e.g. NamedMetrics

    def logs_metric(self, kind: str, name: str) -> bool:
        """Whether it has logged a metric that it holds by `metric_name`, as Lightning's do."""
        return False
