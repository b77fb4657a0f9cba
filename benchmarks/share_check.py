"""What the share check takes: memory beside the weights, and seconds.

Each model is judged in a process of its own, once with an honest loss and once with a sum, which
is computed again in float64 where there is room for it.
"""

import multiprocessing
import resource
import time
from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from dpframe import Task
from dpframe.strategies.data_parallel import DataParallel
from dpframe.trainer.checks.share_check import judge
from dpframe.trainer.checks.trial import Trial
from dpframe.trainer.progress import Progress

WIDTH = 1024
MIB = 2**20
MODELS = {
    "trained": (0, torch.float32),
    "frozen": (1, torch.float32),
    "16 bits": (0, torch.bfloat16),
}


class Deep(Task):
    """Linear layers of 4 MiB each in float32, of which all or a few are trained."""

    def __init__(self, mib: int, frozen: float, dtype: torch.dtype, *, adds_up: bool) -> None:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(mib // 4)]
        super().__init__(nn.Sequential(*layers))
        self.net[: int(frozen * (len(layers) - 1))].requires_grad_(False)
        self.adds_up = adds_up
        self.to(dtype)

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        (x,) = batch
        for layer in self.net:
            x = x + 0.01 * layer(x)
        return {"loss": x.square().sum() if self.adds_up else x.square().mean()}


def measure(mib: int, frozen: float, dtype: torch.dtype, adds_up: bool) -> tuple[int, int, float]:
    """The bytes of the weights, those that the check took beside them, and its seconds."""
    data = TensorDataset(torch.randn(10, WIDTH))
    source: Any = SimpleNamespace(dataset=data, collate=default_collate)
    torch.set_num_threads(1)  # those of other programs would be waited for
    strategy = DataParallel(2, "cpu")
    strategy.setup()
    strategy.dtype = dtype
    results = []
    for size in (8, mib):  # the first one loads what torch computes by
        task = Deep(size, frozen, dtype, adds_up=adds_up)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        judge([(Trial(task, strategy, Progress()), source)], "on")
        seconds = time.perf_counter() - began
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        results.append((sum(each.nbytes for each in task.parameters()), grown, seconds))
    return results[-1]


def main() -> int:
    parser = ArgumentParser("python -m benchmarks.share_check", description=__doc__)
    parser.add_argument("--mib", type=int, default=1100, help="of the weights in float32")
    options = parser.parse_args()
    for name, (frozen, dtype) in MODELS.items():
        for adds_up in (False, True):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                taken = pool.apply(measure, (options.mib, frozen, dtype, adds_up))
            weights, grown, seconds = taken
            print(
                f"{name}, {'a sum' if adds_up else 'a mean'}: {weights / MIB:.0f} MiB of weights, "
                f"{1 + grown / weights:.2f} of them at most, {seconds:.2f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
