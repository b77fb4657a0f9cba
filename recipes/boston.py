"""Boston house prices: a small network on 13 numbers a tract, the smallest whole recipe."""

import csv
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

import dpframe

PACKAGED_FILE = Path(__file__).with_name("data") / "boston.csv"
HEADER = "CRIM,ZN,INDUS,CHAS,NOX,RM,AGE,DIS,RAD,TAX,PTRATIO,B,LSTAT,MEDV"
COLUMNS = HEADER.split(",")
LARGEST = torch.finfo(torch.float32).max


class Boston(dpframe.Task):
    """Regression on the median house price in $1000; the target is never normalised."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        error = self.net(x) - y
        return {"loss": error.square().mean(), "mae": error.abs().mean()}

    def predict_step(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self.net(batch[0])

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        # The root of the mean over all rows; a mean of batch roots would depend on the batches.
        return {**means, "rmse": math.sqrt(means["loss"])}


class BostonData(dpframe.DataSets):
    """404 rows to train on and 102 held out, the same ones whatever the run's seed."""

    def __init__(
        self,
        batch_size: int = 128,
        workers: int | str = 0,
        shuffle: bool = True,
        normalize: bool = True,
        split_seed: int = 0,
        file: str | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, workers=workers, shuffle=shuffle)
        self.normalize = normalize
        self.split_seed = split_seed
        self.file = file

    def setup(self) -> None:
        table = read_table(Path(self.file).expanduser() if self.file else PACKAGED_FILE)
        order = torch.randperm(len(table), generator=torch.Generator().manual_seed(self.split_seed))
        train, held_out = table[order].tensor_split([len(table) * 4 // 5])
        mean, scale = torch.zeros(1), torch.ones(1)
        if self.normalize:
            mean, scale = feature_statistics(train)
        self.mean, self.scale = mean, scale
        self.train = _dataset(train, mean, scale)
        # 506 rows are too few for a third part: validation and test are the same 102 rows, so the
        # best validation score of a run flatters it. Report the last epoch's, or mean over seeds.
        self.val = self.test = _dataset(held_out, mean, scale)

    def input_row(self, row: dict[str, float | str]) -> tuple[Tensor]:
        """Features by their names, in any order and beside others; normalised as in training."""
        missing = [name for name in COLUMNS[:-1] if not isinstance(row.get(name), float)]
        if missing:
            raise dpframe.UserError(f"there is no number in the columns {', '.join(missing)}")
        features = torch.tensor([row[name] for name in COLUMNS[:-1]], dtype=torch.float64)
        return (((features - self.mean) / self.scale).float(),)


def feature_statistics(table: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature; a constant one is left unscaled."""
    features = table[:, :-1]
    # A constant's deviation is seldom exactly zero: rounding leaves a tiny one.
    is_constant = features.amin(dim=0) == features.amax(dim=0)
    scale = features.std(dim=0, correction=0).masked_fill(is_constant, 1.0)
    return features.mean(dim=0), scale


def _dataset(table: Tensor, mean: Tensor, scale: Tensor) -> TensorDataset:
    features, target = table[:, :-1], table[:, -1:]  # [N, 1], as the network's output is
    return TensorDataset(((features - mean) / scale).float(), target.float())


def read_table(path: Path) -> Tensor:
    """All rows as float64, the target last."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(_rows(csv.reader(file), path))
    except OSError as error:
        raise dpframe.UserError(
            f"cannot read {path}: {error.strerror}; leave data.file=null for the packaged table"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise dpframe.UserError(f"{path} is not a CSV text file: {error}") from error
    if len(rows) < 2:
        raise dpframe.UserError(f"{path} has {len(rows)} rows; a split needs at least 2")
    return torch.tensor(rows, dtype=torch.float64)


def _rows(lines: Any, path: Path) -> Iterator[list[float]]:
    header: list[str] = next(lines, [])
    if header != COLUMNS:
        found = ",".join(header)[:100]
        raise dpframe.UserError(f"{path} line 1: the columns are {found!r}; they must be {HEADER}")
    for fields in lines:
        where = f"{path} line {lines.line_num}"
        if len(fields) == len(COLUMNS):
            yield [_number(*pair, where) for pair in zip(COLUMNS, fields, strict=True)]
        elif fields:  # a blank line is no row
            raise dpframe.UserError(f"{where}: {len(fields)} values, not {len(COLUMNS)}")


def _number(column: str, text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise dpframe.UserError(f"{where}, column {column}: {text!r} is not a number") from None
    if not abs(value) <= LARGEST:  # written so that NaN fails too
        raise dpframe.UserError(
            f"{where}, column {column}: {text!r} is not a finite float32 number"
        )
    return value
