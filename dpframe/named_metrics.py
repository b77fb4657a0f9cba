"""The metrics of `task.metrics`: each has a name, under which it is logged."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpframe.errors import UserError, first_line
from dpframe.metrics import fraction, is_metric
from dpframe.rows import current_share

NAME = re.compile(r"[A-Za-z0-9_-]+")
TAKEN = ("loss", "weight")  # by what a step returns
HOW = "pass an object, e.g. BinaryAUROC(), or a function of (prediction, target)"


class NamedMetrics(nn.Module):
    """A task's `self.metrics`: a step returns `{"loss": loss, **self.metrics(prediction, target)}`.

    A metric of torchmetrics is updated, and logged at the end of the pass. A function gives a
    value for each row, and the mean over all rows is logged.
    """

    def __init__(self, metrics: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.updated: list[str] = []  # the names of those of torchmetrics
        self.functions: dict[str, Callable[..., Any]] = {}
        if not isinstance(metrics, Mapping | None):
            given = type(metrics).__name__
            raise UserError(f"task.metrics is a {given}; name each metric: {{'mae': ...}}")
        for name, metric in (metrics or {}).items():
            if metric is None:  # switched off
                continue
            is_free = isinstance(name, str) and NAME.fullmatch(name) and not hasattr(self, name)
            if not is_free or name in TAKEN:
                raise UserError(
                    f"task.metrics has a metric named {name!r}; use another name, of letters, "
                    "digits, _ and -"
                )
            if is_metric(metric):
                self.add_module(name, metric)
                self.updated.append(name)
            elif callable(metric) and not isinstance(metric, type | nn.ModuleDict):
                self.functions[name] = metric
            else:
                given = metric.__name__ if isinstance(metric, type) else type(metric).__name__
                raise UserError(f"task.metrics.{name} is {given}; {HOW}")

    def forward(self, prediction: Any, target: Any) -> dict[str, Tensor]:
        """Updates those of torchmetrics; the means of the functions, for the step to return."""
        self.update(prediction, target)
        return self.means(prediction, target)

    def update(self, prediction: Any, target: Any) -> None:
        for name in self.updated:
            metric: Any = getattr(self, name)
            try:
                metric.update(prediction, target)
            except (ValueError, TypeError, RuntimeError) as error:
                is_theirs = type(metric).__module__.startswith("torchmetrics.")
                if not is_theirs or isinstance(error, torch.OutOfMemoryError):
                    raise
                raise UserError(
                    f"task.metrics.{name}: {type(metric).__name__} of a prediction "
                    f"{_shape(prediction)} and a target {_shape(target)} says: {first_line(error)}"
                ) from error

    def refuse_unmeasured(self, step: str, names: Iterable[str]) -> None:
        """A step of the user's own may know nothing of these. `names` are those of all means and
        results of its pass."""
        wanted = [*self.updated, *self.functions]
        ends = tuple(f"/{name}" for name in self.functions)
        if wanted and not any(name.startswith("metrics.") or name.endswith(ends) for name in names):
            raise UserError(
                f"task.metrics.{wanted[0]} is not measured by {step}; return "
                '{"loss": loss, **self.metrics(prediction, target)} there'
            )

    def means(self, prediction: Any, target: Any) -> dict[str, Tensor]:
        found = {}
        for name, function in self.functions.items():
            values = function(prediction, target)
            is_by_row = isinstance(values, Tensor) and values.ndim > 0
            if not is_by_row or current_share.rows not in (0, len(values)):
                raise UserError(
                    f"task.metrics.{name} gave {_shape(values)}; return a tensor with a value for "
                    "each row, whose mean is logged"
                )
            found[name] = values.mean() if values.is_floating_point() else fraction(values)
        return found


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


NONE = NamedMetrics()
"""Of a task that has none."""
