"""task.metrics: on any task, by a config or from Python, and logged by their names."""

from typing import Any

import pytest
import torch
from command import attempts, write
from forked import on
from small import SGD, Rows, Small, fitted
from torch import Tensor, nn

from dpframe import Strategy, Task, UserError
from dpframe.named_metrics import NamedMetrics
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics import classification, regression  # noqa: E402


def error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).abs()


class Own(Task):
    """Its constructor says nothing of metrics, and its training is measured, too."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 1), SGD)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        guess = self.net(x)[:, 0]
        return {"loss": (guess - y).square().mean(), **self.metrics(guess, y)}


class Unaware(Own):
    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": (self.net(x)[:, 0] - y).square().mean()}


def doubled(metric: Any) -> Any:
    return metric.set_dtype(torch.float64)


def measured(strategy: Strategy | None = None, task: Any = Own, **more: Any) -> dict[str, float]:
    torch.manual_seed(0)
    made = task()
    # As a config sets it.
    metrics = {"r2": doubled(regression.R2Score()), "mae": error, "off": None}
    made.metrics = NamedMetrics(metrics)
    more = {"precision": "64", "max_epochs": 1, **more}
    return fitted(made, Rows(20, 6), strategy=strategy, **more).metrics


@pytest.mark.parametrize("strategy", [DDP(3, "cpu"), DataParallel(3, "cpu")])
def test_any_task_has_them_and_they_are_over_all_rows_on_every_strategy(strategy):
    expected = measured()
    assert expected.keys() == {f"{k}/{n}" for k in ("train", "val") for n in ("loss", "r2", "mae")}
    assert on(strategy, measured) == pytest.approx(expected, rel=1e-12)


def test_a_metric_is_that_of_all_rows_and_a_functions_the_mean_over_them():
    torch.manual_seed(0)
    task = Own()
    task.metrics = NamedMetrics({"r2": regression.R2Score(), "mae": error})
    metrics = fitted(task, Rows(20, 6), max_epochs=1).metrics
    x, y = Rows(20).held_out.tensors
    guess = task.net(x)[:, 0].detach()
    assert metrics["val/r2"] == pytest.approx(regression.R2Score()(guess, y).item(), rel=1e-5)
    assert metrics["val/mae"] == pytest.approx(error(guess, y).mean().item(), rel=1e-5)


@pytest.mark.parametrize("sanity_batches", [0, 2])
def test_a_step_that_does_not_measure_them_is_refused_in_one_line(sanity_batches):
    with pytest.raises(UserError) as caught:
        measured(task=Unaware, sanity_batches=sanity_batches)
    assert str(caught.value) == (
        "task.metrics.r2 is not measured by Unaware.validation_step; return "
        '{"loss": loss, **self.metrics(prediction, target)} there'
    )


class Held(Small):
    """What another container holds under this name is logged by its own name, too."""

    def __init__(self, metrics: Any) -> None:
        super().__init__()
        self.metrics = metrics

    def validation_step(self, batch: Any) -> Any:
        for metric in self.metrics.values():
            metric.update(self.net(batch[0])[:, 0], batch[1])
        return super().validation_step(batch)


@pytest.mark.parametrize("kind", [nn.ModuleDict, torchmetrics.MetricCollection])
def test_a_name_is_that_of_the_metric_whatever_holds_it(kind):
    metrics = fitted(Held(kind({"r2": regression.R2Score()})), max_epochs=1).metrics
    assert metrics.keys() == {"train/loss", "train/mae", "val/loss", "val/mae", "val/r2"}


class Counts(Small):
    """Its `metrics` are something else."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"steps": 0}

    def training_step(self, batch: Any) -> Any:
        self.metrics["steps"] += self.training
        return super().training_step(batch)


def test_a_tasks_own_attribute_of_this_name_stays_its_own_through_a_resume():
    made = fitted(Counts(), max_epochs=1, share_check="off")
    resumed = fitted(Counts(), max_epochs=2, share_check="off", resume=made.state_dict())
    assert made.task.metrics == {"steps": 5} and resumed.task.metrics == {"steps": 10}


def test_without_any_a_step_that_measures_them_adds_nothing():
    assert fitted(Own(), max_epochs=1).metrics.keys() == {"train/loss", "val/loss"}
    assert Task(metrics={"mae": error}).metrics.functions == {"mae": error}


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"auroc": classification.BinaryAUROC}, "task.metrics.auroc is BinaryAUROC; pass an "
            "object, e.g. BinaryAUROC(), or a function of (prediction, target)"),
        ({"auroc": "auroc"}, "task.metrics.auroc is str; pass an object, e.g. BinaryAUROC(), or a "
            "function of (prediction, target)"),
        ({"several": torchmetrics.MetricCollection([regression.R2Score()])},
            "task.metrics.several is MetricCollection; pass an object, e.g. BinaryAUROC(), or a "
            "function of (prediction, target)"),
        ({"loss": error}, "task.metrics has a metric named 'loss'; use another name, of letters, "
            "digits, _ and -"),
        ({"type": error}, "task.metrics has a metric named 'type'; use another name, of letters, "
            "digits, _ and -"),
    ],
)  # fmt: skip
def test_what_is_no_metric_is_refused_in_one_line(metrics, line):
    with pytest.raises(UserError) as caught:
        NamedMetrics(metrics)
    assert str(caught.value) == line


def test_what_a_metric_says_of_the_numbers_it_gets_is_one_line():
    asked = NamedMetrics({"r2": regression.R2Score(), "mae": lambda p, y: p.mean()})
    numbers = torch.rand(2)
    said = r"task\.metrics\.r2: R2Score of a prediction float32 \[2\] and a target float32 \[3\] s"
    with pytest.raises(UserError, match=said):
        asked(numbers, torch.rand(3))
    said = r"task\.metrics\.mae gave float32 \[\]; return a tensor with a value for each"
    with pytest.raises(UserError, match=said):
        asked.means(numbers, numbers)


OWN = """
import torch

from dpframe.recipes.boston import Boston

class Own(Boston):
    def validation_step(self, batch):
        guess = self.predict_step(batch)
        return {**super().validation_step(batch), **self.metrics(guess, batch[1])}

def error(guess, price):
    return (guess - price).abs()
"""


def test_the_command_adds_them_to_a_task_of_the_users_own(tmp_path):
    write(tmp_path, {"mine/own.py": OWN, "mine/recipe/.keep": ""})
    r2 = "r2:{_target_:torchmetrics.R2Score}"
    start = ["--config-dir=mine", "recipe=boston", "logger=none", "trainer.max_epochs=1"]
    own = [*start, "task._target_=mine.own.Own"]
    error = "error:{_target_:mine.own.error,_partial_:true}"
    done = attempts(
        [
            [*own, f"task.metrics={{{r2},{error}}}", "hydra.run.dir=run"],
            [*start, f"task.metrics={{{r2}}}"],
            [*own, "task.metrics={r2:{_target_:torchmetrics.R2Scor}}"],
            [*own, "task.metrics={r2:torchmetrics.R2Score}"],
        ],
        tmp_path,
    )
    assert [one.code or 0 for one in done] == [0, 2, 2, 2], [one.err for one in done]
    assert all(f"val/{name}" in done[0].out for name in ("r2", "error", "mae"))
    said = [one.err.strip().splitlines()[-1] for one in done[1:]]
    assert "task.metrics.r2 is not measured by Boston.validation_step" in said[0]
    assert "torchmetrics has no R2Scor; did you mean R2Score?" in said[1]
    assert "task.metrics.r2 is str; pass an object" in said[2]
