"""Prints what a step costs on this machine's GPU: dpframe beside a loop by hand, turn by turn.

`python benchmarks/gpu.py [--turns 5] [--only boston gpt resnet]`; Lightning joins where installed.
All compute with the same task, the same data on the device, the same fused optimiser.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpframe import Callback, DataModule, Strategy, Task, Trainer, TrainerSettings


class Clock:
    """Seconds a step, from the end of one to the end of another, the device's work included."""

    def __init__(self, contest: "Contest", device: torch.device) -> None:
        self.first, self.last = contest.warm_steps, contest.warm_steps + contest.steps
        self.device = device

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
    is_channels_last: bool = False

    def task(self) -> "Loss":
        torch.manual_seed(0)
        net = self.make()
        if self.is_channels_last:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Loss(net, self)


class Loss(Task):
    def __init__(self, net: nn.Module, contest: Contest) -> None:
        super().__init__(net, contest.optimizer)
        self.contest = contest

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": self.contest.loss(self.net, batch)}


# The contestants


def by_hand(contest: Contest, device: torch.device) -> float:
    task = contest.task().to(device).train()
    weights = list(task.parameters())
    optimizer = contest.optimizer(weights, fused=True)
    tensors = [tensor.to(device) for tensor in contest.rows()]
    autocast = nullcontext
    if contest.precision == "bf16":
        autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16)  # type: ignore[assignment]
    clock, step, losses = Clock(contest, device), 0, []
    while step < clock.last:
        order = torch.randperm(len(tensors[0]), device=device)
        for rows in order.split(contest.batch_size):
            with autocast():
                loss = contest.loss(task.net, [tensor.index_select(0, rows) for tensor in tensors])
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


class Timed(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, trainer: Trainer) -> None:
        self.clock.note(trainer.global_step)


class Data(DataModule):
    def __init__(self, contest: Contest) -> None:
        super().__init__(contest.batch_size)
        self.train = TensorDataset(*contest.rows())

    def train_dataset(self) -> Dataset:
        return self.train


def ours(contest: Contest, device: torch.device, *, compiles: Any = False) -> float:
    clock = Clock(contest, device)
    strategy = Strategy(accelerator=device.type)
    strategy.setup()
    Trainer(
        contest.task(),
        Data(contest),
        strategy=strategy,
        settings=TrainerSettings(
            max_epochs=None,
            max_steps=clock.last,
            precision=contest.precision,
            clip_norm=contest.clip_norm,
            compile=compiles,
        ),
        callbacks=[Timed(clock)],
    ).fit()
    return clock.seconds


def lightning(contest: Contest, device: torch.device) -> float:
    import lightning as pl

    clock = Clock(contest, device)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task = contest.task()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return contest.loss(self.task.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return contest.optimizer(self.parameters(), fused=True)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.note(self.global_step)

    loader = DataLoader(
        TensorDataset(*contest.rows()), contest.batch_size, shuffle=True, pin_memory=True
    )
    pl.Trainer(
        max_steps=clock.last,
        max_epochs=-1,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if contest.precision == "bf16" else "32-true",
        gradient_clip_val=contest.clip_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader)
    return clock.seconds


def contestants() -> dict[str, Callable[..., float]]:
    found: dict[str, Callable[..., float]] = {
        "by hand": by_hand,
        "dpframe": ours,
        "dpframe, trainer.compile.mode=reduce-overhead": partial(ours, compiles="reduce-overhead"),
    }
    return found | ({"lightning": lightning} if find_spec("lightning") else {})


# What they compute


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)
    )


def squared(net: nn.Module, batch: list[Tensor]) -> Tensor:
    return mse_loss(net(batch[0])[:, 0], batch[1])


class Block(nn.Module):
    """Of a transformer, normalised before its parts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.first(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.second(x))


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
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(deep)))
        self.last = nn.LayerNorm(width)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.last(self.blocks(self.words(tokens) + self.places(places)))
        return x @ self.words.weight.T


def next_word(net: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens = batch[0]
    return cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Bottleneck(nn.Module):
    def __init__(self, wide: int, narrow: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *convolution(wide, narrow, 1),
            nn.ReLU(inplace=True),
            *convolution(narrow, narrow, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(narrow, 4 * narrow, 1),
        )
        is_same = wide == 4 * narrow and stride == 1
        self.beside = (
            nn.Identity() if is_same else nn.Sequential(*convolution(wide, 4 * narrow, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.beside(x))


def convolution(wide: int, narrow: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return (
        nn.Conv2d(wide, narrow, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(narrow),
    )


def resnet(deep: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50, by default."""
    layers: list[nn.Module] = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    wide = 64
    for index, blocks in enumerate(deep):
        for number in range(blocks):
            narrow = 64 * 2**index
            layers.append(Bottleneck(wide, narrow, 2 if index and not number else 1))
            wide = 4 * narrow
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 1000))


def classes(net: nn.Module, batch: list[Tensor]) -> Tensor:
    images = batch[0].contiguous(memory_format=torch.channels_last)
    return cross_entropy(net(images), batch[1])


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
    "resnet": Contest(
        "ResNet-50, bf16, channels last, 64 x 224 x 224, SGD",
        resnet,
        classes,
        lambda: (torch.randn(512, 3, 224, 224), torch.randint(1000, (512,))),
        batch_size=64,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        steps=40,
        precision="bf16",
        is_channels_last=True,
    ),
}


def compare(contest: Contest, device: torch.device, turns: int) -> None:
    """The first turn of each is not counted: kernels are chosen and memory is taken in it."""
    found = contestants()
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(turns + 1):
        for name, run in found.items():
            taken = run(contest, device)
            if turn:
                seconds[name].append(taken)
    least = median(seconds["by hand"])
    print(f"\n{contest.name}\n\n| | ms a step | of by hand | range |\n|---|--:|--:|--:|")
    for name, all_of_it in seconds.items():
        low, middle, high = (1e3 * f(all_of_it) for f in (min, median, max))
        share = middle / (1e3 * least)
        print(f"| {name} | {middle:.3f} | {share:.2f} | {low:.3f}-{high:.3f} |", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CONTESTS, default=list(CONTESTS))
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device, and there is none", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", module="lightning")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    device = torch.device("cuda", 0)
    print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {given.turns} turns each"
    )
    for name in given.only:
        compare(CONTESTS[name], device, given.turns)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
