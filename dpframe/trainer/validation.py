"""The validation within a training run: its passes, and a try before training begins."""

from collections.abc import Iterable

from dpframe import seeding
from dpframe.errors import refuse_unmeasured
from dpframe.metrics import Means
from dpframe.task import Task
from dpframe.trainer.evaluation import AfterBatch, Evaluation, means_of, restore_modes
from dpframe.trainer.hooks import Hooks
from dpframe.trainer.profile import Timed, untimed


class Validation:
    """Over all validation sets; false where there is none."""

    def __init__(
        self, task: Task, evaluations: dict[str, Evaluation], timed: Timed = untimed
    ) -> None:
        self._task = task
        self.evaluations = evaluations  # by the data sets' names
        self._means_of = timed("validation", means_of)

    def __bool__(self) -> bool:
        return bool(self.evaluations)

    def means(self, *others: Means, after_batch: AfterBatch | None) -> dict[str, float]:
        """The exact means over all rows, e.g. {"val/loss": 0.5}; `others` share the all-reduce."""
        with restore_modes(self._task):
            return self._means_of(self.evaluations, *others, after_batch=after_batch)

    def measure_few(self, batches: int) -> list[str]:
        """The names of what is measured, from so many batches. Nothing is drawn or counted."""
        first = next(iter(self.evaluations.values()))
        random_state = seeding.random_state(first.devices)
        with restore_modes(self._task):
            names = means_of(self.evaluations, at_most=batches)
        seeding.restore_random_state(random_state, first.devices)
        first.task_metrics.tables.clear()
        return list(names)


def refuse_misspelt(
    monitored: Iterable[tuple[str, str]], measured: list[str], hooks: Hooks
) -> None:
    """Metrics that callbacks and schedulers wait for, by their keys, and that nothing measures."""
    for key, name in monitored:
        if not (name.startswith("train/") or hooks.may_log(name)):
            refuse_unmeasured(key, name, measured)
