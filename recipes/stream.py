"""Stream: how long trips through a town take, from shards of files that ranks divide.

`python -m dpframe.recipes.stream FOLDER` writes them to files, for `data.folder=FOLDER`. Without
a folder a shard's rows are made where they are read.
"""

import csv
import gzip
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler

import dpframe

SHARDS = 32
HELD_OUT = 4
COLUMNS = ["hour", "is_weekend", "km", "rain", "minutes"]
HARMONICS = 6  # of the hour of the day


class Stream(dpframe.Task):
    """Predicts the logarithm of the minutes, so that errors count relative to a trip's length."""

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        width: int = 64,
    ) -> None:
        net = nn.Sequential(
            nn.Linear(2 * HARMONICS + 3, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 1),
        )
        super().__init__(net, optimizer, scheduler)

    def forward(self, trips: Tensor) -> Tensor:
        hour, is_weekend, km, rain = trips.unbind(dim=1)
        angles = [hour * (2 * math.pi * n / 24) for n in range(1, HARMONICS + 1)]
        clock = [wave for angle in angles for wave in (angle.sin(), angle.cos())]
        return self.net(torch.stack([*clock, is_weekend, km.log(), rain], dim=1))[:, 0]

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        trips, minutes = batch
        guess = self(trips)
        return {
            "loss": functional.mse_loss(guess, minutes.log()),
            "minutes": (guess.exp() - minutes).abs().mean(),  # off
        }

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self(batch[0]).exp()


class StreamData(dpframe.DataModule):
    """Shards of a few hundred trips each; the last ones are held out."""

    def __init__(
        self,
        batch_size: int = 128,
        workers: int | str = 0,
        shuffle: bool = True,
        divide_streams: bool = True,
        folder: str | None = None,
        shards: int = SHARDS,
    ) -> None:
        super().__init__(batch_size, workers, shuffle, divide_streams)
        self.folder = folder
        self.shards = shards

    def setup(self) -> None:
        self.all: list = [*range(self.shards)]
        if self.folder is not None:
            folder = Path(self.folder).expanduser()
            self.all = sorted(folder.glob("*.csv.gz"))
            if len(self.all) <= HELD_OUT:
                raise dpframe.UserError(
                    f"data.folder={folder} has {len(self.all)} files *.csv.gz, of which {HELD_OUT} "
                    f"are held out; write some by python -m dpframe.recipes.stream {folder}"
                )

    def train_dataset(self) -> "Trips":
        return Trips(self.all[:-HELD_OUT], shuffle=self.shuffle)

    def val_dataset(self) -> "Trips":
        return Trips(self.all[-HELD_OUT:])

    def test_dataset(self) -> "Trips":
        return Trips(self.all[-HELD_OUT:])


class Trips(dpframe.ShardedStream):
    """A row is a tensor of hour, is_weekend, km and rain, and the minutes."""

    def __init__(self, shards: list, shuffle: bool = False) -> None:
        self._shards = shards
        self.shuffle = shuffle

    def shards(self) -> list:
        """In another order each epoch, which is the same on all ranks."""
        order = torch.randperm(len(self._shards)) if self.shuffle else range(len(self._shards))
        return [self._shards[int(number)] for number in order]

    def read(self, shard: int | Path) -> Iterator[tuple[Tensor, Tensor]]:
        for *trip, minutes in trips_of(shard) if isinstance(shard, int) else read_file(shard):
            yield torch.tensor(trip), torch.tensor(minutes)


def read_file(path: Path) -> Iterator[list[float]]:
    with gzip.open(path, "rt", newline="") as file:
        lines = csv.reader(file)
        if (header := next(lines, [])) != COLUMNS:
            raise dpframe.UserError(
                f"{path}: the columns are {','.join(header)[:100]}; they must be "
                f"{','.join(COLUMNS)}"
            )
        yield from ([float(value) for value in line] for line in lines)


class ShowDay(dpframe.Callback):
    """Prints at the end how long 5 km take through the day."""

    def on_fit_end(self, trainer: "dpframe.Trainer") -> None:
        if not trainer.strategy.is_main:
            return
        print(f"\n5 km    {'on a weekday':26}at the weekend")
        for hour in range(0, 24, 2):
            trips = torch.tensor([[hour, is_weekend, 5, 0] for is_weekend in (0.0, 1.0)])
            with torch.no_grad():
                guesses = trainer.task.predict_step([trips.to(next(trainer.task.parameters()))])
            bars = [f"{'#' * round(minutes)} {minutes:.0f} min" for minutes in guesses.tolist()]
            print(f"{hour:2}:00   {bars[0]:26}{bars[1]}")
        print(flush=True)


# ---- the trips


def trips_of(shard: int) -> Iterable[list[float]]:
    """Always the same ones. It is slow around 8 and 17:30 on weekdays, and in the rain."""
    draw = random.Random(shard)
    for _ in range(draw.randint(300, 700)):
        hour, km = round(draw.uniform(0, 24), 2), round(draw.uniform(0.5, 15), 2)
        is_weekend, rain = float(draw.random() < 2 / 7), float(draw.random() < 0.2)
        rush = math.exp(-((hour - 8) ** 2) / 2) + math.exp(-((hour - 17.5) ** 2) / 4)
        day = math.exp(-((hour - 14) ** 2) / 30)
        speed = 45 - (8 * day if is_weekend else 10 * day + 18 * rush) - 7 * rain  # km/h
        minutes = (1.5 + 60 * km / speed) * draw.lognormvariate(0, 0.1)
        yield [hour, is_weekend, km, rain, round(minutes, 2)]


def write(folder: Path, shards: int = SHARDS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with gzip.open(folder / f"trips-{shard:03}.csv.gz", "wt", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *trips_of(shard)])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
