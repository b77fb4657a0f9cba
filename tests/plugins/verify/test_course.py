"""A recipe's curve with BatchNorm and dropout: compared as it is, or said to be left out."""

from functools import partial
from typing import Any

import pytest
import torch
from planted import MeanOfMeans
from torch import Tensor, nn
from torch.optim import SGD, Adam

from dpframe import Task, TrainerSettings
from dpframe.plugins.verify.course import Normed, Small, Table, own_layers
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU
from dpframe.testing import Recipe, check_strategy, verify

TWO = {"gpus": 2, "accelerator": "cpu"}
CURVES = ["weights", "loss_curve", "metrics", "checkpoint"]
EXACT = TrainerSettings(exact_layers=True)
OWN = "1 BatchNorm and 1 Dropout layers see each replica's rows alone: "
KEYS = "trainer.batch_norm=global trainer.dropout=row"


class Encoded(Task):
    """Its rows are another dimension than the first one."""

    def __init__(self, attention: float = 0.0) -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3), partial(SGD, lr=0.01))
        self.net.self_attn.dropout = attention
        self.norm = nn.BatchNorm1d(4)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch[:2]
        sequence = x.T[:, :, None] * torch.arange(1, 5).to(x)
        encoded = self.norm(self.net(sequence).movedim(0, -1).mean(-1))
        return {"loss": (encoded.sum(1) - y).square().mean()}


@pytest.mark.parametrize(
    ("strategy", "arguments", "task"),
    [(CPU, {}, Normed), (DataParallel, TWO, Encoded), (DDP, TWO, Encoded), (FSDP, TWO, Encoded)],
)
def test_a_curve_with_batch_norm_and_dropout_is_compared_as_it_is(strategy, arguments, task):
    recipe = Recipe("mine", task, Table, EXACT)
    report = check_strategy(strategy, recipe=recipe, only=CURVES, **arguments)
    assert "8 of mine" in report["weights"].compared
    assert {each.result for each in report.findings} == {"pass"}
    assert str(report).endswith("4 of 4 checks passed")


def test_the_mask_of_another_row_fails():
    recipe = Recipe("mine", Normed, Table, EXACT)
    report = verify(partial(Swaps, **TWO), recipe=recipe, only=[*CURVES, "exact_layers"])
    assert {each.check for each in report.failed} == {*CURVES[:3], "exact_layers"}


class Swaps(DataParallel):
    """The replicas take each other's places."""

    def to_device(self, shares: Any) -> Any:
        if len(shares) == 2 and len({share.rows for share in shares}) == 1:
            first, second = shares
            shares = [
                first._replace(places=second.places),
                second._replace(places=first.places),
            ]
        return super().to_device(shares)


@pytest.mark.parametrize(
    ("settings", "own", "has_curve"),
    [
        (TrainerSettings(), OWN + KEYS, False),
        (
            TrainerSettings(batch_norm="global"),
            "1 Dropout layer sees each replica's rows alone: trainer.dropout=row",
            True,
        ),
        (
            TrainerSettings(dropout="row"),
            "1 BatchNorm layer sees each replica's rows alone: trainer.batch_norm=global",
            False,
        ),
    ],
)
def test_what_is_each_replicas_own_is_left_out_by_choice_and_never_passed(settings, own, has_curve):
    recipe = Recipe("mine", Normed, Table, settings)
    report = check_strategy(DataParallel, recipe=recipe, only=CURVES, **TWO)
    assert [report[check].result for check in CURVES[:3]] == [f"by choice: {own}"] * 3
    assert ("8 of mine" in report["metrics"].compared) == has_curve
    assert str(report).endswith("1 of 4 checks passed, 3 left out by choice")


def noisy(task: Any, batch: Any) -> dict[str, Any]:
    return Small.training_step(task, [batch[0] + torch.randn_like(batch[0]), *batch[1:]])


class Noisy(Small):
    training_step = noisy


DIFFERS = "the loss of the same 5 rows differs by what it draws"


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Noisy, f"{DIFFERS} at random: the step (randn_like)"),
        (partial(Encoded, 0.1), "of each replica's own: net.self_attn (dropout)"),
    ],
)
def test_what_no_key_mends_is_counted_apart(task, why):
    recipe = Recipe("mine", task, Table, EXACT)
    report = check_strategy(DataParallel, recipe=recipe, only=CURVES, **TWO)
    assert report["weights"].result == f"left out: {why}"
    assert str(report).endswith("1 of 4 checks passed, 3 left out")


class Most(Small):
    def training_step(self, batch: Any) -> dict[str, Any]:
        return super().training_step(batch) | {"most": self._error(batch).abs().max()}


def test_a_metric_that_is_no_mean_is_left_out_of_the_metrics_alone():
    report = check_strategy(DataParallel, recipe=Recipe("mine", Most, Table), only=CURVES, **TWO)
    assert report["metrics"].result == "left out: most: no mean over rows"
    assert str(report).endswith("3 of 4 checks passed, 1 left out")


def test_one_replica_has_no_statistics_of_its_own():
    recipe = Recipe("mine", Normed, Table, TrainerSettings(dropout="row"))
    assert own_layers(Normed(), recipe, 1).is_empty
    assert not own_layers(Normed(), recipe, 2).is_empty
    assert own_layers(Encoded(), Recipe("mine", Encoded, Table, EXACT), 2).is_empty


def test_batch_norm_on_one_replica_is_compared_whatever_its_key():
    recipe = Recipe("mine", Normed, Table, TrainerSettings(dropout="row"))
    report = check_strategy(CPU, recipe=recipe, only=CURVES)
    assert str(report).endswith("4 of 4 checks passed")


class Adaptive(Normed):
    """Adam divides by the gradient of the bias before BatchNorm, which is 0 but for rounding."""

    def configure_optimizer(self) -> Any:
        return Adam(self.parameters(), lr=0.01)


@pytest.mark.parametrize("strategy", [DataParallel, DDP])
def test_what_an_optimizer_makes_of_rounding_before_a_batch_norm_passes(strategy):
    recipe = Recipe("mine", Adaptive, Table, EXACT)
    report = check_strategy(strategy, recipe=recipe, only=CURVES, **TWO)
    assert 1e-12 < float(report["weights"].measured) < 1e-8
    assert any("the order of a sum" in note for note in report.notes)


def test_a_failure_is_told_before_what_is_left_out():
    recipe = Recipe("mine", Normed, Table, TrainerSettings(batch_norm="global"))
    report = verify(partial(MeanOfMeans, **TWO), recipe=recipe, only=CURVES)
    assert report["weights"].result == "FAIL" and report["loss_curve"].result == "FAIL"
