"""The data of a recipe, and the words that all of dpframe shares: a batch, a share, a split."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate


class DataModule:
    """The data of a recipe. `batch_size` is global: what one micro-step sees over all replicas.

    `workers` is the number of processes that read for each rank; "auto" measures how many pay off.
    """

    def __init__(self, batch_size: int = 32, workers: int | str = 0, shuffle: bool = True) -> None:
        self.batch_size = batch_size
        self.workers = workers
        self.shuffle = shuffle

    def setup(self) -> None:
        """Reads what the data sets need; runs once in every process, before they are asked for."""

    def train_dataset(self) -> Dataset | None:
        return None

    def val_dataset(self) -> Dataset | None:
        return None

    def test_dataset(self) -> Dataset | None:
        return None

    def predict_dataset(self) -> Dataset | None:
        return self.test_dataset()

    def train_sampler(self, dataset: Dataset) -> Iterable | None:
        """A Sampler or batch sampler of your own: its order is kept and split over the replicas."""
        return None

    def collate(self, rows: list) -> Any:
        return default_collate(rows)


class Share(NamedTuple):
    """One replica's part of a global batch; `rows` is 0 for a replica that was lent a row."""

    batch: Any
    rows: int


class Batch(NamedTuple):
    """A global batch: the shares of this process's replicas, and the rows over all replicas."""

    shares: list[Share]
    rows: int


def split(rows: Sequence, replicas: int) -> list[Sequence]:
    """Contiguous shares as torch.chunk makes them (30 on 4: 8 8 8 6); the last may be empty."""
    size = -(-len(rows) // replicas)
    return [rows[start * size : (start + 1) * size] for start in range(replicas)]


def move(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The same nest of lists, tuples and dicts with its tensors on `device`; floats as `dtype`."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, dtype if leaf.is_floating_point() else None, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return mapped(moved, value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nest of lists, tuples and dicts, with `function` applied to what is in it."""
    if isinstance(value, dict):
        return {key: mapped(function, part) for key, part in value.items()}
    if not isinstance(value, (list, tuple)) or hasattr(value, "to"):  # e.g. a PackedSequence
        return function(value)
    parts = [mapped(function, part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def leaves(value: Any) -> Iterator[Any]:
    """What is in a nest of dicts, lists and tuples, as `mapped` sees it."""
    if isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, (list, tuple)) and not hasattr(value, "to"):
        for part in value:
            yield from leaves(part)
    else:
        yield value
