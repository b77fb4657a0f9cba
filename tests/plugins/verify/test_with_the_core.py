"""The kit judges what the core tests know of: draws, sums, schedules, preparation, bits."""

from functools import partial
from typing import Any

import pytest
import torch
from small import Rows, Small
from test_preparation import Prepared, prepared
from test_rows import THREE, Noisy
from torch import Tensor
from torch.optim import Adam

from dpframe import Task
from dpframe.recipes.boston import Boston, BostonData
from dpframe.schedules import WarmupCosine
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU
from dpframe.testing import Recipe, check_strategy


@pytest.mark.parametrize("strategy", [THREE, partial(DDP, 2, "cpu")])
def test_the_kit_draws_as_a_run_does(strategy):
    recipe = Recipe("noisy", Noisy, partial(Rows, 30, 4))
    check_strategy(strategy, recipe=recipe, only=["weights", "loss_curve", "evaluation"])


class Summed(Task):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 1), Adam)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        error = (self.net(batch[0])[:, 0] - batch[1]).square().sum()
        return {"loss": error * self.batch_rows / len(batch[0])}


def test_the_kit_takes_a_sum_over_the_whole_batch():
    recipe = Recipe("summed", Summed, partial(Rows, 30, 4))
    only = ["weights", "loss_curve", "mean_over_rows"]
    check_strategy(THREE, recipe=recipe, only=only)


def test_the_kit_takes_a_schedule_for_a_part_of_the_maths():
    def task() -> Task:
        made = Boston(torch.nn.Linear(13, 1), partial(torch.optim.SGD, lr=1e-3))
        made.lr_schedule = WarmupCosine(warmup=0.2)
        return made

    only = ["weights", "loss_curve"]
    report = check_strategy(CPU, recipe=Recipe("mine", task, BostonData), only=only)
    assert "mine" in report["weights"].compared


def test_the_kit_prepares_once_for_all_that_it_trains(tmp_path):
    recipe = Recipe("prepared", Small, partial(Prepared, tmp_path))
    check_strategy(CPU, recipe=recipe, only=["loss_curve"])
    assert len(prepared(tmp_path)) == 1


@pytest.mark.gpu(2)
def test_two_gpus_of_a_process_pass_every_check_so_they_draw_different_numbers():
    assert check_strategy(DataParallel, gpus=2, accelerator="cuda").passed
