"""What the programs train: recipe=boston, or with --images LeNet on made-up images."""

import struct
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

FILE = Path(__file__).resolve().parents[3] / "recipes" / "data" / "boston.csv"
ROWS = {"train": 60_000, "t10k": 1_000}  # made-up images, in the files of Fashion-MNIST
CLASSES, SIDE = 10, 28


Loss = Callable[[Tensor, Tensor], Tensor]


class Problem(NamedTuple):
    train: TensorDataset
    held_out: TensorDataset
    network: Callable[[], nn.Sequential]
    loss: Loss
    optimizer: Callable[..., torch.optim.Optimizer]  # of weights
    batch_size: int


def parser(description: str | None) -> ArgumentParser:
    parser = ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--images", type=Path, help="a folder of images, for LeNet")
    return parser


def problem(images: Path | None = None) -> Problem:
    if images is None:
        adam = partial(torch.optim.Adam, lr=0.01)
        return Problem(*houses(), perceptron, functional.mse_loss, adam, 128)
    sgd = partial(torch.optim.SGD, lr=0.2)
    parts = [read(images, name) for name in ROWS]
    return Problem(*parts, lenet, functional.cross_entropy, sgd, 256)


def houses() -> list[TensorDataset]:
    """The same 404 and 102 rows as the recipe's, scaled alike."""
    table = torch.from_numpy(numpy.loadtxt(FILE, delimiter=",", skiprows=1))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    train, held_out = table.tensor_split([len(table) * 4 // 5])
    mean, scale = train[:, :-1].mean(dim=0), train[:, :-1].std(dim=0, correction=0)
    return [
        TensorDataset(((part[:, :-1] - mean) / scale).float(), part[:, -1:].float())
        for part in (train, held_out)
    ]


def perceptron() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)
    )


def lenet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 20, kernel_size=3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(20, 50, kernel_size=5), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
    )


def read(folder: Path, part: str) -> TensorDataset:
    images = bytearray((folder / f"{part}-images-idx3-ubyte").read_bytes())
    labels = bytearray((folder / f"{part}-labels-idx1-ubyte").read_bytes())
    pixels = torch.frombuffer(images, dtype=torch.uint8, offset=16).reshape(-1, 1, SIDE, SIDE)
    return TensorDataset(
        pixels.float() / 255, torch.frombuffer(labels, dtype=torch.uint8, offset=8).long()
    )


def write_images(folder: Path) -> None:
    """A pattern a class, and noise over it."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(CLASSES, SIDE, SIDE, generator=generator)
    for part, rows in ROWS.items():
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        noise = torch.rand(rows, SIDE, SIDE, generator=generator)
        write(folder / f"{part}-images-idx3-ubyte", patterns[labels] * 128 + noise * 127)
        write(folder / f"{part}-labels-idx1-ubyte", labels)


def write(path: Path, values: Tensor) -> None:
    sizes = struct.pack(f">{1 + values.dim()}I", 0x800 + values.dim(), *values.shape)
    path.write_bytes(sizes + values.to(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    write_images(Path(sys.argv[1]))
