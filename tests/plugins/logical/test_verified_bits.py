"""The kit compares the bits of a recipe's shares with those of one process."""

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
from forked import fresh
from small import Rows
from test_logical import Norms

from dpframe import TrainerSettings
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.testing import Recipe, verify


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
