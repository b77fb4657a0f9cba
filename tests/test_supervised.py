"""Supervised: a task without a class, the same numbers as one that is written by hand."""

import json
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from command import attempts, dpframe, write
from forked import on
from recorded import once
from small import SGD, is_same
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dpframe import Callback, Strategy, Trainer, UserError, seeding
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU
from dpframe.supervised import Supervised

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics import classification  # noqa: E402

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
AMOUNT = X.sum(dim=1, keepdim=True)
IS_LARGE = (AMOUNT > 0).long()
CLASS = (X.sum(dim=1) > 0).long() + (X[:, 0] > 1).long()
IGNORED = CLASS.masked_fill(torch.arange(40) % 7 == 0, 9)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


def error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).abs()


def hit(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction > 0) == target


KINDS: dict[str, tuple[Tensor, int, Callable[[], Any], dict[str, Callable[[], Any]]]] = {
    "amount": (AMOUNT, 1, lambda: "mse_loss", {"mae": lambda: error}),
    "is_large": (
        IS_LARGE,
        1,
        lambda: "binary_cross_entropy_with_logits",
        {"auroc": classification.BinaryAUROC, "hit": lambda: hit},
    ),
    "class": (
        CLASS,
        3,
        lambda: nn.CrossEntropyLoss(weight=WEIGHTS),
        {"f1": lambda: classification.MulticlassF1Score(3)},
    ),
    "ignored": (IGNORED, 3, lambda: partial(functional.cross_entropy, ignore_index=9), {}),
}


def trained(kind: str, strategy: Strategy | None = None, resume: Any = None, **more: Any) -> Any:
    target, width, loss, metrics = KINDS[kind]
    train, val = (TensorDataset(X[part], target[part]) for part in (slice(22), slice(22, 40)))
    with seeding.seeded(0):
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, width))
    made = {name: make() for name, make in metrics.items()}
    task = Supervised(net, loss(), partial(torch.optim.SGD, lr=0.1), metrics=made)
    more = {"max_epochs": 2, "precision": "64", "threads": 1, **more}
    trainer = Trainer(task, train, val, test=val, batch_size=5, strategy=strategy, **more)
    trainer.fit(resume)
    return trainer


class Takes(Callback):
    """What a checkpoint would hold after each step."""

    def __init__(self) -> None:
        self.states: list[bytes] = []

    def on_step_end(self, trainer: Trainer) -> None:
        state = pickle.dumps(trainer.state_dict())
        self.states.append(trainer.strategy.collectives.broadcast(state))


def of_strategy(strategy: Strategy) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        trainer = trained(kind, strategy, callbacks=[takes := Takes()])
        resumed = trained(kind, strategy, resume=pickle.loads(takes.states[6]))
        trainer.test()
        resumed.test()
        predictions = trainer.predict()
        is_main = predictions is not None
        shape = predictions.joined().shape if is_main else None
        found[kind] = trainer.metrics, resumed.metrics, shape
    return found


@once
def found(where: str) -> dict[str, Any]:
    strategies = {"cpu": CPU, "data_parallel": DataParallel, "ddp": DDP, "fsdp": FSDP}
    name, _, replicas = where.partition("-")
    return on(strategies[name](int(replicas or 1), "cpu"), of_strategy)


HAS_FSDP = pytest.mark.skipif(torch.__version__ < "2.13", reason="strategy=fsdp needs torch 2.13")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "where", ["data_parallel-3", "ddp-3", pytest.param("fsdp-2", marks=HAS_FSDP)]
)
def test_its_numbers_are_the_same_on_every_strategy_and_after_a_resume(kind, where):
    (expected, again, shape), (metrics, resumed, same_shape) = (
        found("cpu")[kind],
        found(where)[kind],
    )
    assert metrics == pytest.approx(expected, rel=1e-12) and is_same(again, expected)
    assert resumed == pytest.approx(expected, rel=1e-12)
    assert same_shape == shape == (18, KINDS[kind][1])
    names = {"loss", *KINDS[kind][3]}
    assert expected.keys() == {"train/loss", *(f"{k}/{n}" for k in ("val", "test") for n in names)}


@pytest.mark.parametrize("kind", ["class", "ignored"])
def test_a_loss_that_weighs_or_ignores_targets_is_over_all_of_them(kind):
    trainer = trained(kind)
    target, _, loss, _ = KINDS[kind]
    function: Any = loss()
    with torch.no_grad():
        expected = function(trainer.task.net(X[22:]), target[22:]).item()
    assert trainer.metrics["val/loss"] == pytest.approx(expected, rel=1e-12)


def test_metrics_of_torchmetrics_get_probabilities_though_a_batch_of_logits_may_look_alike():
    logits = torch.tensor([[0.1], [0.9], [3.0], [-2.0]])
    target = torch.tensor([[0], [1], [0], [1]])
    loss, kept = nn.BCEWithLogitsLoss(), torchmetrics.CatMetric()
    task = Supervised(nn.Identity(), loss, metrics={"kept": kept})
    seen: list[Tensor] = []
    kept.update = lambda prediction, target: seen.append(prediction)
    for rows in (slice(2), slice(2, 4)):  # those of the first are from 0 to 1
        task.validation_step((logits[rows], target[rows]))
    assert torch.equal(torch.cat(seen), logits.sigmoid())


def test_without_an_optimizer_it_is_adam_and_a_class_or_a_partial_are_taken():
    for given, kind in ((None, torch.optim.Adam), (torch.optim.SGD, torch.optim.SGD), (SGD,) * 2):
        made = Supervised(nn.Linear(1, 1), "mse_loss", given).configure_optimizer()
        assert type(made) is getattr(kind, "func", kind)


BATCHES = [  # the keys, and batches of two rows
    ((), [(X[:2], AMOUNT[:2]), [X[:2], AMOUNT[:2]]]),
    (("x", "y"), [{"x": X[:2], "y": AMOUNT[:2], "id": 3}]),
    ((0, 2), [(X[:2], "ids", AMOUNT[:2])]),
]


@pytest.mark.parametrize(("keys", "batches"), BATCHES)
def test_a_batch_is_a_pair_or_has_two_keys(keys, batches):
    net = nn.Linear(3, 1).double()
    task = Supervised(net, "mse_loss", **dict(zip(("input", "target"), keys, strict=False)))
    for batch in batches:
        measured = task.training_step(batch)
        assert measured["loss"] == functional.mse_loss(net(X[:2]), AMOUNT[:2])
        assert torch.equal(task.predict_step(batch), net(X[:2]))
    assert torch.equal(task.predict_step(X[:2]), net(X[:2]))


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: Supervised(nn.Linear(3, 1), "mse"),
        "task.loss=mse is no loss of torch.nn.functional; did you mean mse_loss?"),
    (lambda: Supervised(nn.Linear(3, 1), "relu"),
        "task.loss=relu is no loss of torch.nn.functional; name one, e.g. cross_entropy or "
        "mse_loss"),
    (lambda: Supervised(nn.Linear(3, 1), nn.MSELoss),
        "Supervised: loss=MSELoss; pass an object, e.g. torch.nn.CrossEntropyLoss(), a function, "
        'or a name, e.g. "cross_entropy"'),
    (lambda: Supervised(nn.Linear(3, 1), nn.MSELoss(reduction="sum")),
        "Supervised: the loss has reduction='sum', so it would depend on the number of "
        'replicas; use reduction="mean"'),
    (lambda: Supervised(nn.Linear(3, 1), partial(functional.l1_loss, reduction="none")),
        "Supervised: the loss has reduction='none', so it would depend on the number of "
        'replicas; use reduction="mean"'),
    (lambda: Supervised(nn.Linear(3, 1), "mse_loss", input="x"),
        "Supervised: input and target are the keys of a batch; pass both"),
    (lambda: Supervised(nn.Linear(3, 3), nn.CrossEntropyLoss(WEIGHTS), metrics={"hit": hit}),
        "task.metrics.hit is a mean over rows, and the loss one over targets that it weighs or "
        "ignores; use a metric of torchmetrics"),
    (lambda: Supervised(nn.Linear(3, 1), "mse_loss").training_step([X, AMOUNT, X]),
        "Supervised: a batch is a list of 3, not (input, target); name its keys by task.input and "
        "task.target"),
    (lambda: Supervised(nn.Linear(3, 1), "mse_loss").training_step({"x": X, "y": AMOUNT}),
        "Supervised: a batch is a dict of x, y, not (input, target); name its keys by task.input "
        "and task.target"),
    (lambda: Supervised(nn.Linear(3, 1), "mse_loss").training_step(X),
        "Supervised: a batch is a Tensor, not (input, target); name its keys by task.input and "
        "task.target"),
    (lambda: Supervised(nn.Linear(3, 1), "mse_loss", input="x", target="z").predict_step({"y": X}),
        "Supervised: a batch is a dict of y, not one with 'x' and 'z'; set task.input and "
        "task.target"),
    (lambda: Supervised(nn.Linear(3, 1).double(), "mse_loss").training_step((X, AMOUNT[:, 0])),
        "Supervised: the net gives [40, 1] and the target is [40], which the loss would "
        "broadcast; give both the same shape, e.g. by targets of [rows, 1]"),
    (lambda: Supervised(nn.Linear(3, 1).double(), nn.BCEWithLogitsLoss()).training_step((X, CLASS)),
        "Supervised: the net gives [40, 1] and the target is [40], which the loss would "
        "broadcast; give both the same shape, e.g. by targets of [rows, 1]"),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "line"), MISTAKES)
def test_a_mistake_in_its_parts_is_one_line(mistake, line):
    with pytest.raises(UserError) as caught:
        mistake()
    assert str(caught.value) == line


RECIPE = {
    "mine/rows.py": """
import torch
from torch.utils.data import TensorDataset

def part(begin, end):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x[begin:end], (x.sum(dim=1, keepdim=True) > 0).long()[begin:end])
""",
    "mine/recipe/large.yaml": """
# @package _global_
task:
  _target_: dpframe.Supervised
  net: {_target_: torch.nn.Linear, in_features: 3, out_features: 1}
  loss: binary_cross_entropy_with_logits
  metrics: {auroc: {_target_: torchmetrics.classification.BinaryAUROC}}
data:
  _target_: dpframe.DataSets
  train: {_target_: mine.rows.part, begin: 0, end: 40}
  val: {_target_: mine.rows.part, begin: 40, end: 60}
  test: {_target_: mine.rows.part, begin: 50, end: 60}
  batch_size: 8
trainer: {max_epochs: 2, precision: 64}
""",
}


def test_a_recipe_without_a_class_is_trained_resumed_tested_and_predicted_with(tmp_path):
    write(tmp_path, RECIPE)
    start = ["--config-dir=mine", "recipe=large", "logger=none"]
    ranks = dpframe(*start, "hydra.run.dir=two", "strategy=ddp", "trainer.gpus=2", cwd=tmp_path)
    assert ranks.returncode == 0, ranks.stderr
    test = ["mode=test", "hydra.run.dir=test"]
    done = attempts(
        [
            [*start, "hydra.run.dir=one"],
            [*start, "hydra.run.dir=half", "trainer.max_epochs=1"],
            [*start, "resume=half", "trainer.max_epochs=2"],
            [*start, *test, "checkpoint=one/checkpoints/last.ckpt"],
            [*start, "mode=predict", "hydra.run.dir=said", "checkpoint=one/checkpoints/last.ckpt"],
            [*start, "task.loss=mse", "hydra.run.dir=wrong"],
            [*start, "data.batch_sise=3", "hydra.run.dir=wrong"],
        ],
        tmp_path,
    )
    assert [one.code or 0 for one in done] == [0] * 5 + [2, 2], [one.err for one in done]
    runs = ("one", "two", "half", "test")
    one, two, half, tested = (
        json.loads((tmp_path / run / "summary.json").read_text())["metrics"] for run in runs
    )
    assert one["val/auroc"] > 0.5 and two == pytest.approx(one, rel=1e-12) and half == one
    assert {"test/loss", "test/auroc"} <= tested.keys()
    assert len((tmp_path / "said/predictions.csv").read_text().splitlines()) == 11
    wrong, unknown = (one.err.strip().splitlines()[-1] for one in done[-2:])
    assert wrong.endswith("task.loss=mse is no loss of torch.nn.functional; did you mean mse_loss?")
    assert unknown.endswith("DataSets takes no such argument; did you mean batch_size?")


def test_a_dataloader_trains_as_its_data_set_does():
    rows = TensorDataset(X.float(), AMOUNT.float())
    found = []
    for data, size in ((rows, {"batch_size": 5}), (DataLoader(rows, 5, shuffle=True), {})):
        torch.manual_seed(0)
        task = Supervised(nn.Linear(3, 1), "mse_loss", SGD)
        found.append(Trainer(task, data, rows, max_epochs=1, **size).fit())
    assert found[0]["train/loss"] == found[1]["train/loss"]
    assert found[0]["val/loss"] == pytest.approx(found[1]["val/loss"], rel=1e-6)
