"""LeNet on 28x28 grey images: the network of Dive into Deep Learning's multi-GPU chapter."""

import gzip
import math
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

import dpframe
from dpframe.plugin import fraction

PACKAGED_FILE = Path(__file__).with_name("data") / "digits.csv.gz"
FASHION_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FASHION_SOURCE = "github.com/zalandoresearch/fashion-mnist, folder data/fashion"
SIDE = 28
CLASSES = 10


class LeNet(dpframe.Task):
    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
    ) -> None:
        super().__init__(lenet(), optimizer, scheduler)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = self.net(images)
        return {
            "loss": functional.cross_entropy(logits, labels),
            "accuracy": fraction(logits.argmax(dim=1) == labels),
        }

    def predict_step(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self.net(batch[0])


def lenet() -> nn.Sequential:
    """129,068 parameters, with torch's own initial weights, which scale with the layers' widths.

    The book draws them from N(0, 0.01): so small that almost no gradient reaches the first layers.
    On the packaged digits the loss then rests at ln 10 for 400 of the 690 steps of a default run.
    """
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


class LeNetData(dpframe.DataSets):
    """Fashion-MNIST from the folder `root`, or without one the packaged handwritten digits."""

    def __init__(
        self,
        batch_size: int = 64,
        workers: int | str = 0,
        shuffle: bool = True,
        root: str | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, workers=workers, shuffle=shuffle)
        self.root = root

    def setup(self) -> None:
        read = read_digits() if self.root is None else read_fashion(Path(self.root).expanduser())
        # Neither has a third part: validation and test are the same images, as in the book.
        self.train, self.val = read
        self.test = self.val

    def input_row(self, image: Tensor) -> tuple[Tensor]:
        """Light strokes on a dark ground, as the images of both sets are; in grey and resized."""
        grey = image.mean(dim=0)[None, None]
        size = (SIDE, SIDE)
        return (functional.interpolate(grey, size=size, mode="bilinear", antialias=True)[0],)


class ReportSpeed(dpframe.Callback):
    """Says at the end how good, how fast and on what; an epoch's time includes its validation."""

    def on_fit_start(self, trainer: "dpframe.Trainer") -> None:
        self.seconds: list[float] = []

    def on_epoch_start(self, trainer: "dpframe.Trainer") -> None:
        self.started = time.perf_counter()

    def on_epoch_end(self, trainer: "dpframe.Trainer") -> None:
        self.seconds.append(time.perf_counter() - self.started)

    def on_fit_end(self, trainer: "dpframe.Trainer") -> None:
        if not trainer.strategy.is_main or not self.seconds:
            return
        accuracy = trainer.metrics.get("val/accuracy", math.nan)
        mean = sum(self.seconds) / len(self.seconds)
        devices = ", ".join(trainer.strategy.devices)
        print(f"accuracy {accuracy:.3f}, {mean:.2f} seconds an epoch on {devices}")


def read_digits(side: int = SIDE) -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train on and 360 held out, the same ones whatever the run's seed.

    They have 8x8 pixels, and are enlarged to `side`.
    """
    text = gzip.decompress(PACKAGED_FILE.read_bytes())
    table = torch.tensor([int(value) for value in text.replace(b"\n", b",").split(b",") if value])
    table = table.reshape(-1, 65)
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    images = table[:, :-1].reshape(-1, 1, 8, 8).float() / 16
    images = functional.interpolate(images, size=side, mode="bilinear")
    rows = TensorDataset(images, table[:, -1].clone())
    cut = len(table) * 4 // 5
    return TensorDataset(*rows[:cut]), TensorDataset(*rows[cut:])


def read_fashion(root: Path) -> tuple[TensorDataset, TensorDataset]:
    paths = {name: _find(root / name) for part in FASHION_FILES.values() for name in part}
    missing = [name for name, path in paths.items() if not path.is_file()]
    if missing:
        raise dpframe.UserError(
            f"data.root={root} has no {', '.join(missing)} (plain or .gz); get them from"
            f" {FASHION_SOURCE}, or leave data.root=null for the packaged digits"
        )
    train, test = ([paths[name] for name in part] for part in FASHION_FILES.values())
    return read_labelled_images(*train), read_labelled_images(*test)


def read_labelled_images(images_path: Path, labels_path: Path) -> TensorDataset:
    images = read_idx(images_path, dimensions=3)
    labels = read_idx(labels_path, dimensions=1)
    if images.shape[1:] != (SIDE, SIDE):
        _refuse(images_path, f"its images are {images.shape[1]}x{images.shape[2]}, not 28x28")
    if len(labels) != len(images):
        _refuse(
            labels_path, f"{len(labels)} labels for the {len(images)} images of {images_path.name}"
        )
    if labels.max() >= CLASSES:
        position = int((labels >= CLASSES).nonzero()[0])
        _refuse(labels_path, f"label {labels[position]} at position {position} is not 0 to 9")
    return TensorDataset(images.unsqueeze(1).float().div_(255), labels.long())


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """The bytes of an IDX file: a magic number, its sizes as big-endian words, the bytes."""
    content = _content(path)
    header = 4 + 4 * dimensions
    if len(content) < header:
        _refuse(path, f"{len(content)} bytes, less than its {header}-byte header")
    magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
    if magic != 0x800 + dimensions:  # 8: unsigned bytes
        _refuse(path, f"it starts with 0x{magic:08x}, not 0x{0x800 + dimensions:08x}")
    if len(content) != header + math.prod(shape):
        promised = header + math.prod(shape)
        _refuse(path, f"{len(content)} bytes, not the {promised} its header promises")
    if len(content) == header:
        _refuse(path, "it holds nothing")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).reshape(shape)


def _find(path: Path) -> Path:
    zipped = path.with_name(f"{path.name}.gz")
    return zipped if zipped.is_file() and not path.is_file() else path


def _content(path: Path) -> bytearray:
    try:
        content = path.read_bytes()
        # By content, not by name: browsers and archivers unpack, or do not, as they please.
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        _refuse(path, f"gzip says: {error}")
    except OSError as error:
        raise dpframe.UserError(f"cannot read {path}: {error.strerror}") from error
    return bytearray(content)  # writable, as a tensor's memory must be


def _refuse(path: Path, reason: str) -> NoReturn:
    raise dpframe.UserError(f"{path} is damaged: {reason}; get it again from {FASHION_SOURCE}")
