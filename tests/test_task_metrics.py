"""A task holds torchmetrics: each is one metric over all rows of a pass, on every strategy."""

import csv
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked import on
from recorded import once
from small import Hooks, Small, fitted, is_same, strategy_of, trainer
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpframe import Callback, DataModule, Logger, Strategy, Trainer, UserError
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.callbacks.early_stopping import EarlyStopping
from dpframe.loggers.csv import CSV
from dpframe.strategies.collectives import Collectives
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU
from dpframe.trainer.task_metrics import TaskMetrics

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics import aggregation, classification, regression, retrieval, wrappers  # noqa: E402

WHERE = ["cpu-1", "data_parallel-3", "ddp-1", "ddp-3", "ddp-4"]
BATCH_SIZE = 4


class Scores(DataModule):
    """Rows with a score, a label, a class and a mark: 22 to train on, and 13 held out.

    Each fourth row has the mark: on several replicas a batch's is in the share of the last one.
    """

    def __init__(self) -> None:
        super().__init__(BATCH_SIZE)
        draw = torch.Generator().manual_seed(5)
        x = torch.randn(35, 3, generator=draw, dtype=torch.float64)
        score = torch.rand(35, generator=draw, dtype=torch.float64)
        label = (torch.rand(35, generator=draw) < 0.3 + 0.4 * score).long()
        group = torch.randint(3, (35,), generator=draw)
        mark = torch.arange(13, 13 + 35) % BATCH_SIZE == 2
        columns = x, x.sum(dim=1), score, label, group, mark
        self.train = TensorDataset(*(column[:22] for column in columns))
        self.held_out = TensorDataset(*(column[22:] for column in columns))

    def train_dataset(self) -> Dataset:
        return self.train

    def val_dataset(self) -> Dataset:
        return self.held_out

    def test_dataset(self) -> dict[str, Dataset]:
        return {"a": self.part(slice(6)), "b": self.part(slice(6, None))}

    def part(self, rows: slice) -> TensorDataset:
        return TensorDataset(*(column[rows] for column in self.held_out.tensors))


class Largest(torchmetrics.Metric):
    """As users write them: it says nothing of `full_state_update`."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sum", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("largest", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="max")

    def update(self, score: Tensor) -> None:
        self.sum += torch.stack([score.sum(), score.square().sum()])
        self.largest = torch.maximum(self.largest, score.max())

    def compute(self) -> dict[str, Any]:
        return {"largest": self.largest, "sums": self.sum}


def in_doubles(metric: Any) -> Any:
    return metric.set_dtype(torch.float64)


MAKE: dict[str, Any] = {
    "f1": classification.BinaryF1Score,
    "auroc": classification.BinaryAUROC,
    "confusion": classification.BinaryConfusionMatrix,
    "mean": lambda: in_doubles(aggregation.MeanMetric()),
    "rare": classification.BinaryAccuracy,
    "maximum": lambda: in_doubles(aggregation.MaxMetric()),
    "pearson": lambda: in_doubles(regression.PearsonCorrCoef()),
    "spearman": regression.SpearmanCorrCoef,
    "ranking": retrieval.RetrievalMRR,
    "classwise": lambda: wrappers.ClasswiseWrapper(
        classification.MulticlassAccuracy(num_classes=3, average=None)
    ),
    "sum": lambda: classification.BinaryPrecision() + classification.BinaryRecall(),
    "own": Largest,
    "several": lambda: torchmetrics.MetricCollection(
        {
            "precision": classification.BinaryPrecision(),
            "recall": classification.BinaryRecall(),
            "auroc": classification.BinaryAUROC(),
        },
        prefix="c_",
    ),
}


def update(metrics: Any, columns: list[Tensor]) -> None:
    _, y, score, label, group, mark = columns
    for name, metric in metrics.items():
        if name == "rare":
            if mark.any():
                metric.update(score[mark], label[mark])
            continue
        if name in ("mean", "maximum", "own"):
            metric.update(score)
        elif name in ("pearson", "spearman"):
            metric.update(score, y)
        elif name == "ranking":
            metric.update(score, label, indexes=group)
        elif name == "classwise":
            metric.update(torch.stack([score, 1 - score, 2 * score - 0.5], dim=1), group)
        elif name == "f1":
            metric(score, label)  # updates it, too
        else:
            metric.update(score, label)


class Judged(Small):
    """Holds metrics by their names. On the main process it asks for a result in each step."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or MAKE:
            self.add_module(name, MAKE[name]())

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        metrics = {name: part for name, part in self.named_children() if name in MAKE}
        update(metrics, batch)
        if self.rank == 0 and "f1" in metrics:
            assert metrics["f1"].compute() <= 1
        return super().training_step(batch[:2])


def over_all(dataset: TensorDataset) -> dict[str, float]:
    """The numbers of metrics that see all rows at once."""
    results: dict[str, Any] = {}
    for name, make in MAKE.items():
        metric = make()
        update({name: metric}, list(dataset.tensors))
        result = metric.compute()
        if name == "several":
            results |= result
        elif isinstance(result, dict):
            results |= {f"{name}/{key}": value for key, value in result.items()}
        else:
            results[name] = result
    sums = results.pop("own/sums", [])
    results |= {f"own/sums_{index}": value for index, value in enumerate(sums)}
    results.pop("confusion", None)
    return {name: float(value) for name, value in results.items()}


# The same numbers everywhere, and after a resume


class Takes(Callback):
    """Keeps what a checkpoint would hold after this step. The second epoch's last is 12, which has
    rows for two replicas."""

    def __init__(self, step: int = 11) -> None:
        self.step = step
        self.state = b""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.global_step == self.step:
            self.state = trainer.strategy.collectives.broadcast(pickle.dumps(trainer.state_dict()))


def fit(task: Small, strategy: Strategy | None = None, **settings: Any) -> Trainer:
    settings = {"max_epochs": 2, "validate_every_steps": 4, "precision": "64", **settings}
    return fitted(task, Scores(), strategy=strategy, **settings)


def results_on(strategy: Strategy) -> dict[str, Any]:
    """In every process: of the last epoch, with validations within it, and of a test."""
    takes = Takes()
    made = fit(Judged(), strategy, callbacks=[takes])
    resumed = fit(Judged(), strategy, resume=pickle.loads(takes.state))
    made.test()
    resumed.test()
    return {
        "state": takes.state,
        "metrics": strategy.collectives.gather(made.metrics),
        "resumed": strategy.collectives.gather(resumed.metrics),
    }


@once
def results(where: str) -> dict[str, Any]:
    return on(strategy_of(where), results_on)


def rows_of(kind: str) -> TensorDataset:
    data = Scores()
    return {
        "train": data.train,
        "val": data.held_out,
        "test": data.held_out,
        "test/a": data.part(slice(6)),
        "test/b": data.part(slice(6, None)),
    }[kind]


def assert_is_over_all(metrics: dict[str, float], kind: str) -> None:
    expected = {f"{kind}/{name}": value for name, value in over_all(rows_of(kind)).items()}
    sets = ("test/a/", "test/b/") if kind == "test" else ()
    mine = {name for name in metrics if name.startswith(f"{kind}/") and not name.startswith(sets)}
    assert mine == expected.keys() | {f"{kind}/loss", f"{kind}/mae"}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("kind", ["train", "val", "test/a", "test/b", "test"])
@pytest.mark.parametrize("where", WHERE)
def test_results_are_those_of_one_metric_over_all_rows_of_the_pass(where, kind):
    everywhere = results(where)["metrics"]
    assert len(everywhere) == (int(where[-1]) if where.startswith("ddp") else 1)
    for metrics in everywhere:
        assert_is_over_all(metrics, kind)


@pytest.mark.parametrize("where", WHERE)
def test_a_resume_within_an_epoch_ends_with_the_same_results_to_the_bit(where):
    found = results(where)
    resumed, metrics = ([of_metrics(one) for one in found[run]] for run in ("resumed", "metrics"))
    assert is_same(resumed, metrics)
    assert all(one.keys() >= {"train/auroc", "val/mean", "test/rare"} for one in resumed)


def of_metrics(numbers: dict[str, float]) -> dict[str, float]:
    """Without what depends on the weights: several ranks may add gradients in any order."""
    return {k: v for k, v in numbers.items() if not k.endswith(("/loss", "/mae"))}


@pytest.mark.parametrize("step", [9, 12])
def test_a_state_is_not_changed_by_the_run_that_resumes_from_it(step):
    """After the last step nothing is updated any more, and there is a result all the same."""
    takes = Takes(step)
    metrics = fit(Judged(), callbacks=[takes]).metrics
    state = pickle.loads(takes.state)
    assert all(is_same(fit(Judged(), resume=state).metrics, metrics) for _ in range(2))


@pytest.mark.parametrize("there", ["ddp-3", "cpu-1"])
def test_another_number_of_processes_takes_all_that_the_epoch_has_counted(there):
    strategy = CPU() if there == "ddp-3" else DDP(2, "cpu")
    for metrics in on(strategy, resumed_twice_on, results(there)["state"]):
        assert_is_over_all(metrics, "train")


def resumed_twice_on(strategy: Strategy, state: bytes) -> list[dict[str, float]]:
    takes = Takes(step=12)
    once = fit(Judged(), strategy, resume=pickle.loads(state), callbacks=[takes]).metrics
    return [once, fit(Judged(), strategy, resume=pickle.loads(takes.state)).metrics]


class Two(Collectives):
    """This process, and another one with the same rows."""

    def gather(self, value: Any) -> list[Any]:
        return [value, value if self.other is None else self.other]

    other: Any = None


def test_a_collection_that_is_only_restored_has_the_groups_of_other_processes():
    """torchmetrics forms them at an update, and this process has no row of the rest."""
    rows = list(Scores().train.tensors)
    task, strategy = Judged("several"), Strategy()
    strategy.world_size, strategy.collectives = 2, (two := Two())
    held = TaskMetrics(task, strategy)
    task.double().training_step(rows)
    two.other, expected = held.state_dict(), held.results("train")({})
    resumed = TaskMetrics(Judged("several"), strategy)
    resumed.load_state_dict([two.other, two.other], rank=0, world_size=2)
    assert len(expected) == 3 and resumed.results("train")({}) == expected


@pytest.mark.parametrize(
    ("count", "is_told"),
    [
        (lambda mean, rows: mean.update(rows.mean()), True),
        (lambda mean, rows: mean.update(rows.mean(), weight=len(rows)), False),
        (lambda mean, rows: mean.update(rows), False),
    ],
    ids=["calls", "weighed", "rows"],
)
def test_a_mean_that_counts_each_share_alike_is_told_once(count, is_told, caplog):
    strategy = Strategy()
    strategy.world_size = strategy.replicas = 2
    strategy.collectives = Two()
    task = Holds(print, mean=aggregation.MeanMetric())
    held = TaskMetrics(task, strategy)
    for rows in (4, 3):
        count(task.mean, torch.arange(rows) / 2)
    for _ in range(2):
        held.results("train")({})
    told = "mean weights each call equally, not each row: if shares are uneven, its mean differs"
    assert [told in message for message in caplog.messages] == [True] * is_told


# What is logged


def test_results_are_in_the_epochs_row_and_watched_and_a_matrix_is_a_table(tmp_path):
    """They do not depend on the weights: the second validation is no better."""
    made = fit(
        Judged("f1", "confusion", "several"),
        callbacks=[EarlyStopping("val/f1", "max", patience=1), Checkpoint("val/c_auroc", "max")],
        loggers=[CSV()],
        directory=tmp_path,
        max_epochs=9,
        validate_every_steps=None,
    )
    assert made.stop_reason.startswith("val/f1 has not got better than")
    with open(tmp_path / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["val/f1"]]
    assert [int(row["step"]) for row in rows] == [6, 12]
    names = ["f1", "c_precision", "c_recall", "c_auroc"]
    for name in [f"{kind}/{name}" for kind in ("train", "val") for name in names]:
        assert float(rows[1][name]) == made.metrics[name]
    saved = torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)
    assert saved["metrics"]["val/c_auroc"] == made.metrics["val/c_auroc"]
    table = (tmp_path / "tables/val_confusion-step12.csv").read_text().splitlines()
    confusion = MAKE["confusion"]()
    update({"confusion": confusion}, list(Scores().held_out.tensors))
    assert table == ["row,0,1", *(f"{n},{a},{b}" for n, (a, b) in enumerate(confusion.compute()))]


class Tables(Logger):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def table(self, name: str, columns: Any, rows: Any, *, step: int) -> None:
        self.seen.append((name, step))


def test_a_table_of_a_validation_before_training_is_not_logged_in_it():
    tables = Tables()
    made = trainer(Judged("confusion"), Scores(), precision="64", loggers=[tables])
    made.validate()
    made.fit()
    assert tables.seen == [(f"{k}/confusion", step) for step in (6, 12) for k in ("val", "train")]


class Holds(Small):
    """Its step calls `count(task, batch)`, and returns what that returns, too."""

    def __init__(self, count: Callable[[Any, list[Tensor]], Any], **metrics: Any) -> None:
        super().__init__()
        for name, metric in metrics.items():
            setattr(self, name, metric)
        self.count = count

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return super().training_step(batch[:2]) | (self.count(self, batch) or {})


def test_a_metric_is_logged_for_the_passes_that_update_it():
    def count(task: Any, batch: list[Tensor]) -> None:
        if not task.training:
            task.heads[0].update(batch[2], batch[3])
            task.labels.update(
                torch.stack(batch[2:3] * 2, dim=1), torch.stack(batch[3:4] * 2, dim=1)
            )

    heads = nn.ModuleList([MAKE["f1"](), MAKE["auroc"]()])
    auroc = classification.MultilabelAUROC(num_labels=2, average=None)
    labels = wrappers.ClasswiseWrapper(auroc, ["a", "b"], prefix="of_")
    assert fit(Holds(count, heads=heads, labels=labels)).metrics.keys() == {
        *("train/loss", "train/mae", "val/loss", "val/mae"),
        *("val/heads.0", "val/labels/of_a", "val/labels/of_b"),
    }


@pytest.mark.parametrize("is_called", [False, True], ids=["updated", "called"])
@pytest.mark.parametrize(
    "where", [CPU(), DataParallel(2, "cpu"), DDP(2, "cpu")], ids=["cpu", "data_parallel", "ddp"]
)
def test_extremes_are_those_of_the_pass_alone(where, is_called):
    assert on(where, has_own_extremes, is_called)


def has_own_extremes(strategy: Strategy, is_called: bool) -> bool:
    """MinMaxMetric keeps its extremes beside its states, through its own reset."""

    def count(task: Any, batch: list[Tensor]) -> None:
        (task.extremes if is_called else task.extremes.update)(batch[2] + 5 * task.training)

    rows: list[dict[str, float]] = []
    take = Hooks(on_epoch_end=lambda trainer: rows.append(dict(trainer.metrics)))
    extremes = wrappers.MinMaxMetric(aggregation.MeanMetric())
    task = Holds(count, extremes=extremes)
    fit(task, strategy, callbacks=[take], max_epochs=2, share_check="off")
    return all(
        row[f"{kind}/extremes/{name}"] == pytest.approx(row[f"{kind}/extremes/raw"])
        for row in rows
        for kind in ("train", "val")
        for name in ("min", "max")
    )


def test_a_composed_metric_is_logged_for_the_passes_that_update_what_it_is_made_of():
    def count(task: Any, batch: list[Tensor]) -> None:
        if task.training:
            task.top.update(batch[2])
            task.below.update(batch[2] + 1)

    top, below = aggregation.SumMetric(), aggregation.SumMetric()
    task = Holds(count, top=top, below=below, ratio=top / below)
    metrics = fit(task).metrics
    assert (
        0 < metrics["train/ratio"] == pytest.approx(metrics["train/top"] / metrics["train/below"])
    )
    assert "val/ratio" not in metrics

    def in_one(task: Any, batch: list[Tensor]) -> None:
        if task.training:
            task.ratio.update(batch[2])

    both = aggregation.SumMetric() / aggregation.MeanMetric()
    assert {"train/ratio"} == {n for n in fit(Holds(in_one, ratio=both)).metrics if "ratio" in n}


def of_a_window(strategy: Strategy, **settings: Any) -> dict[str, float]:
    def count(task: Any, batch: list[Tensor]) -> None:
        if task.training:
            task.running(float(task.run_context.batch_index))

    running = torchmetrics.aggregation.RunningMean(window=3)
    return fit(Holds(count, running=running), strategy, **settings).metrics


def test_a_running_mean_whose_forward_counts_no_update_is_logged():
    metrics = of_a_window(CPU())
    assert metrics["train/running"] == 4.0  # of the batches 3, 4 and 5
    assert "val/running" not in metrics


def is_refused(strategy: Strategy, **settings: Any) -> bool:
    with pytest.raises(UserError, match="RunningMean of torchmetrics, whose window counts updates"):
        of_a_window(strategy, **settings)
    return True


@pytest.mark.parametrize("strategy", [DataParallel(2, "cpu"), DDP(2, "cpu")])
def test_a_window_of_updates_is_refused_on_several_replicas(strategy):
    assert on(strategy, is_refused)


def test_gradients_that_are_computed_again_count_no_row_again():
    recompute = Hooks(on_before_step=lambda trainer: trainer.recompute_gradients())
    assert_is_over_all(fit(Judged(), callbacks=[recompute]).metrics, "train")


def test_what_is_no_number_and_no_matrix_is_one_warning(caplog):
    def count(task: Any, batch: list[Tensor]) -> None:
        task.roc.update(batch[2], batch[3])

    metrics = fit(Holds(count, roc=classification.BinaryROC())).metrics
    assert metrics.keys() == {"train/loss", "train/mae", "val/loss", "val/mae"}
    assert [message for message in caplog.messages if "roc" in message] == [
        f"{kind}/roc is not logged: the metric's result is a tuple, and no number"
        for kind in ("val", "train")
    ]


def test_an_error_of_a_metric_names_it():
    class Broken(aggregation.MeanMetric):
        def compute(self) -> Any:
            raise ValueError("a bug")

    def update(task: Any, batch: list[Tensor]) -> None:
        task.score.update(1.0)

    with pytest.raises(ValueError, match="a bug") as caught:
        fit(Holds(update, score=Broken()))
    assert caught.value.__notes__ == ["while computing the metric score of Holds"]


def test_sixteen_bits_do_not_count():
    made = trainer(Holds(print, mean=aggregation.MeanMetric()), precision="bf16-true")
    assert made.task.mean.metric_state["mean_value"].dtype == torch.float32


# What can't be


class Copies(Strategy):
    replicates_task = True


def both(name: str, kind: str = "f1") -> Any:
    return torchmetrics.MetricCollection({name: MAKE[kind]()})


def count_all(task: Any, batch: list[Tensor]) -> Any:
    for name in ("first", "second"):
        getattr(task, name).update(batch[2], batch[3])
    return {"f1": torch.tensor(0.5)}


@pytest.mark.parametrize(
    "metrics, strategy, said",
    [
        (
            {"first": both("a"), "second": both("a")},
            None,
            "val/a is the result of a metric of Holds, and of another one; rename one of them, "
            "e.g. by MetricCollection(..., prefix='top5_')",
        ),
        (
            {"first": both("f1"), "second": both("a")},
            None,
            "val/f1 is the result of a metric of Holds, and in what its step returns; rename one "
            "of them, e.g. by MetricCollection(..., prefix='top5_')",
        ),
        (
            {"first": both("f1", "confusion"), "second": both("a")},
            None,
            "val/f1 is the result of a metric of Holds, and in what its step returns; rename one "
            "of them, e.g. by MetricCollection(..., prefix='top5_')",
        ),
        (
            {"first": MAKE["f1"]()},
            Copies(),
            "Holds.first is a BinaryF1Score of torchmetrics, and Copies runs steps on copies of "
            "the task, whose updates are lost; use strategy=ddp, or trainer.gpus=1",
        ),
    ],
)
def test_a_metric_that_can_not_be_told_apart_or_counted_is_refused(metrics, strategy, said):
    with pytest.raises(UserError) as caught:
        fit(Holds(count_all, **metrics), strategy)
    assert str(caught.value) == said


def test_processes_that_share_states_between_other_metrics_are_refused():
    """torchmetrics decides by the first batch: here one of a process's rows where two agree."""
    message = "Top.top shares states between different metrics on different "
    with pytest.raises(UserError, match=message + r"processes; use .* compute_groups=False"):
        on(DDP(2, "cpu"), validated_on)


class Top(Small):
    def __init__(self) -> None:
        super().__init__()
        kinds = {str(k): classification.MulticlassAccuracy(3, top_k=k) for k in (1, 2)}
        self.top = torchmetrics.MetricCollection(kinds)

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        guesses = torch.eye(3)[torch.full_like(batch[4], self.rank)]
        self.top.update(guesses, torch.zeros_like(batch[4]))
        return super().training_step(batch[:2])


def validated_on(strategy: Strategy) -> None:
    trainer(Top(), Scores(), strategy=strategy, precision="64").validate()


@pytest.mark.parametrize("states", [3, {"tp": 3}, {"tp": [torch.ones(2)]}])
def test_states_that_are_none_are_refused_in_one_line(states):
    takes = Takes()
    fit(Judged("f1"), callbacks=[takes])
    state = pickle.loads(takes.state)
    state["progress"]["task_metrics"][0][0]["f1"] = states
    with pytest.raises(UserError, match=r"^resume= has what this run would not have written: "):
        fit(Judged("f1"), resume=state)
