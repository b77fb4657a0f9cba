"""A process takes memory on its own GPUs alone: fake ones note each context."""

from functools import partial
from pathlib import Path

import pytest
from forked import in_turn
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
@pytest.mark.parametrize(
    "strategies",
    [[SingleGPU([1], "cuda")], [DDP(2, "cuda"), FSDP(2, "cuda")]],
    ids=["one process", "ranks"],
)
def test_a_run_makes_no_context_on_a_gpu_that_is_not_its_own(
    strategies: list[Strategy], tmp_path: Path
) -> None:
    cases = [(strategy, trained, tmp_path / strategy.name) for strategy in strategies]
    assert in_turn(cases) == [10] * len(strategies)
