"""trainer.compile: which graphs are made for batches of several sizes, and what is in them."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest
import torch
from forked import fresh
from recorded import weights_apart
from small import Rows, Small, fitted
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpframe import Strategy
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.single import CPU
from dpframe.trainer.compute.compiled import Compiled


class Sized(Rows):
    """Batches of these sizes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(sum(sizes), val=False)
        rows = iter(range(sum(sizes)))
        self.batches = [[next(rows) for _ in range(size)] for size in sizes]

    def train_sampler(self, dataset: Dataset) -> list[list[int]]:
        return self.batches


class Weighs(Small):
    """A batch of 3 rows counts nothing, and its mean is NaN."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        weight = torch.tensor(len(y) - 3)
        error = (self.net(x)[:, 0] - y).square()
        return {"loss": (error * weight).sum() / weight, "weight": weight}


def shapes_of(
    strategy: Strategy, sizes: Sequence[int], make: type[Small]
) -> tuple[list[int | str], float]:
    """The rows of each graph that is called, or "any", and how far the weights are from those of an
    uncompiled run. A number in 64 bits among the inputs of a graph is refused."""
    called: list[int | str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        is_dynamic = any(isinstance(each, torch.SymInt) for each in inputs)
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        assert not any(each.dtype is torch.float64 for each in tensors), tensors
        given = next(each for each in tensors if not isinstance(each, nn.Parameter))
        rows = "any" if is_dynamic else int(given.shape[0])

        def call(*args: Any) -> Any:
            called.append(rows)
            return graph(*args)

        return call

    given = {"make": make, "data": Sized(*sizes), "strategy": strategy, "max_epochs": 2}
    with pytest.MonkeyPatch.context() as patched:
        compile = torch.compile

        @wraps(compile)
        def noted(call: Any, *, mode: str, **options: Any) -> Any:
            return compile(call, backend=backend, **options)

        patched.setattr(torch, "compile", noted)
        for _ in range(2):  # the runs of a sweep
            called.clear()
            mine = fitted(compile=True, **given)
    return called, weights_apart(mine.task.state_dict(), fitted(**given).task.state_dict())


@pytest.mark.parametrize(
    ("strategy", "sizes", "make", "called"),
    [
        (CPU(), (8, 8, 3), Weighs, [8, 8, 3]),
        (DataParallel(2, "cpu"), (7, 7, 4), Small, [4, 3, 4, 3, 2, 2]),
        (CPU(), (2, 3, 4, 5, 6, 7, 8, 9), Small, [2, 3, 4, 5, 6, "any", "any", "any"]),
    ],
    ids=["a shorter last batch", "uneven shares", "many sizes"],
)
def test_a_few_sizes_of_batches_are_compiled_by_themselves(strategy, sizes, make, called):
    mine, apart = fresh(shapes_of, strategy, sizes, make)
    assert mine == called * 2
    assert apart < 1e-6


@pytest.mark.parametrize(
    ("part", "dynamic"), [("a name", False), (True, False), (3, None), (0.5, None)]
)
def test_a_number_in_a_batch_is_left_to_torchs_own_choice(monkeypatch, part, dynamic):
    """Each value would have a graph of its own."""

    def compile(call: Any, *, dynamic: bool | None, isolate_recompiles: bool = True) -> Any:
        return lambda *args: dynamic

    monkeypatch.setattr(torch, "compile", compile)
    assert Compiled(dynamic=None)(None, [torch.zeros(3), part]) is dynamic
