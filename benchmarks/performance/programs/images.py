"""Made-up images that a LeNet can learn, in the four files of Fashion-MNIST, and its network."""

import struct
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TRAIN_ROWS, TEST_ROWS, CLASSES, SIDE = 60_000, 1_000, 10, 28
BATCH_SIZE = 256
LEARNING_RATE = 0.2
PARTS = {"train": ("train", TRAIN_ROWS), "test": ("t10k", TEST_ROWS)}


def write(folder: Path) -> None:
    """A pattern a class, and noise over it."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(CLASSES, SIDE, SIDE, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in PARTS.values():
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        noise = torch.rand(rows, SIDE, SIDE, generator=generator)
        pixels = (patterns[labels] * 128 + noise * 127).to(torch.uint8)
        _write(folder / f"{name}-images-idx3-ubyte", pixels)
        _write(folder / f"{name}-labels-idx1-ubyte", labels.to(torch.uint8))


def _write(path: Path, values: Tensor) -> None:
    sizes = struct.pack(f">{1 + values.dim()}I", 0x800 + values.dim(), *values.shape)
    path.write_bytes(sizes + values.numpy().tobytes())


def datasets(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    return _read(folder, "train"), _read(folder, "test")


def _read(folder: Path, part: str) -> TensorDataset:
    name, rows = PARTS[part]
    images = bytearray((folder / f"{name}-images-idx3-ubyte").read_bytes())
    labels = bytearray((folder / f"{name}-labels-idx1-ubyte").read_bytes())
    pixels = torch.frombuffer(images, dtype=torch.uint8, offset=16).reshape(rows, 1, SIDE, SIDE)
    return TensorDataset(
        pixels.float() / 255, torch.frombuffer(labels, dtype=torch.uint8, offset=8).long()
    )


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
