"""Logical shares beside what the core tests know of: rows, layers, metrics, sets, checks."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import test_batches
import test_exact_layers
import test_task_metrics
import test_together
import torch
from forked import on
from small import Given, Hooks, Rows, Small, fitted
from test_callbacks import banner_of
from test_rows import Noisy, weights
from test_share_check import Squeezed, warned
from torch.utils.data import Subset

from dpframe import Trainer
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU


def test_shares_have_the_same_noise_as_replicas():
    apart = weights(Noisy, DataParallel(2, "cpu"))[0]
    for strategy in (CPU(), DataParallel(2, "cpu")):
        together = weights(Noisy, strategy, logical_replicas=4)[0]
        for name, weight in apart.items():
            torch.testing.assert_close(together[name], weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", [CPU(), DataParallel(3, "cpu"), DDP(2, "cpu")])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_shares_drop_the_rows_that_one_share_does(strategy, accumulate):
    given: dict[str, Any] = {"accumulate": accumulate, "exact_layers": False, "dropout": "row"}
    wanted = test_exact_layers.trained(CPU(), "vit", **given)
    shared = partial(test_exact_layers.trained, name="vit", logical_replicas=3, **given)
    test_exact_layers.check(*on(strategy, shared)[:2], *wanted[:2])


def test_rows_of_several_sets_are_the_same_in_shares():
    one, other = test_together.in_parts(CPU()), test_together.in_parts(CPU(), logical_replicas=4)
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=test_together.EXACT)


def test_ready_batches_are_refused():
    said = on(DDP(2, "cpu"), test_batches.refused, {"logical_replicas": 2})
    assert said.startswith("dpframe.Batches with trainer.logical_replicas: which rows meet in a")


def test_a_window_of_updates_is_refused():
    assert test_task_metrics.is_refused(CPU(), logical_replicas=2)


def test_the_banner_does_not_tell_of_rounding():
    assert "precision  32" in banner_of(2, 8, logical_replicas=2)


def test_no_step_is_tried_for_what_shares_may_change(caplog):
    fitted(Squeezed(), max_steps=1, logical_replicas=2)
    assert warned(caplog) == []


class DrawsInValidation(Small):
    def validation_step(self, batch):
        return {**super().training_step(batch), "noise": torch.rand(())}


def test_each_of_several_sets_draws_the_same_where_a_run_is_resumed():
    """By its own batches: those of the sets and passes before it are no part of what it draws."""
    rows, state = Rows().train_dataset(), {}
    sets = {"one": rows, "two": Subset(rows, range(10))}

    def measured(**given: Any) -> dict[str, float]:
        run = fitted(DrawsInValidation(), Given(rows, sets), logical_replicas=2, **given)
        return {name: run.metrics[f"val/{name}/noise"] for name in sets}

    def save(trainer: Trainer) -> None:
        state.update(state or deepcopy(trainer.state_dict()))

    wanted = measured(callbacks=[Hooks(on_epoch_end=save)])
    assert measured(resume=state) == wanted
