"""Prints what a step costs on this machine's GPU: dpframe beside a loop by hand, turn by turn.

`python benchmarks/gpu.py [--turns 5] [--only boston gpt]`; all compute with the same task,
the same data on the device, the same fused optimizer.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset, TensorDataset

from dpframe import Callback, DataModule, Strategy, Task, Trainer, TrainerSettings


class Clock(Callback):
    """Seconds a step, from the end of one to the end of another, the device's work included."""

    def __init__(self, contest: "Contest", device: torch.device) -> None:
        self.first, self.last = contest.warm_steps, contest.warm_steps + contest.steps
        self.device = device

    def on_step_end(self, trainer: Trainer) -> None:
        self.note(trainer.global_step)

    def note(self, step: int) -> None:
        if step not in (self.first, self.last):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if step == self.first:
            self.began = now
        else:
            self.seconds = (now - self.began) / (self.last - self.first)


@dataclass
class Contest:
    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, list[Tensor]], Tensor]
    rows: Callable[[], tuple[Tensor, ...]]
    batch_size: int
    optimizer: Callable[..., torch.optim.Optimizer]
    steps: int
    warm_steps: int = 30
    precision: str = "32"
    clip_norm: float | None = None


class Loss(Task):
    def __init__(self, contest: Contest) -> None:
        torch.manual_seed(0)
        super().__init__(contest.make(), contest.optimizer)
        self.contest = contest

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": self.contest.loss(self.net, batch)}


class Data(DataModule):
    def __init__(self, contest: Contest) -> None:
        super().__init__(contest.batch_size)
        self.train = TensorDataset(*contest.rows())

    def train_dataset(self) -> Dataset:
        return self.train


# The contestants


def by_hand(contest: Contest, device: torch.device) -> float:
    net = Loss(contest).net.to(device).train()
    weights = list(net.parameters())
    optimizer = contest.optimizer(weights, fused=True)
    tensors = [tensor.to(device) for tensor in contest.rows()]
    autocast: Callable[[], Any] = nullcontext
    if contest.precision == "bf16":
        autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16)
    clock, step, losses = Clock(contest, device), 0, []
    while step < clock.last:
        order = torch.randperm(len(tensors[0]), device=device)
        for rows in order.split(contest.batch_size):
            with autocast():
                loss = contest.loss(net, [tensor.index_select(0, rows) for tensor in tensors])
            loss.backward()
            if contest.clip_norm is not None:
                nn.utils.clip_grad_norm_(weights, contest.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            step += 1
            clock.note(step)
    assert torch.stack(losses).isfinite().all()
    return clock.seconds


def ours(contest: Contest, device: torch.device, *, compiles: Any = False) -> float:
    clock = Clock(contest, device)
    settings = TrainerSettings(
        max_epochs=None,
        max_steps=clock.last,
        precision=contest.precision,
        clip_norm=contest.clip_norm,
        compile=compiles,
    )
    strategy = Strategy(accelerator=device.type)
    with Trainer(
        Loss(contest), Data(contest), strategy=strategy, settings=settings, callbacks=[clock]
    ) as trainer:
        trainer.fit()
    return clock.seconds


CONTESTANTS: dict[str, Callable[..., float]] = {
    "by hand": by_hand,
    "dpframe": ours,
    "dpframe, trainer.compile.mode=reduce-overhead": partial(ours, compiles="reduce-overhead"),
}


# What they compute


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)
    )


def squared(net: nn.Module, batch: list[Tensor]) -> Tensor:
    return mse_loss(net(batch[0])[:, 0], batch[1])


class GPT(nn.Module):
    """As large as GPT-2 small, by default: 124 million weights."""

    def __init__(
        self,
        words: int = 50304,
        length: int = 1024,
        width: int = 768,
        heads: int = 12,
        deep: int = 12,
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        last = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(block, deep, last, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length, device = tokens.shape[1], tokens.device
        x = self.words(tokens) + self.positions(torch.arange(length, device=device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device)
        return self.blocks(x, mask, is_causal=True) @ self.words.weight.T


def next_word(net: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens = batch[0]
    return cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def rows_of_boston() -> tuple[Tensor, ...]:
    x = torch.randn(404, 13, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1)


CONTESTS = {
    "boston": Contest(
        "404 rows of 13, 13-16-32-1, batch 128, Adam",
        perceptron,
        squared,
        rows_of_boston,
        batch_size=128,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        steps=2000,
        warm_steps=200,
    ),
    "gpt": Contest(
        "GPT-2 small, bf16, 8 x 1024 tokens, AdamW, clipped",
        GPT,
        next_word,
        lambda: (torch.randint(50257, (64, 1025)),),
        batch_size=8,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        steps=40,
        precision="bf16",
        clip_norm=1.0,
    ),
}


def compare(contest: Contest, device: torch.device, turns: int) -> None:
    """The first turn of each is not counted: kernels are chosen and memory is taken in it."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(turns + 1):
        for name, run in CONTESTANTS.items():
            seconds[name].append(run(contest, device))
    least = median(seconds["by hand"][1:])
    print(f"\n{contest.name}\n\n| | ms a step | of by hand | range |\n|---|--:|--:|--:|")
    for name, (_, *counted) in seconds.items():
        low, middle, high = (1e3 * f(counted) for f in (min, median, max))
        share = middle / (1e3 * least)
        print(f"| {name} | {middle:.3f} | {share:.2f} | {low:.3f}-{high:.3f} |", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CONTESTS, default=list(CONTESTS))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device, and there is none", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    print(f"{name}, torch {torch.__version__}, {options.turns} turns each")
    for contest in options.only:
        compare(CONTESTS[contest], device, options.turns)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
