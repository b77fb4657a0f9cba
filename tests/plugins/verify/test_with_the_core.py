"""The kit judges what the core tests know of: draws, sums, schedules, preparation, bits."""

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
from forked import fresh
from small import Rows, Small
from test_logical import Norms
from test_preparation import Prepared, prepared
from test_rows import THREE, Noisy
from torch import Tensor
from torch.optim import Adam

from dpframe import Task, TrainerSettings
from dpframe.recipes.boston import Boston, BostonData
from dpframe.schedules import WarmupCosine
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU
from dpframe.testing import Recipe, check_strategy, verify


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


class ByRank(Norms):
    """Its noise is a rank's own: no seed of a share decides it."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(7 + int(os.environ.get("RANK", 0)))

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return super().training_step((x + torch.randn(x.shape, generator=self.noise), y))


class ByTime(Norms):
    """Gradients of another kind each time."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        output = super().training_step(batch)
        return output | {"loss": output["loss"] * (1 + time.perf_counter_ns() % 1000)}


def verified(
    make: Any, strategy: Any = DataParallel, *on: Any, only: tuple[str, ...] = ("bits",)
) -> Any:
    settings = TrainerSettings(logical_replicas=4, threads=1)
    recipe = Recipe("mine", make, partial(Rows, 40, 10), settings)
    return verify(partial(strategy, *(on or (2, "cpu"))), recipe=recipe, only=only)["bits"]


def test_verify_passes_a_recipe_of_the_same_bits_and_says_where_others_differ():
    assert verified(Norms).result == "pass"
    finding = fresh(verified, ByRank, DDP)
    said = "mine has other bits than on one process, first in the forward of net.0 (Linear) on sha"
    assert (finding.result, finding.cause[: len(said)]) == ("FAIL", said)
    assert finding.cause.endswith("on share 2")  # the first of rank 1
    said = "mine has other bits than on one process, first in the gradient of net."
    assert verified(ByTime).cause.startswith(said)


@pytest.mark.gpu
def test_verify_looks_at_the_bits_of_gpus():
    gpus = min(2, torch.cuda.device_count())
    finding = fresh(partial(verified, only=("rows_once", "bits")), Reads, DDP, gpus, "cuda")
    assert finding.result == "pass", finding.cause


class Reads(Norms):
    """What cuBLAS reads at the first product, which is one of a course without shares."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        assert batch[0].device.type == "cpu" or "CUBLAS_WORKSPACE_CONFIG" in os.environ
        return super().training_step(batch)


@pytest.mark.gpu(2)
def test_two_gpus_of_a_process_pass_every_check_so_they_draw_different_numbers():
    assert check_strategy(DataParallel, gpus=2, accelerator="cuda").passed
