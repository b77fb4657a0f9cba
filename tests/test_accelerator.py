"""A process takes memory on its own GPUs alone: fake ones note each context."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from forked import on
from small import Adam, Small, Streamed, fitted

from dpframe import Strategy
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import SingleGPU


def trained(strategy: Strategy, folder: Path) -> int:
    """It draws numbers, reads a stream, and saves on a thread."""
    made = fitted(
        None,
        Streamed(20, 4),
        make=partial(Small, Adam, dropout=0.5),
        strategy=strategy,
        directory=folder,
        callbacks=[Checkpoint(every_n_steps=2, seconds_between=0)],
        max_epochs=2,
    )
    return made.global_step


@pytest.mark.gpu(2)
@pytest.mark.frees_by_waits
@pytest.mark.parametrize("strategy", [partial(SingleGPU, [1]), DDP, FSDP], ids=str)
def test_a_run_makes_no_context_on_a_gpu_that_is_not_its_own(
    strategy: Callable[..., Strategy], tmp_path: Path
) -> None:
    assert on(strategy(accelerator="cuda"), trained, tmp_path) == 10
