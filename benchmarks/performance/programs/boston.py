"""The data and the network of recipe=boston, as a script of one's own has them."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils.data import TensorDataset

FILE = Path(__file__).resolve().parents[3] / "recipes" / "data" / "boston.csv"
BATCH_SIZE = 128
LEARNING_RATE = 0.01


def options(description: str | None) -> Namespace:
    parser = ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--bare", action="store_true", help="without what the framework adds")
    parser.add_argument("--saves", action="store_true", help="a checkpoint each epoch")
    return parser.parse_args()


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """The same 404 and 102 rows as the recipe's, scaled alike."""
    table = torch.from_numpy(numpy.loadtxt(FILE, delimiter=",", skiprows=1))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    train, held_out = table.tensor_split([len(table) * 4 // 5])
    mean, scale = train[:, :-1].mean(dim=0), train[:, :-1].std(dim=0, correction=0)
    return tuple(
        TensorDataset(((part[:, :-1] - mean) / scale).float(), part[:, -1:].float())
        for part in (train, held_out)
    )


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)
    )
